"""What a step did to the weights where its optimizer was not recorded (level module alone, or the forward alone).

An optimizer step changes a weight by a hundredth or a thousandth of it, so a wrong gradient or learning rate hides in what
rounding of a whole weight explains. It shows in the update; sketches are linear, so that of the update is known, from statistics,
too. Of a weight w that becomes w + d, with an error e of w before and the largest error r of its gradient and states::

    own       4 u  +  ‖d‖ / ‖w‖ · 512 u
    expected  own  +  2 e  +  ‖d‖ / ‖w‖ · factor (r + sqrt(r))

``ulps`` and ``factor`` are those of the criterion's row for optimizers: Adam's m / sqrt(v) is near ±1 however small the gradient,
so that what rounding leaves of a gradient that should be zero decides its sign. A state is ``ulps u + factor r``; what the last
call adds to a weight is ``4 u + ulps 2^-24 + factor r``, for kernels compute in float32 and round what they store.

No norm tells how large that part of a gradient is: an attention's key bias has a gradient of zero, beside others that have not.
So a weight whose gradient differs at all may be wrong by twice its step, unless most weights are: one kernel makes them all.

**Micro-batches** against one batch, or against fewer: steps that go backward another number of times (`passes`). Their calls are
no counterparts: each computes with another part of the batch, and each loss is divided. The same are the gradients that the
optimizer reads, and what it makes of them. Where these agree no call of the step is blamed for what it computes. Where they are
not off in one direction either, as by a wrong divisor, and the sums of the losses agree, the step is aligned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, distinct, most
from trueup.comparison.measures.measure import Errors
from trueup.comparison.measures.thresholds import CANCELLED, ENOUGH, HALF, LENGTH, ROOM, ROUNDINGS, SHARED, STEP_BIAS
from trueup.comparison.normalise.updates import ADDED, STEP
from trueup.comparison.verdict.budget import unrecorded
from trueup.comparison.verdict.evidence import coherent
from trueup.comparison.verdict.judged import Passes, Tree
from trueup.foundation.facts.criteria import Row
from trueup.foundation.facts.operators import having
from trueup.foundation.facts.slots import SINGLE, is_input, is_weight, roundoff
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.kernels import distance
from trueup.foundation.kernels.metrics import moved_otherwise


def explain_updates(errors: Errors, outputs: Numbers, own: Array, expected: Array, row: Row) -> tuple[Array, Array]:
    """Return what is explained of outputs, with those of `STEP` put right by the optimizers' row; both relative to the output."""
    stream, names = errors.streams[1], errors.streams[0].names.names
    step = stream.names.number(STEP)
    of_step = stream.op[errors.calls[1][errors.pair]] == step
    place = np.flatnonzero(of_step[outputs])
    if not len(place):
        return own, expected
    own, expected = own.copy(), expected.copy()
    entries = {(int(errors.pair[n]), names[int(errors.names[n])]): n for n in np.flatnonzero(of_step).tolist()}
    given, worst = _given(errors, entries), _worst_gradients(errors)
    flipped: dict[int, dict[int, float]] = defaultdict(dict)
    for at in place.tolist():
        n = int(outputs[at])
        pair, name = int(errors.pair[n]), names[int(errors.names[n])].removeprefix("output.")
        weight, _, state = name.partition(":")
        unit = roundoff(errors.streams[0].dtype_of(int(errors.slots[0][n]))) or SINGLE
        step = int(errors.streams[1].step[errors.calls[1][pair]])
        r = given.get((pair, weight), worst.get(step, 2 * unit))  # of which nothing is known: rounding
        if state.startswith(ADDED):
            own[at] = ROUNDINGS * unit + row.ulps * SINGLE
            expected[at] = own[at] + row.factor * r
            continue
        if state:
            own[at], expected[at] = row.ulps * unit, row.ulps * unit + row.factor * r
            continue
        before = entries.get((pair, f"input.{name}"))
        share = _moved(errors, n, before, entries.get((pair, f"step.{name}")))
        own[at] = (ROUNDINGS + share * STEP_BIAS) * unit
        carried = ROOM * float(np.nan_to_num(errors.relative[before])) if before is not None else 0.0
        moved = share * row.factor * (r + np.sqrt(r)) if np.isfinite(r) else np.inf
        if errors.streams[0].mixed:
            of = [entries.get((pair, f"{kind}.{name}")) for kind in ("input", "output", "gradient")]
            moved = _by_element(errors, [one for one in of if one is not None], row.factor, moved)
        # A weight that was zero, and one of which only a digest is known, has no size to compare the step with.
        own[at], expected[at] = (own[at], own[at] + carried + moved) if np.isfinite(moved) else (0.0, np.inf)
        flipped[pair][at] = carried + 2 * share if r > 0 else 0.0
    for weights in flipped.values() if not errors.streams[0].mixed else ():
        known = list(weights)
        if 2 * np.count_nonzero(errors.relative[outputs[known]] > expected[known]) <= len(known):
            expected[known] = np.maximum(expected[known], own[known] + list(weights.values()))
    return own, expected


