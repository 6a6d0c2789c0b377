"""One step as lanes, for a picture: what the device does and what the host does, from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trueup.migration.profile.classes import FRAMEWORK, HOST, named_class
from trueup.migration.profile.intervals import Intervals
from trueup.migration.profile.reading import Trace

GAP = 200.0  # microseconds between two operators that are still Python calling PyTorch; a longer one is other work
WAITING = "(Python between operators)"
WORKING = "(Python alone)"
NARROW = 1 / 800  # of a step: what is closer together and of one class is one bar


@dataclass(frozen=True, slots=True)
class Bar:
    """Something of one class: where it begins and how long it is, as shares of the step; the longest name in it, how many there
    are, and microseconds."""

    start: float
    length: float
    kind: str
    name: str
    calls: int
    time: float


@dataclass(frozen=True, slots=True)
class Lane:
    """What one side did in a step."""

    name: str
    bars: tuple[Bar, ...]


Units = tuple[Intervals, list[str], list[str]]


def lanes(trace: Trace, window: Intervals, host: Units) -> tuple[Lane, ...]:
    """Return the lanes of the middle one of the steps by length; ``host``: the host's units, their classes and names."""
    steps = trace.steps.intervals() if len(trace.steps) else window
    start, end = steps[np.argsort(steps[:, 1] - steps[:, 0])[len(steps) // 2]].tolist()
    names = [trace.names[name] for name in trace.device.name]
    device = trace.device.intervals(), [named_class(name) for name in names], names
    host = host if names else _with_gaps(host, start, end)  # beside a device, Python's time costs only where the device is idle
    sides: list[tuple[str, Units]] = [("device", device), ("host", host)] if names else [("host", host)]
    return tuple(Lane(name, _bars(*side, start, end)) for name, side in sides if end > start)


def _with_gaps(host: Units, start: float, end: float) -> Units:
    """Return the host's units with the times between them, in which Python runs: a class of its own from `GAP` on."""
    spans, kinds, names = host
    edges = np.concatenate([[[start, start]], spans[(spans[:, 1] > start) & (spans[:, 0] < end)], [[end, end]]])
    gaps = np.stack([edges[:-1, 1], edges[1:, 0]], 1)
    gaps = gaps[gaps[:, 1] > gaps[:, 0]]
    long = (gaps[:, 1] - gaps[:, 0] >= GAP).tolist()
    return (
        np.concatenate([spans, gaps]),
        [*kinds, *(HOST if one else FRAMEWORK for one in long)],
        [*names, *(WORKING if one else WAITING for one in long)],
    )


def _bars(spans: Intervals, kinds: Sequence[str], names: Sequence[str], start: float, end: float) -> tuple[Bar, ...]:
    inside = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < end))
    width, found, longest = end - start, list[Bar](), 0.0
    for at in inside[np.argsort(spans[inside, 0], kind="stable")].tolist():
        begins, ends = max(float(spans[at, 0]), start), min(float(spans[at, 1]), end)
        left, right = (begins - start) / width, (ends - start) / width
        last = found[-1] if found else None
        if last is not None and last.kind == kinds[at] and left - last.start - last.length < NARROW:
            name = names[at] if ends - begins > longest else last.name
            longest = max(longest, ends - begins)
            reach = max(last.start + last.length, right)
            found[-1] = Bar(last.start, reach - last.start, last.kind, name, last.calls + 1, last.time + ends - begins)
        else:
            found.append(Bar(left, right - left, kinds[at], names[at], 1, ends - begins))
            longest = ends - begins
    return tuple(found)
