"""Gradients of weights where no optimizer was recorded: nothing reads them, so they are compared by what they are.

Two sides that run other calls end in the same gradients. Each is held against the nearest of its shape and dtype on the other side.
Where all of a call's agree within what goes into both explains, the call did no harm. Where they do not, nothing is said: the
nearest need not be its counterpart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache

import numpy as np

from trueup.comparison.graph.streams import Numbers, Stream
from trueup.comparison.verdict.regions import Region, Regions, explained
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.kernels import distance

MOST_PAIRS = 1 << 20
"""Distances that are taken for one shape; more are not looked at."""

Key = tuple[int, int]  # shape and dtype of a gradient
Walk = Callable[[int, int], Region]  # returns what goes into a call of a side


def settle(regions: Regions, criterion: Criterion) -> None:
    """Find the calls whose gradients of weights agree with what the other side computed."""
    if not all(regions.ends):
        return
    made = [_by_kind(stream, ends) for stream, ends in zip(regions.tree.streams, regions.ends, strict=True)]
    walked = cache(lambda side, call: regions.walk([(side, call)], covered=True))  # each once
    for side, (ends, settled) in enumerate(zip(regions.ends, regions.settled, strict=True)):
        near = made[1 - side]
        settled.update(call for call, slots in ends.items() if _agrees((side, call), slots, regions, near, walked, criterion))


def _by_kind(stream: Stream, ends: dict[int, list[int]]) -> dict[Key, Numbers]:
    found: defaultdict[Key, list[int]] = defaultdict(list)
    for k in sorted(k for slots in ends.values() for k in slots if stream.measured[k]):
        found[_key(stream, k)].append(k)
    return {key: np.array(slots, np.int64) for key, slots in found.items()}


def _key(stream: Stream, k: int) -> Key:
    return int(stream.shapes.squeezed[k]), int(stream.dtype[k])


def _agrees(
    end: tuple[int, int], slots: list[int], regions: Regions, made: dict[Key, Numbers], walked: Walk, criterion: Criterion
) -> bool:
    side, call = end
    mine, other = regions.tree.streams[side], regions.tree.streams[1 - side]
    for k in slots:
        near = made.get(_key(mine, k)) if mine.measured[k] else None
        if near is None or len(near) * len(slots) > MOST_PAIRS:
            return False
        apart = distance(mine.sketch[k], other.sketch[near])
        if np.isnan(apart).all():
            return False
        best = int(np.nanargmin(apart))
        norm = max(float(mine.l2[k]), float(other.l2[near[best]]))
        sources = walked(side, call), walked(1 - side, int(other.call[near[best]]))
        if not all(region.known for region in sources):
            return False
        worst, unit = max(region.worst for region in sources), max(region.unit for region in sources)
        calls = max(sum(map(len, region.calls)) for region in sources)
        if apart[best] > norm * explained(criterion.rows[-1], unit, calls, worst):
            return False
    return True
