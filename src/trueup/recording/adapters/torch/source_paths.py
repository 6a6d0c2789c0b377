"""Where the results of a call are found: told by executing it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trueup.recording.adapters.torch.recorded_call import Place, Rebuilt, rebuild
from trueup.recording.adapters.torch.replaying import with_host
from trueup.recording.execution.cases import Case

Path = tuple[int | str, ...]
"""How a result is reached: ``()`` the result itself, ``(0,)`` its first item, ``("input.0",)`` a tensor that was written."""


def paths_of(case: Case, place: Place, *, results: Sequence[str] = ()) -> tuple[dict[str, Path], frozenset[str]]:
    """Execute a case and tell where each of its results is found, and which arguments it writes.

    Args:
        case: the call.
        place: where.
        results: slots beside those that were recorded.

    Raises:
        Exception: whatever the function raises.
    """
    made = rebuild(case.made, with_host(place, case.made), grad=case.forward is not None)
    versions = {slot: t._version for slot, t in made.inputs.items()}
    with made.modes():
        result = made.function(*made.args, **made.kwargs)
    named = made._named(result)
    wanted = case.call.outputs if case.forward is None else {s.removeprefix("grad_"): 0 for s in case.call.inputs if "grad_" in s}
    slots = [slot for slot in dict.fromkeys([*wanted, *results]) if slot in named]
    paths = {slot: path for slot in slots if (path := _path(named[slot], result, made)) is not None}
    return paths, frozenset(slot for slot, t in made.inputs.items() if t._version != versions[slot])


def _path(tensor: torch.Tensor, result: Any, made: Rebuilt) -> Path | None:
    found = _within(tensor, result)
    if found is not None:
        return found
    return next(((slot,) for slot, given in made.inputs.items() if given is tensor), None)


def _within(tensor: torch.Tensor, value: Any) -> Path | None:
    if value is tensor:
        return ()
    items = enumerate(value) if isinstance(value, (tuple, list)) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        inner = _within(tensor, item)
        if inner is not None:
            return (key, *inner)
    return None
