"""Whether the two sides of matched calls were given the same beside tensors: numbers, flags, names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from trueup.comparison.graph.streams import Numbers, Stream
from trueup.comparison.measures.foreign import shared

INCIDENTAL = frozenset({"group", "group_desc", "async_op", "tag"})
"""What a collective is told beside its ranks: names that a run gives its groups, and when to wait."""


def differing_arguments(
    streams: tuple[Stream, Stream], calls: tuple[Numbers, Numbers]
) -> Iterator[tuple[int, tuple[str | None, str | None]]]:
    """Yield the matched calls whose non-tensor arguments differ, with both sides'."""
    (baseline, candidate), (b, c) = streams, calls
    collective = candidate.names.number("collective")
    for n in np.flatnonzero(baseline.arguments[b] != candidate.arguments[c]):
        sides = baseline.value(int(baseline.arguments[b[n]])), candidate.value(int(candidate.arguments[c[n]]))
        if baseline.imported or candidate.imported:
            sides = shared(*sides)
        if sides[0] != sides[1] and (candidate.phase[c[n]] != collective or _told(sides[0]) != _told(sides[1])):
            yield int(n), sides


def _told(arguments: str | None) -> dict[str, Any] | str | None:
    """Return the arguments of a collective without those that do not matter to its result."""
    try:
        told = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return {name: value for name, value in told.items() if name not in INCIDENTAL} if isinstance(told, dict) else arguments


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
