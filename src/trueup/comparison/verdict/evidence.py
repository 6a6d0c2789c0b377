"""Evidence beside the size of an error: its direction, exact factors, calls of the same kind, known differences, runs of the user.

Rounding has no direction: the part of a difference by which all elements are off alike.

For n elements, a baseline y and a difference d::

    along y:  |<d, y>| / |y|^2              a factor: another scale, epsilon or variance
    along 1:  |sum(d)| / (sqrt(n) |y|)      a term: another bias, mean or constant

Errors that are independent have about ``|d| / (sqrt(n) |y|)`` of either; a formula that is wrong has up to all of ``|d| / |y|``.
No elements are needed: ``<d, y> = (|candidate|^2 - |y|^2 - |d|^2) / 2`` follows from both norms, ``sum(d)`` from both means.

What is coherent is no proof of itself, for a library function may be a unit or two too large everywhere, and the errors of the
inputs may be coherent: `explain.Budget.coherent` says how much of it is explained.

Exact factors: a result that is the baseline's times one number, and which number that is.

A scale that is missing or applied twice, a mean for a sum over n ranks, a sign: then ``candidate = r baseline`` to rounding, for::

    r  =  <baseline, candidate> / <baseline, baseline>        |candidate - r baseline|  <<  |candidate - baseline|

Both follow from the elements, and as well from anything linear in them: a sketch of either side.

How much the same operator makes of the error of its inputs elsewhere in the run.

The table grants every operator of a kind the same factor, from what was measured on other models. A run knows more: twelve layers
call the same operator with the same arguments on the same shapes. What a call makes of the errors that it gets, as a share of
what the table grants, is its *amplification*::

    (error of the output - what rounding explains) / what the errors of the inputs explain

Where half of the other calls of its kind, and at least `QUORUM` of them, make as much of it or more, so may this one.

A call is no witness for itself, nor is one that is a culprit for certain. A fault that adds the same error whatever goes in
is no amplification: it weighs less the larger the errors of the inputs are, and the first call that has it was given none. It is
never the other way round, that a call is granted less for what others do: on six models with planted faults under noise that
found no fault more, and it blamed the backward of a healthy batch-norm, whose amplification grew a thousandfold within three steps.

Differences between frameworks that are meant: what each defines in its own way, with how far apart that may put the two.

**The running variance of a batch norm.** PyTorch adds the unbiased variance of the batch to it (n - 1), PaddlePaddle on the CPU and
Keras the biased one (n): torch.nn.BatchNorm2d's documentation; paddle/phi/kernels/cpu/batch_norm_kernel.cc, and measured;
keras/src/layers/normalization/batch_normalization.py (Keras 3.15: `ops.moments`), and measured. Of n elements of a
channel the two batch variances differ by 1/n of the larger, so their running means differ by no more than that, however many steps
they run over.

Yardsticks from the user's own runs: repeats of the baseline, and a run in float64.

A repeat shows how far the baseline is from itself: atomics, another order of reductions, random numbers that no seed fixes. What
the candidate adds within a few times that spread is explained, whatever the criterion's formulas say.

A float64 run is taken for the truth. Then an output is asked how far the candidate is from the truth, and what is explained is a
few times as far as the baseline is: the form of PyTorch's ``torch._dynamo.utils.same`` and of FlashAttention's tests. A candidate
that is nearer to the truth than the baseline is not at fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping as Map
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers, Stream
from trueup.comparison.measures.measure import SKETCH, STATISTICS, TENSOR, Errors, Payload, measure
from trueup.comparison.measures.roundoff import SINGLE
from trueup.comparison.measures.thresholds import CHANCE, ENOUGH, PRECISE, QUORUM, ROOM, SHARED
from trueup.comparison.normalise.mapping import Mapping
from trueup.comparison.verdict.align import align
from trueup.comparison.verdict.criteria import Criterion
from trueup.foundation.facts.why import Reason, Why


def coherent(errors: Errors, at: Numbers) -> Array:
    """Return float64 ``(n,)``: the part of the relative L2 error of some entries that all elements share, beyond chance.

    0 where nothing is known of it: without norms or means, where elements are not finite on one side only, and where the
    difference is larger than the baseline, of which nothing but rounding may be left.
    """
    (baseline, candidate), (k, j) = errors.streams, (side[at] for side in errors.slots)
    known = np.isin(errors.method[at], (SKETCH, TENSOR)) & np.isfinite(errors.absolute[at]) & (errors.absolute[at] > 0)
    with np.errstate(all="ignore"):
        apart, numel, norm = errors.absolute[at], baseline.numel[k], baseline.l2[k]
        along_itself = np.abs(candidate.l2[j] ** 2 - norm**2 - apart**2) / 2 / norm**2
        along_one = np.abs(candidate.mean[j] - baseline.mean[k]) * np.sqrt(numel) / norm
        found = np.fmax(along_itself, along_one) - CHANCE * apart / norm / np.sqrt(numel)
    return np.where(known & (apart < norm) & np.isfinite(found), np.maximum(found, 0.0), 0.0)


LARGEST = 4096
"""Largest integer, or integer under a root, that is looked for: heads, ranks, widths."""


def factor(baseline: Array, candidate: Array, rounding: float, elements: int) -> Reason | None:
    """Return the factor between two sides, None where they are no multiples of one another.

    Args:
        baseline: float64 ``(n,)``, elements or a sketch.
        candidate: the same of the other side.
        rounding: relative error that rounding explains.
        elements: how many there are in the tensor.
    """
    square = float(baseline @ baseline)
    apart = float(np.linalg.norm(candidate - baseline))
    if not (np.isfinite(candidate).all() and 0 < square < math.inf and apart > 0):
        return None
    value = float(baseline @ candidate) / square
    rest = float(np.linalg.norm(candidate - value * baseline))
    size = abs(value) * math.sqrt(square)
    if value == 0 or rest > SHARED * apart or rest > max(rounding, 2.0**-40) * size:
        return None
    exact = _exact(value, max(rounding, rest / size))
    return Why.FACTOR(exact, value) if exact or elements >= CHANCE else None


def _exact(value: float, within: float) -> str:
    """Return an integer, a root of one or one over either that a number is, if that is no chance; else nothing."""
    size, sign = abs(value), "-" if value < 0 else ""
    inverse = size < 1
    large = 1 / size if inverse else size
    for number, what, gap in ((round(large), "{}", 1.0), (round(large * large), "sqrt({})", 0.5)):
        target = float(number) if gap == 1.0 else math.sqrt(number)
        near = abs(large - target) <= within * large
        if 1 <= number <= LARGEST and near and within * number / gap <= PRECISE:
            found = what.format(number)
            return sign + (f"1/{found}" if inverse else found)
    simple = Fraction(size).limit_denominator(8)
    if abs(size - simple) <= within * size and ENOUGH * within <= PRECISE and simple.numerator <= 8:
        return f"{sign}{simple}"
    return ""




KEPT = 32
"""Amplifications that are remembered of a kind from step to step, spread evenly over those seen."""


@dataclass(slots=True)
class Amplification:
    """What is remembered of a run, over steps and ranks: a kind of output (uint64) and an amplification, an entry each."""

    kinds: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    shares: Array = field(default_factory=lambda: np.zeros(0))

    def factors(self, kinds: Array, shares: Array, witness: Array, widest: float) -> Array:
        """Return by how much what the table grants is to be multiplied; 1 where the others do not ask for more.

        Args:
            kinds: uint64 ``(n,)``, what tells one kind of output from another.
            shares: float64 ``(n,)``, amplifications.
            witness: bool ``(n,)``, whether others may go by it.
            widest: the most that others may earn a call: beyond it they would be culprits themselves.
        """
        found = np.ones(len(kinds))
        mine, at = np.flatnonzero(witness), np.flatnonzero(shares > 1)  # the only ones that can need it
        kind, share = np.r_[kinds[mine], self.kinds], np.r_[shares[mine], self.shares]
        order = np.lexsort((share, kind))
        kind, share = kind[order], share[order]
        if len(at):
            places = np.full(len(kinds) + len(self.kinds), -1)
            places[np.r_[mine, np.full(len(self.kinds), len(kinds))][order]] = np.arange(len(order))
            middle, others = _median_of_others(kind, share, kinds[at], places[at])
            more = (others >= QUORUM) & (ROOM * middle > 1)
            found[at[more]] = np.minimum(ROOM * middle[more], widest)
        self.kinds, self.shares = _thinned(kind, share)
        return found


def _median_of_others(kind: Array, share: Array, wanted: Array, place: Numbers) -> tuple[Array, Array]:
    """Return the lower median of the shares of each wanted kind, and of how many; without the one at its own place (-1: none).

    ``kind`` and ``share`` are sorted, by kind first.
    """
    start, stop = (np.searchsorted(kind, wanted, side) for side in ("left", "right"))
    others = stop - start - (place >= 0)
    middle = start + (others - 1) // 2
    middle += (place >= 0) & (place <= middle)
    return np.r_[share, np.nan][np.where(others > 0, middle, len(share))], others


def _thinned(kind: Array, share: Array) -> tuple[Array, Array]:
    """Keep `KEPT` entries of each kind, the smallest and the largest among them; both are sorted."""
    start, stop = (np.searchsorted(kind, kind, side) for side in ("left", "right"))
    place, count = np.arange(len(kind)) - start, stop - start
    step = place * (KEPT - 1) // np.maximum(count - 1, 1)
    first = (place == 0) | (step != np.r_[-1, step[:-1]])
    kept = (count <= KEPT) | first
    return kind[kept], share[kept]




def known_differences(errors: Errors) -> Array:
    """Return, by entry, the relative error that the frameworks' own definitions explain; 0 where there is none."""
    found = np.zeros(len(errors.pair))
    baseline = errors.streams[0]
    if baseline.neutral is None:
        return found
    names = baseline.names
    first = np.full(len(errors.calls[0]), np.nan)  # elements of the first tensor that a call reads
    inputs = np.flatnonzero(errors.names == names.number("input.0"))
    first[errors.pair[inputs]] = baseline.numel[errors.slots[0][inputs]]
    called = baseline.neutral[errors.calls[0][errors.pair]]
    layer = (called == names.number("BatchNorm")) & (errors.names == names.number("output.buffer.running_var"))
    function = (called == names.number("batch_norm")) & np.isin(errors.names, [names.number(f"{s}.2") for s in ("input", "output")])
    at = np.flatnonzero(layer | function)
    n = first[errors.pair[at]] / np.maximum(baseline.numel[errors.slots[0][at]], 1)
    found[at] = np.where(n >= 2, ROOM / n, 0.0)
    return found


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Relative errors of one rank and step, NaN where unknown."""

    spread: Array | None = None
    """By slot of the baseline: its largest distance from its repeats."""
    truth: tuple[Array, Array] | None = None
    """By slot of the baseline, and of the candidate: the distance from the float64 run."""


NOTHING = Yardstick()


def yardstick_of(streams: Sequence[Stream], payloads: Sequence[Payload], repeats: int, mapping: Mapping) -> Yardstick:
    """Measure by the other runs.

    Args:
        streams: baseline, candidate, ``repeats`` repeats of the baseline, and the float64 run if there is one.
        payloads: of each of them.
        repeats: how many.
        mapping: what the candidate calls things.
    """

    def apart(reference: int, run: int, names: Mapping | None = None) -> Errors:
        first, second = streams[reference], streams[run]
        return measure(align(first, second, names), first, second, (payloads[reference], payloads[run]))

    found = np.full(len(streams[0].slot), np.nan)
    for run in range(2, 2 + repeats):
        errors = apart(0, run)
        np.fmax.at(found, errors.slots[0], errors.relative)
    spread = found if repeats else None
    if len(streams) == 2 + repeats:
        return Yardstick(spread)
    truth = [np.full(len(stream.slot), np.nan) for stream in streams[:2]]
    for run, found in enumerate(truth):
        errors = apart(-1, run, mapping if run else None)
        known = errors.method != STATISTICS  # which only bound a distance
        np.fmax.at(found, errors.slots[1][known], errors.relative[known])
    return Yardstick(spread, (truth[0], truth[1]))


def behind(errors: Errors, yardstick: Yardstick, criterion: Criterion) -> Numbers:
    """Return the matched calls of which the baseline is several times further from the float64 run than the candidate.

    What may differ of a tensor that no recorded call made, no baseline is blamed for.
    """
    if yardstick.truth is None:
        return np.zeros(0, np.int64)
    baseline, candidate = (truth[slots] for truth, slots in zip(yardstick.truth, errors.slots, strict=True))
    worse = errors.outputs & (baseline > np.maximum(criterion.yardstick * candidate, criterion.input_units * SINGLE))
    return np.unique(errors.pair[worse])


def losses_apart(
    baseline: Map[int, float], candidate: Map[int, float], limit: float, repeats: Sequence[Map[int, float]] = (),
    allowed: float = 0.0,
) -> Reason | None:  # fmt: skip
    """Return that the losses are too far apart to call two runs aligned, or None.

    Args:
        baseline: losses per step of one run.
        candidate: those of the other.
        limit: largest relative distance.
        repeats: losses per step of the baseline's repeats.
        allowed: how many times their distance from the baseline's is allowed besides.
    """
    for step, loss in baseline.items():
        value = candidate.get(step, loss)  # a step that one side lacks is said elsewhere
        if loss == value or (math.isnan(loss) and math.isnan(value)):
            continue
        apart = abs(value - loss) / max(abs(loss), 1e-12)
        spread = max((abs(losses[step] - loss) / max(abs(loss), 1e-12) for losses in repeats if step in losses), default=0.0)
        if not apart <= max(limit, allowed * spread):  # NaN against a number too
            return Why.LOSSES(None if math.isnan(apart) else apart, step, loss, value, limit)
    return None
