"""Tensors that are not what they should be when they are read: memory that something unseen wrote to since, and what is left of an
earlier step where the baseline makes it anew, in the candidate alone; and the result of another call than in the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, numbered
from trueup.comparison.measures.measure import same_shapes
from trueup.comparison.measures.thresholds import ANY_ORDER, CANCELLED, HALF
from trueup.comparison.verdict.judged import Tree
from trueup.comparison.verdict.one_sided import computes
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.slots import SINGLE, is_output
from trueup.foundation.facts.why import Reason, Why


def overwritten(tree: Tree, criterion: Criterion) -> list[tuple[int, str]]:
    """Return ``(matched call, input slot)`` of what was written to unseen, in order. The baseline read bit by bit what a recorded
    call had written, the candidate something else that is further from the baseline's than what the call had written there: no
    rounding of a kernel that writes twice. An optimizer's input that a call of this step made in the baseline alone, as a gradient
    that was not cleared, was to be what the counterpart of that call made."""
    errors = tree.verdicts.errors
    apart = np.flatnonzero(errors.inputs & (errors.relative > criterion.input_units * SINGLE))
    if not len(apart):
        return []
    sides = zip(tree.streams, errors.slots, strict=True)
    (of_baseline, first), (of_candidate, second) = (_written(stream, slots[apart]) for stream, slots in sides)
    held = _is_earlier(tree.streams[1], errors.slots[1][apart])
    held &= tree.streams[1].during("optimizer")[errors.calls[1][errors.pair[apart]]]
    at = np.flatnonzero(held & (of_baseline != NONE) & ~_is_earlier(tree.streams[0], errors.slots[0][apart]))
    other = numbered(errors.slots[0], len(tree.streams[0].slot))[of_baseline[at]]  # its entry, where it has a counterpart
    of_candidate[at] = np.where(other != NONE, errors.slots[1][other], NONE)
    known = (of_baseline != NONE) & (of_candidate != NONE) & first & ~second
    made = np.zeros(len(tree.streams[1].slot))
    made[errors.slots[1]] = np.nan_to_num(errors.relative, posinf=np.inf)
    at = apart[known & (errors.relative[apart] > 2 * made[of_candidate] + criterion.input_units * SINGLE)]
    names = tree.streams[1].names.names
    # A function that returns nothing may hold a call that returned what is read: then that one wrote it.
    seen = [_returned(tree, 1, k)[1] > tree.streams[1].producers[k] for k in errors.slots[1][at].tolist()]
    return [(int(errors.pair[n]), names[errors.names[n]]) for n in at[~np.array(seen, bool)].tolist()]


def stale(tree: Tree, made: Callable[[int], float | None], excused: Callable[[int], bool]) -> tuple[int, int] | None:
    """Return the first entry of a forward that the candidate reads from an earlier step, where it agreed, and that step. The
    baseline's was made in this step. A table that both need once, and one of them keeps, differs as little as when it was made:
    ``made`` is the largest relative error of the results of a compared call of an earlier step, None where there is none. Pairs
    that are ``excused`` are no counterparts."""
    errors, (baseline, candidate), least = tree.verdicts.errors, tree.streams, tree.verdicts.criterion.input_units * SINGLE
    apart = np.flatnonzero(errors.inputs & (errors.relative > least))
    if not len(apart) or tree.is_foreign:
        return None
    k, j = (slots[apart] for slots in errors.slots)
    forward = candidate.during("forward")[candidate.call[j]] & (baseline.dtype[k] == candidate.dtype[j])  # else one is not cast
    anew = (baseline.producer[k] != NONE) & ~_is_earlier(baseline, k)
    earlier = (candidate.producer[j] != NONE) & _is_earlier(candidate, j)
    for n in apart[forward & anew & earlier].tolist():
        maker = int(candidate.producer[errors.slots[1][n]])
        before = made(maker)
        if before is not None and errors.relative[n] > 2 * before + least and not excused(int(errors.pair[n])):
            return n, maker
    return None


def rewired(tree: Tree) -> list[tuple[int, int]]:
    """Return ``(matched call, entry)`` of forward and optimizer calls that read another call's result than their counterparts do.
    Both makers agree with their counterparts, by far more than what is read differs, or the baseline's runs only later in the
    candidate. Only where every call that computes had a counterpart so far: else the runs may write one formula in two ways."""
    errors, verdicts = tree.verdicts.errors, tree.verdicts
    relative = np.where(same_shapes(errors), np.where(errors.absolute > 0, errors.relative, 0.0), np.inf)
    apart = np.flatnonzero(errors.inputs & (relative > 0))
    if not len(apart) or tree.is_foreign:
        return []
    lost = list(verdicts.incomparable)
    sides = zip(tree.pairs, tree.streams, errors.slots, strict=True)
    made = [pairs[stream.producers[slots[apart]]] for pairs, stream, slots in sides]
    pair = errors.pair[apart]
    at = (made[0] != NONE) & (made[1] != NONE) & (made[0] != made[1]) & ~np.isin(made, lost).any(axis=0)
    at &= tree.streams[1].during("forward", "optimizer")[errors.calls[1][pair]]
    at &= (verdicts.error_out[pair] > verdicts.own[pair]) | np.isin(pair, lost)
    later = errors.calls[1][made[0]] > errors.calls[1][pair]
    before = np.maximum(np.where(later, 0.0, verdicts.error_out[made[0]]), verdicts.error_out[made[1]])
    at &= relative[apart] > np.maximum(CANCELLED * before, verdicts.criterion.input_units * SINGLE)
    for stream, calls, alone in zip(tree.streams, errors.calls, tree.unmatched, strict=True) if at.any() else ():
        first = next((int(stream.seq[call]) for call in alone.tolist() if computes(stream, call, verdicts.criterion)), np.inf)
        at &= stream.seq[calls[pair]] < first
    return list(zip(pair[at].tolist(), apart[at].tolist(), strict=True))


def exchanged(tree: Tree) -> Iterator[tuple[int, int, Reason]]:
    """Yield ``(matched call, entry, why)`` of what is another result of one call than its counterpart, by its bytes: of several
    views of one tensor, as `unbind` and `chunk` return, the last writer is the same."""
    errors, verdicts = tree.verdicts.errors, tree.verdicts
    made = [stream.producers[slots] for stream, slots in zip(tree.streams, errors.slots, strict=True)]
    pairs = [of[calls] for of, calls in zip(tree.pairs, made, strict=True)]
    at = errors.inputs & (pairs[0] != NONE) & (pairs[0] == pairs[1]) & (errors.relative > HALF)
    for n in np.flatnonzero(at & (verdicts.error_out[pairs[0]] < HALF)).tolist() if not tree.is_foreign else ():
        (first, call, slot), (second, _, other) = (_returned(tree, side, int(errors.slots[side][n])) for side in (0, 1))
        if first == second != NONE and slot != other:
            reader = errors.streams[1].row(int(errors.calls[1][errors.pair[n]])).key
            names = map(tree.streams[0].names.name, (slot, other))
            yield int(errors.pair[n]), n, Why.READS_OTHER(reader, tree.streams[0].row(call).key, *names)


def _returned(tree: Tree, side: int, k: int) -> tuple[int, int, int]:
    """Return the last matched call that returned the bytes that a slot holds, its call on this side, and as which result."""
    stream, made = tree.streams[side], tree.pairs[side][tree.streams[side].call] != NONE
    made &= stream.is_identified & (stream.identity == stream.identity[k]) & (stream.call < stream.call[k])
    found = np.flatnonzero(made & stream.names.table(is_output)[stream.slot])[-1:].tolist()
    call, slot = (int(stream.call[found[0]]), int(stream.slot[found[0]])) if found else (NONE, NONE)
    return int(tree.pairs[side][call]), call, slot


def _is_earlier(stream: Stream, slots: Numbers) -> Array:
    """Tell which slots no call of their own step made."""
    made = stream.producers[slots]
    return np.asarray((made == NONE) | (stream.step[made] < stream.step[stream.call[slots]]))


def _written(stream: Stream, slots: Numbers) -> tuple[Numbers, Array]:
    """Return the slots that the producers of some slots had written, and whether these hold the same bytes; `NONE` where unknown:
    another view (also a square matrix transposed), another type, no digest."""
    size = len(stream.names.names)
    keys = stream.call * size + stream.slot
    order = np.argsort(keys, kind="stable")
    producer = stream.producers[slots]
    wanted = producer * size + stream.producer_slot[slots]
    found = order[np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)]
    known = (producer != NONE) & (keys[found] == wanted) & stream.has_digest[found] & stream.has_digest[slots]
    known &= (stream.dtype[found] == stream.dtype[slots]) & (stream.shapes.exact[found] == stream.shapes.exact[slots])
    same = stream.digest[found] == stream.digest[slots]
    moved = np.logical_and.reduce([stream.number(name)[found] == stream.number(name)[slots] for name in ("min", "max", "n_zero")])
    moved &= np.isclose(stream.l2[found], stream.l2[slots], rtol=ANY_ORDER, atol=0)
    return np.where(known & (same | ~moved), found, NONE), np.asarray(same)
