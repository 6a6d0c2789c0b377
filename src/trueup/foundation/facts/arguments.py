"""What a call is given beside tensors, as it was recorded: a JSON object by name."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np

INCIDENTAL = frozenset({"group", "group_desc", "async_op", "tag"})
"""What a collective is told beside its ranks: names that a run gives its groups, and when to wait."""


@lru_cache(maxsize=4096)
def decoded(arguments: str | None) -> dict[str, Any]:
    """Return a call's non-tensor arguments by name, to be left as they are; nothing where the text is none."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):  # truncated, as very long arguments are, or nested beyond reason
        return {}
    return read if isinstance(read, dict) else {}


def equal_arguments(first: str | None, second: str | None) -> bool:
    """Tell whether two calls are given the same; texts that cannot be read are compared as they are."""
    try:
        return equal_values(json.loads(first or "{}"), json.loads(second or "{}"))
    except (ValueError, RecursionError):
        return first == second


def equal_values(first: Any, second: Any) -> bool:
    """Tell whether two decoded arguments are the same, floats to the last digits of a printed double."""
    if isinstance(first, float) or isinstance(second, float):
        try:
            return bool(np.isclose(float(first), float(second), rtol=1e-12, atol=0, equal_nan=True))
        except (TypeError, ValueError):
            return bool(first == second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal_values(first[k], second[k]) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal_values, first, second))
    return bool(first == second)


AXES = frozenset({"dim", "dims", "axis", "dim0", "dim1", "axis0", "axis1"})
"""Arguments that number the axes of a tensor, from the first (0) on or back from the last (-1)."""


def from_first_axis(arguments: str | None, ndim: int) -> dict[str, Any]:
    """Return arguments with all axes of a tensor of ``ndim`` dimensions numbered from the first on."""
    return {name: _from_first(value, ndim) if name in AXES else value for name, value in decoded(arguments).items()}


def _from_first(value: Any, ndim: int) -> Any:
    if isinstance(value, list):
        return [_from_first(one, ndim) for one in value]
    return value + ndim if isinstance(value, int) and -ndim <= value < 0 else value


@lru_cache(maxsize=256)
def ranks_of(text: object) -> list[int] | None:
    """Return the ranks of ``0-3,7``, None where it is no such text."""
    if not isinstance(text, str):
        return None
    found: list[int] = []
    try:
        for run in text.split(","):
            first, _, last = run.partition("-")
            found += range(int(first), min(int(last or first), int(first) + (1 << 20)) + 1)
    except ValueError:
        return None
    return found


def shared(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Return two sides' arguments (JSON objects) without those that one of them has not: another tool keeps others."""
    try:
        sides = [json.loads(side or "{}") for side in (first, second)]
    except (ValueError, RecursionError):
        return first, second
    if not all(isinstance(side, dict) for side in sides):
        return first, second
    names = sorted(sides[0].keys() & sides[1].keys())
    found = [json.dumps({name: side[name] for name in names}) for side in sides]
    return found[0], found[1]


def what_matters(arguments: str | None) -> dict[str, Any] | str | None:
    """Return the arguments of a collective without those that do not matter to its result."""
    try:
        told = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return {name: value for name, value in told.items() if name not in INCIDENTAL} if isinstance(told, dict) else arguments


def other_numbers(first: str | None, second: str | None, rtol: float) -> bool:
    """Tell whether two calls are given a real number in the same place that is further away than by a relative difference."""
    return _differ(decoded(first), decoded(second), rtol)


def other_words(first: str | None, second: str | None) -> bool:
    """Tell whether two calls are given another word or switch (``"reflect"``, ``true``): no number, and no dtype or device."""
    sides = decoded(first), decoded(second)
    pairs = [[side.get(name) for side in sides] for name in sides[0].keys() | sides[1].keys()]
    return any(one != other and (_is_word(one) or _is_word(other)) for one, other in pairs)


def _is_word(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.isidentifier())


def _differ(first: Any, second: Any, rtol: float) -> bool:
    """Tell whether two decoded arguments hold a real number in the same place that is another one."""
    if isinstance(first, dict) and isinstance(second, dict):
        return any(_differ(first[name], second[name], rtol) for name in first.keys() & second.keys())
    if isinstance(first, list) and isinstance(second, list):
        return any(_differ(a, b, rtol) for a, b in zip(first, second, strict=False))
    numbers = all(isinstance(side, (int, float)) and not isinstance(side, bool) for side in (first, second))
    if not numbers or not (isinstance(first, float) or isinstance(second, float)):
        return False
    return not bool(np.isclose(first, second, rtol=rtol, atol=0, equal_nan=True))
