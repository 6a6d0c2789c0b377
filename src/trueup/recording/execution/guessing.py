"""How a call was made, as far as a capture of less detail than ``tensor`` tells: its slots, and its values as people read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trueup.recording.execution.places import NotReplayable
from trueup.recording.execution.recorded import RecordedCall

Named = Callable[[str], "dict[str, str] | None"]
"""What a text is that names something of the framework's: ``torch.float32`` is ``{"dtype": "float32"}``."""


def assumed(call: RecordedCall, named: Named) -> dict[str, Any]:
    """Return how a call was made as far as the slots and values of a capture of less detail tell.

    Raises:
        NotReplayable: they do not tell.
    """
    values = call.values
    if set(values) == {"length", "xxh3"}:
        raise NotReplayable("its arguments were too long to be kept")
    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    for slot in call.inputs:
        first, *rest = slot.split(".")[1:]
        place: Any = {"tensor": slot}
        for name in reversed(rest):
            place = {int(name): place} if name.isdigit() else {name: place}
        _merge(args, int(first), place) if first.isdigit() else _merge(kwargs, first, place)
    for name, value in values.items():
        into: Any = args if name.isdigit() else kwargs
        key: Any = int(name) if name.isdigit() else name
        into[key] = _with_tensors(_guessed(value, named), into.get(key))
    count = max(args, default=-1) + 1
    return {"args": [_listed(args.get(k)) for k in range(count)], "kwargs": {k: _listed(v) for k, v in kwargs.items()}}


def _merge(into: dict[Any, Any], key: Any, value: Any) -> None:
    known = into.get(key)
    if isinstance(known, dict) and isinstance(value, dict) and "tensor" not in known and "tensor" not in value:
        for inner, item in value.items():
            _merge(known, inner, item)
    else:
        into[key] = value


def _with_tensors(value: Any, tensors: Any) -> Any:
    if isinstance(value, list) and isinstance(tensors, dict):
        return [tensors.get(k, v) for k, v in enumerate(value)]
    return value


def _listed(value: Any) -> Any:
    if isinstance(value, dict) and value and all(isinstance(k, int) for k in value):
        return [_listed(value.get(k)) for k in range(max(value) + 1)]
    return value


def _guessed(value: Any, named: Named) -> Any:
    """Read back what `trueup.recording.recorder.arguments` wrote for people: text that names a dtype or a slice."""
    if isinstance(value, list):
        return [_guessed(v, named) for v in value]
    if not isinstance(value, str):
        return value
    if value == "ellipsis":
        return {"ellipsis": True}
    if (found := named(value)) is not None:
        return found
    parts = value.split(":")
    if len(parts) == 3 and all(p == "None" or p.lstrip("-").isdigit() for p in parts):
        return {"slice": [None if p == "None" else int(p) for p in parts]}
    return value