def explain_signs(errors: Errors, outputs: Numbers, error_in: Array, signs: Array, expected: Array) -> None:
    """Grant results with a quotient (``signs``, by call) twice what they are moved by, where what goes in differs and no more than
    half of an operator's in a step are off: no norm tells how much of a gradient is rounding alone."""
    stream, pair, shapes = errors.streams[0], errors.pair[outputs], errors.streams[0].shapes.exact
    calls = errors.calls[0][pair]
    ours = stream.during("optimizer")[calls] & (stream.op[calls] != stream.names.number(STEP))  # of that `explain_updates` tells
    at = np.flatnonzero((signs & (error_in > 0))[pair] & ours)
    kind = np.unique(np.stack([stream.step[calls[at]], stream.op[calls[at]]]), axis=1, return_inverse=True)[1].reshape(-1)
    over = errors.relative[outputs[at]] > expected[at]
    few = over & (2 * np.bincount(kind, over) <= np.bincount(kind))[kind]
    for n in at[few].tolist():
        k = int(errors.slots[0][outputs[n]])
        read = [j for j in stream.slots_of(int(stream.call[k]), is_input).tolist() if shapes[j] == shapes[k]]
        moved = distance(stream.sketch[read], stream.sketch[[k] * len(read)]).min(initial=np.inf)
        expected[n] = max(expected[n], 2 * float(moved) / float(stream.l2[k]) if stream.l2[k] > 0 else 0.0)


def _by_element(errors: Errors, of: Sequence[int], factor: float, instead: float) -> float:
    """Return what the elements of a gradient explain of an update, relative to the weight, where tensors of both were kept."""
    sides = list(zip(errors.streams, errors.slots, errors.payloads, strict=True))
    if len(of) < 3 or not all(stream.has_payload[side[of]].all() for stream, side, _ in sides):
        return instead
    wanted = zip(sides, (of, of[2:]), strict=True)  # of the candidate the gradient
    tensors = [read(place, None) for (stream, side, read), some in wanted for place in stream.places(side[some])]
    found = moved_otherwise(tensors, factor)
    return found / float(errors.norm[of[1]]) if found is not None else instead


def _moved(errors: Errors, after: int, before: int | None, step: int | None) -> float:
    """Return how far the baseline's weight was moved, relative to it; NaN where that is not known."""
    norm, stream, slots = float(errors.norm[after]), errors.streams[0], errors.slots[0]
    if step is None and before is not None:
        apart = float(distance(stream.sketch[slots[[before]]], stream.sketch[slots[[after]]])[0])
    else:
        apart = float(errors.norm[step]) if step is not None else float("nan")
    return apart / norm if norm > 0 else float("nan")


def _given(errors: Errors, entries: dict[tuple[int, str], int]) -> dict[tuple[int, str], float]:
    """Return the largest relative error of the gradient and the states of each weight, by call; of those that were compared."""
    found: dict[tuple[int, str], float] = {}
    for (pair, slot), n in entries.items():
        kind, _, name = slot.partition(".")
        weight, _, state = name.partition(":")
        if (kind == "gradient" or (kind == "input" and state)) and not np.isnan(errors.relative[n]):
            found[pair, weight] = max(found.get((pair, weight), 0.0), float(errors.relative[n]))
    return found


