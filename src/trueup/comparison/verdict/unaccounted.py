"""Calls that one run alone has, and that nothing on the other side stands for: what they computed was computed there by no call,
or not at all.

Two implementations of one formula execute other operators, and their results are compared where somebody reads them. That
explains an unmatched call only where the other side has calls of its own, or passes on what went in. It does not where

- nobody reads the result (an added dead end, a branch that was cut),
- the other side reads a result there that no call made, although what it is made of was computed in the same step,
- the function around it computes by operators on one side and by none on the other,
- it is the backward of a call that both sides made, and the other side's has none.

Data movement, comparisons and what returns a tensor that it was given compute nothing, and need no counterpart.

Gradients of weights, where no optimizer was recorded, are read by nothing and are compared by what they are (`settle`): each with
the nearest of its shape and dtype on the other side, which need not be its counterpart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from trueup.comparison.graph.streams import NONE, Numbers, Stream
from trueup.comparison.verdict.judged import Tree
from trueup.comparison.verdict.regions import Call, Region, Regions, explained
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.roundoff import roundoff
from trueup.foundation.facts.slots import is_input, is_output
from trueup.foundation.kernels import distance

Source = tuple[int, int]  # a matched call and a slot of it, or `NONE` and a digest
MOST_PAIRS = 1 << 20
"""Distances that are taken for one shape; more are not looked at."""

Key = tuple[int, int]  # shape and dtype of a gradient
Walk = Callable[[int, int], Region]  # returns what goes into a call of a side


def dead_ends(regions: Regions, criterion: Criterion) -> list[Call]:
    """Return the unmatched calls that compute what shows up nowhere else, in neither run. The gradients of functions and modules
    are summed outside of any of them: who reads those is not known. Where the other side has a calculation of its own on the same
    tensor, or of what becomes of it, it is another implementation that has a by-product."""
    tree, found, rewritten = regions.tree, [], regions.rewritten
    read: list[set[Source]] = []
    for side, call in regions.dead_ends():
        read = read or [_read_by_loose(regions, n, criterion) for n in (0, 1)]
        stream, other = tree.streams[side], tree.streams[1 - side]
        fine = stream.level[call] == stream.names.number("aten") or stream.phase[call] != stream.names.number("backward")
        made = stream.slots_of(call, is_output)
        seen = np.isin(stream.identity[made], other.identity[other.is_identified]) & stream.is_identified[made]
        made_of = regions.walk([(side, call)]).calls[side]
        part = not rewritten[side].isdisjoint(made_of) or not read[1 - side].isdisjoint(_sources(tree, side, call))
        read_back = bool((stream.numel[made] == 1).all()) and bool(regions.flow[side].backwards(call))  # a backward starts there
        if fine and not part and not read_back and computes(stream, call, criterion) and not seen.all():
            found.append((side, call))
    return found


def _read_by_loose(regions: Regions, side: int, criterion: Criterion) -> set[Source]:
    stream = regions.tree.streams[side]
    calls = [call for call in np.flatnonzero(regions.loose[side][:-1]).tolist() if computes(stream, call, criterion)]
    return {source for call in calls for source in _sources(regions.tree, side, call)}


def _sources(tree: Tree, side: int, call: int) -> set[Source]:
    """Return what a call reads, named alike on both sides: by the matched call that made it, or by its bytes."""
    stream = tree.streams[side]
    slots = stream.slots_of(call, is_input)
    made = tree.pairs[side][stream.producers[slots]]
    named = {(pair, int(stream.producer_slot[k])) for pair, k in zip(made.tolist(), slots.tolist(), strict=True) if pair != NONE}
    return named | {(NONE, int(stream.identity[k])) for k in slots.tolist() if stream.is_identified[k]}


def unaccounted(regions: Regions, criterion: Criterion) -> set[Call]:
    """Return the other unmatched calls that nothing on the other side stands for."""
    tree = regions.tree
    if tree.is_foreign:
        return set()
    return {*_from_nowhere(regions), *_without_operators(tree, criterion), *_without_backward(regions, criterion)}


def computes(stream: Stream, call: int, criterion: Criterion) -> bool:
    """Tell whether a call makes numbers that round and that it was not given."""
    made, given = _rounding(stream, call, criterion), stream.slots_of(call, is_input)
    same = stream.is_identified[made] & np.isin(stream.identity[made], stream.identity[given[stream.is_identified[given]]])
    return len(made) > 0 and not same.all()


def _rounding(stream: Stream, call: int, criterion: Criterion) -> Numbers:
    """Return the results of a call that may round, equal to what it was given or not (`x - 0`)."""
    made = stream.slots_of(call, is_output)
    made = made[stream.names.table(roundoff)[stream.dtype[made]] > 0]
    name = stream.names.names
    op, level, phase = (name[int(of[call])] for of in (stream.op, stream.level, stream.phase))
    return made[:0] if criterion.row(op, level, phase).own == "exact" else made


def _from_nowhere(regions: Regions) -> Iterator[Call]:
    """Yield the calls whose results the other side reads too, where they are what no call there made. What a region makes of
    weights and constants alone may have been made before the capture began."""
    for region in regions.found:
        side = 1 if region.sides[1] else 0
        if region.sides[0] == region.sides[1] or not _reads_results(regions.tree.streams[side], region.calls[side]):
            continue
        other = regions.tree.streams[1 - side]
        if any(_is_made_by_none(other, error.candidate if side == 0 else error.baseline) for _, error, _ in region.exits):
            yield from ((side, call) for call in region.calls[side])


def _reads_results(stream: Stream, calls: set[int]) -> bool:
    """Tell whether some calls read what another one computed before in these steps."""
    chosen = np.zeros(len(stream) + 1, bool)
    chosen[list(calls)] = True
    reads = chosen[stream.call] & stream.names.table(is_input)[stream.slot] & (stream.producer >= stream.seq[0])
    return bool((reads & ~chosen[stream.producers]).any())


def _is_made_by_none(stream: Stream, k: int) -> bool:
    """Tell whether no call made what a slot holds, in a capture that shows who made what: one of modules alone does not."""
    if int(stream.producer[k]) != NONE or stream.of_level("aten").any():
        return int(stream.producer[k]) == NONE
    return bool(((stream.producer > stream.seq[0]) & (stream.producers == NONE)).any())  # calls of a level that was not read


def _without_operators(tree: Tree, criterion: Criterion) -> Iterator[Call]:
    """Yield operators in a function that both sides called, and that has none on the other side which computes."""
    aten, api = (tree.streams[0].names.number(level) for level in ("aten", "api"))
    if not any(len(calls) and (s.level[calls] == aten).any() for s, calls in zip(tree.streams, tree.unmatched, strict=True)):
        return
    functions = np.flatnonzero(tree.streams[1].level[tree.verdicts.errors.calls[1]] == api)
    inside = [s.has_children[calls[functions]] for s, calls in zip(tree.streams, tree.verdicts.errors.calls, strict=True)]
    for side, (stream, calls) in enumerate(zip(tree.streams, tree.unmatched, strict=True)):
        above = tree.pairs[side][stream.parents[calls[stream.level[calls] == aten]]]
        pairs = {*functions[inside[side] & ~inside[1 - side]].tolist(), *above[np.isin(above, functions)].tolist()}
        for pair in sorted(pairs):
            if not any(len(_rounding(tree.streams[1 - side], call, criterion)) for call in _operators(tree, pair, 1 - side)):
                alone = (call for call in _operators(tree, pair, side) if not _adds_up(stream, call))
                yield from ((side, call) for call in alone if computes(stream, call, criterion))


def _adds_up(stream: Stream, call: int) -> bool:
    """Tell whether a call reads what a backward made and the function around it was not given: autograd adds gradients up as they
    come, and the function at which it does so is another one where they come in another order."""
    above, backward = int(stream.parents[call]), stream.names.number("backward")
    given = stream.identity[slice(*stream.starts[above : above + 2])]
    read = stream.slots_of(call, is_input)
    read = read[(stream.phase[stream.producers[read]] == backward) & (stream.producers[read] != NONE) & stream.is_identified[read]]
    made = [k for k in read.tolist() if above not in stream.around(int(stream.producers[k]))]
    return stream.phase[call] == backward and not set(stream.identity[made].tolist()) <= set(given.tolist())


def _operators(tree: Tree, pair: int, side: int) -> list[int]:
    """Return the calls inside a matched call that have none inside."""
    around = int(tree.verdicts.errors.calls[side][pair])
    return [call for call in tree.inside(around, side) if not tree.streams[side].has_children[call]]


def _without_backward(regions: Regions, criterion: Criterion) -> Iterator[Call]:
    """Yield the backward of functions and modules that both sides called, where the other side's went backward fewer times and
    has none of its own there."""
    tree = regions.tree
    for side, (stream, calls) in enumerate(zip(tree.streams, tree.unmatched, strict=True)):
        other, aten = tree.streams[1 - side], stream.names.number("aten")
        backward = (stream.phase[calls] == stream.names.number("backward")) & (stream.level[calls] != aten)
        chosen = calls[backward & (stream.saved[calls] != NONE)]
        pairs = tree.pairs[side][stream.forward[chosen]]
        partner = np.r_[tree.verdicts.errors.calls[1 - side], NONE][pairs]
        theirs = np.flatnonzero((other.phase == other.names.number("backward")) & (other.level != aten))
        mine = np.flatnonzero((stream.phase == stream.names.number("backward")) & (stream.level != aten))
        often, less = (np.bincount(of[of != NONE], minlength=1) for of in (stream.forward[mine], other.forward[theirs]))
        missing = chosen[(partner != NONE) & (_at(less, partner) < _at(often, stream.forward[chosen]))]
        forward = stream.forward[missing].tolist()
        alone = (pair for pair in zip(missing.tolist(), forward, strict=True) if pair[0] not in regions.rewritten[side])
        yield from ((side, call) for call, of in alone if computes(stream, of, criterion))


def _at(counts: Numbers, of: Numbers) -> Numbers:
    return np.where((of >= 0) & (of < len(counts)), counts[np.minimum(of, len(counts) - 1)], 0)


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
