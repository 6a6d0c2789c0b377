"""Results that only a later step reads: what two sides with other calls wrote into weights and states, compared by what it is.

A fused optimizer writes in one call what its parts write in ten, and in the last captured step nobody reads it. Each such result is
held against the nearest of the same shape on the other side; so are gradients of weights where no optimizer was recorded. Where
all of a call's agree within what goes into both explains, the call did no harm. Where they do not, nothing is said: the nearest
need not be its counterpart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from trueup.comparison.graph.streams import Numbers, Stream, is_output
from trueup.comparison.verdict.criteria import Criterion
from trueup.comparison.verdict.judged import LASTING
from trueup.comparison.verdict.regions import Region, Regions, explained
from trueup.kernels import distance

MOST_PAIRS = 1 << 20
"""Distances that are taken for one shape; more are not looked at."""

Key = tuple[int, int]
"""Shape and dtype of a result."""

Walk = Callable[[int, int], Region]
"""Returns what goes into a call of a side."""


@dataclass(slots=True)
class _Written:
    """What the loose calls of one side wrote, by shape and dtype."""

    stream: Stream
    calls: list[int]
    slots: dict[Key, Numbers]


def settle(regions: Regions, criterion: Criterion) -> None:
    """Find the calls whose results agree with what the other side wrote."""
    written = [_written(regions, side) for side in (0, 1)]
    if not all(side.calls for side in written):
        return
    walked = cache(lambda side, call: regions.walk([(side, call)], covered=call in regions.ends[side]))  # each once
    for side, (mine, settled) in enumerate(zip(written, regions.settled, strict=True)):
        ends = regions.ends[side]
        settled.update(call for call in mine.calls if _agrees(call, side, ends.get(call), written, walked, criterion))


def _written(regions: Regions, side: int) -> _Written:
    stream, loose = regions.tree.streams[side], regions.loose[side]
    lasting = np.r_[stream.during(*LASTING), False] & loose
    ends = regions.ends[side]
    chosen = stream.names.table(is_output)[stream.slot] & lasting[stream.call]
    chosen[[k for slots in ends.values() for k in slots]] = True
    outputs = np.flatnonzero(chosen & stream.measured)
    slots: defaultdict[Key, list[int]] = defaultdict(list)
    for k in outputs.tolist():
        slots[_key(stream, k)].append(k)
    calls = [*np.flatnonzero(lasting).tolist(), *ends]
    return _Written(stream, calls, {key: np.array(found, np.int64) for key, found in slots.items()})


def _key(stream: Stream, k: int) -> Key:
    return int(stream.shapes.squeezed[k]), int(stream.dtype[k])


def _agrees(
    call: int, side: int, ends: list[int] | None, written: list[_Written], walked: Walk, criterion: Criterion
) -> bool:
    mine, other = written[side], written[1 - side]
    outputs = ends or _changed(mine.stream, call)
    if not outputs:
        return False
    row = criterion.rows[-1]
    for k in outputs:
        near = other.slots.get(_key(mine.stream, k)) if mine.stream.measured[k] else None
        if near is None or len(near) * len(outputs) > MOST_PAIRS:
            return False
        apart = distance(mine.stream.sketch[k], other.stream.sketch[near])
        if np.isnan(apart).all():
            return False
        best = int(np.nanargmin(apart))
        norm = max(float(mine.stream.l2[k]), float(other.stream.l2[near[best]]))
        regions = walked(side, call), walked(1 - side, int(other.stream.call[near[best]]))
        if not all(region.known for region in regions):
            return False
        worst = max(region.worst for region in regions)
        unit = max(region.unit for region in regions)
        calls = max(sum(map(len, region.calls)) for region in regions)
        if apart[best] > norm * explained(row, unit, calls, worst):
            return False
    return True


def _changed(stream: Stream, call: int) -> list[int]:
    """Return the outputs of a call, without those that are what it read: a fused optimizer names the gradients too.

    Where all of them are (a counter of steps that is 1 is what was added to it), all of them.
    """
    slots = np.arange(*stream.starts[call : call + 2].tolist())
    written = stream.names.table(is_output)[stream.slot[slots]]
    same = stream.has_digest[slots] & np.isin(stream.digest[slots], stream.digest[slots[~written & stream.has_digest[slots]]])
    changed = written & ~same
    return list(slots[changed if changed.any() else written].tolist())