def _worst_gradients(errors: Errors) -> dict[int, float]:
    """Return the largest relative error of what backward calls gave, by step."""
    stream = errors.streams[1]
    calls = errors.calls[1][errors.pair]
    backward = errors.outputs & (stream.phase[calls] == stream.names.number("backward")) & np.isfinite(errors.relative)
    steps, error = stream.step[calls[backward]], errors.relative[backward]
    return {step: float(error[steps == step].max()) for step in distinct(steps).tolist()}


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that some steps read and no recorded call made: one entry for each weight and step."""

    key: Numbers = field(default_factory=lambda: np.empty((0, 2), np.int64))  # scope and slot
    step: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    entry: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # in the errors of the step; `NONE`: of an earlier step
    sketches: Array = field(default_factory=lambda: np.empty((2, 0, 64)))


@dataclass(frozen=True, slots=True)
class Updated:
    """Weights whose update differs: entries of the errors, and what there is to say of them."""

    entries: Numbers
    compared: Numbers  # entries of all weights whose update is known, and so judged here
    sure: bool = True  # whether noise in near-zero gradients is ruled out: nothing differed before, or all together do now
    wrong: int = 0  # how many of ``total`` weights they are, in the first step that has any
    total: int = 0
    times: float = float("nan")  # how many times as far they were moved, the same way; NaN where that is not what differs
    clean: bool = False  # whether nothing differed before


def read(tree: Tree, before: Weights) -> Weights:
    """Return the weights of some steps, those of the last step before in front of them."""
    errors, stream = tree.verdicts.errors, tree.streams[1]
    weight = errors.inputs & stream.names.table(is_weight)[errors.names]
    for side, slots in zip(tree.streams, errors.slots, strict=True):
        weight &= ((side.producer[slots] == NONE) | is_unseen(side)) & side.measured[slots]
    at = np.flatnonzero(weight)
    if not len(at):
        return before
    call = errors.calls[1][errors.pair[at]]
    key = np.stack([stream.scope[call], errors.names[at]], axis=1)
    sketches = np.stack([side.sketch[slots[at]] for side, slots in zip(tree.streams, errors.slots, strict=True)])
    step = stream.step[call]
    its = np.r_[before.key, key], np.r_[before.step, step], np.r_[np.full(len(before.entry), NONE), at]
    found = Weights(*its, np.concatenate([before.sketches, sketches], axis=1))
    _, first = np.unique(np.c_[found.key, found.step], axis=0, return_index=True)  # a module may run several times a step
    return _take(found, first)


def is_unseen(stream: Stream) -> bool:
    """Tell whether what writes the weights is not compared: no optimizer is there, though the capture may hold its calls."""
    return not bool(stream.during("optimizer").any())


def last(weights: Weights) -> Weights:
    """Return those of the last step."""
    return _take(weights, np.flatnonzero(weights.step == weights.step.max(initial=-1)))


def _take(weights: Weights, at: Numbers) -> Weights:
    return Weights(weights.key[at], weights.step[at], weights.entry[at], weights.sketches[:, at])


def deviating(tree: Tree, weights: Weights, before: Array) -> Updated:
    """Return the weights whose update to the next step differs. ``weights`` are as `read` sorted them (scope, slot, step);
    ``before``: by matched call, in the order of the steps, the largest relative error of what was computed before."""
    errors = tree.verdicts.errors
    same, following = (weights.key[1:] == weights.key[:-1]).all(axis=1), weights.step[1:] == weights.step[:-1] + 1
    later = np.flatnonzero(same & following & (weights.entry[1:] != NONE))
    if not len(later):
        return Updated(later, later)
    entry = weights.entry[later + 1]
    first, second = weights.sketches[:, later + 1] - weights.sketches[:, later]
    apart, size = (np.linalg.norm(one, axis=1) for one in (second - first, first))
    unit = errors.roundoffs[0][entry]
    floor = 2 * ROUNDINGS * unit * errors.norm[entry]  # of the weight before and after
    when = weights.step[later + 1]
    largest = before[np.searchsorted(errors.streams[1].step[errors.calls[1]], when)]
    signs = tree.verdicts.criterion.row(STEP, "module", "optimizer").factor * (largest + np.sqrt(largest))  # as in one that is seen
    explained = np.where(largest > 0, np.maximum(SHARED, signs), 0.0)
    _, of, count = np.unique(when, return_inverse=True, return_counts=True)
    alike = apart > CANCELLED * largest * size + floor  # signs make the update of few weights another one
    wrong = (apart > explained * size + floor) | (alike & (2 * np.bincount(of, alike) > count)[of])
    numel = errors.streams[0].numel[errors.slots[0][entry]]
    if not wrong.any():
        lengths = np.stack([size, np.linalg.norm(second, axis=1)])
        with np.errstate(all="ignore"):
            roundings = numel * (lengths.max(axis=0) / (2 * unit * errors.norm[entry])) ** 2
        chosen = _longer(when, lengths, apart, np.nan_to_num(roundings), largest)
        return Updated(entry[chosen], entry, sure=False, wrong=int(chosen.sum()), total=int(chosen.sum()))
    of = when == when[wrong].min()
    whole, moved = (float(np.linalg.norm(one[of])) for one in (apart, size))
    clean, chosen = bool((largest[of] == 0).all()), of & wrong
    # No backward call is here: what it rounds differently may be all there is of a gradient that moves a weight less than others.
    here, typical = float(np.linalg.norm((size + apart)[chosen])), moved * math.sqrt(numel[chosen].sum() / numel[of].sum())
    sure = (clean and CANCELLED * here > typical) or whole > max(SHARED, float(explained[of].max())) * moved
    return Updated(entry[wrong], entry, sure, int(chosen.sum()), int(of.sum()), _times(first[chosen], second[chosen]), clean)


def _longer(when: Numbers, lengths: Array, apart: Array, roundings: Array, before: Array) -> Array:
    """Return the updates of the first step in which those of one run are longer, all together, than any rounding makes them, or
    half of them is not in the other's. ``lengths``: of each update in both runs, float64 ``(2, n)``; ``apart``: how far they are
    from each other; ``roundings``: how many elements of the weight it changes by a unit; ``before``: the largest error before."""
    for step in distinct(when).tolist():
        of = when == step
        short, long = sorted(np.linalg.norm(lengths[:, of], axis=1).tolist())
        room, elsewhere = before[of].max(), float(np.linalg.norm(apart[of]))
        if roundings[of].sum() >= ENOUGH and (long - short > (LENGTH + room) * long or elsewhere > (HALF + room) * long):
            return np.asarray(of)
    return np.zeros(len(when), bool)


def _times(first: Array, second: Array) -> float:
    """Return how many times as far all weights were moved, the same way; NaN where they were not."""
    with np.errstate(all="ignore"):
        ratio = (first * second).sum(axis=1) / (first**2).sum(axis=1)
        left = np.linalg.norm(second - first * ratio[:, None], axis=1) / np.linalg.norm(second - first, axis=1)
    middle = float(np.median(ratio))
    return middle if (left <= SHARED).all() and np.ptp(ratio) <= SHARED * abs(middle) else float("nan")


def why(slot: str, updated: Updated | None) -> tuple[Reason, ...]:
    """Return what is known of a weight that differs and was updated by what was not recorded."""
    if not is_weight(slot):
        return ()
    if updated is None or not updated.wrong:
        return (Why.WEIGHTS_UNSEEN(),)
    if (wrong := updated.wrong) < updated.total or wrong == 1:
        return Why.SOME_MOVED(wrong, updated.total), Why.WEIGHTS_UNSEEN()
    return Why.ALL_MOVED(wrong) if math.isnan(updated.times) else Why.MOVED_TIMES(wrong, updated.times), Why.WEIGHTS_UNSEEN()


def passes(tree: Tree, before: float = 0.0) -> Passes | None:
    """Return how often each side goes backward in a step, if that differs and all that accumulates agrees; else None. Gradients
    off by ``before`` in earlier steps moved the weights by as much of a step: that has a direction."""
    first, second = (int(np.count_nonzero(s.of_level("api") & s.names.table(having("loss"))[s.op])) for s in tree.streams)
    if not 0 < first != second > 0:
        return None
    if (found := agreeing(tree)) is None:
        return None
    (accumulated, biased), errors = found, tree.verdicts.errors
    sure = bool((coherent(errors, accumulated) <= biased + ROOM * before).all())
    return Passes(first, second, sure, max(before, float(errors.relative[accumulated].max(initial=0.0))))


def agreeing(tree: Tree) -> tuple[Numbers, float] | None:
    """Return what the optimizer reads and makes, if all agrees by what rounding makes of a whole step, and what its elements may be
    off by alike; None where it was not recorded, or a call of it has no counterpart. A gradient of which little is left, as that
    of a bias of keys, may be off by as much as others of its shape that the same operator gets or makes."""
    errors, (first, stream) = tree.verdicts.errors, tree.streams
    optimizer = [side.during("optimizer") for side in tree.streams]
    alone = any(side[calls].any() for side, calls in zip(optimizer, tree.unmatched, strict=True))
    at = np.flatnonzero((errors.inputs | errors.outputs) & optimizer[1][errors.calls[1]][errors.pair] & ~np.bool_(alone))
    own, biased = unrecorded(tree.verdicts.criterion, float(first.names.table(roundoff)[first.dtype].max(initial=0.0)))
    agree = errors.relative[at] <= min(own * math.sqrt(max(map(len, tree.streams))), HALF)
    slots, off = errors.slots[1][at], np.where(agree, np.fmax(errors.absolute[at], errors.unit[at] * errors.norm[at]), 0.0)
    _, kind = np.unique(np.stack([stream.op[stream.call[slots]], stream.shapes.squeezed[slots]]), axis=1, return_inverse=True)
    little = errors.absolute[at] <= CANCELLED * most(off, kind := kind.reshape(-1), len(at))[kind]
    return (at[agree], biased) if len(at) and (agree | little).all() else None
