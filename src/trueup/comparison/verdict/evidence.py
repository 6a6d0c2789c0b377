"""Evidence beside the size of an error: its direction, known differences, runs of the user.

**Direction.** Rounding has none. For n elements, a baseline y and a difference d, all elements are off alike by::

    along y:  |<d, y>| / |y|^2              a factor: another scale, epsilon or variance
    along 1:  |sum(d)| / (sqrt(n) |y|)      a term: another bias, mean or constant

Independent errors have about ``|d| / (sqrt(n) |y|)`` of either; a wrong formula has up to all of ``|d| / |y|``. No elements are
needed: ``<d, y> = (|candidate|^2 - |y|^2 - |d|^2) / 2`` follows from both norms, ``sum(d)`` from both means. A coherent error
alone proves nothing: a library function may be a unit or two too large everywhere, and the errors of the inputs may be coherent.
`budget.Budget.coherent` says how much of it is explained.

**Few elements.** One wrong element among a million changes a norm by a millionth, which rounding explains if all elements share it.
Rounding hits many, each by little. So where an error is known to sit in few elements, from tensors, or from statistics where one
lane of the sketch differs, each must be explained by what rounding does to one: ``own`` times the largest element.

**Known differences**: what each framework defines in its own way, and how far apart that may put the two. To the running variance
of a batch norm PyTorch adds the unbiased variance of the batch (n - 1), PaddlePaddle on the CPU (paddle/phi/kernels/cpu/
batch_norm_kernel.cc) and Keras (batch_normalization.py: `ops.moments`) the biased one (n), as measured. Of n elements of a channel
the two differ by 1/n of the larger, and their running means by no more than that, over any number of steps.

**Yardsticks**: the user's own runs. A repeat shows how far the baseline is from itself: atomics, random numbers without a seed.
What the candidate adds within a few times that spread is explained, whatever the formulas say. A float64 run is taken for the
truth: an output may be a few times as far from it as the baseline is (``torch._dynamo.utils.same``, FlashAttention's tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers, Stream
from trueup.comparison.measures.measure import SKETCH, STATISTICS, TENSOR, Distance, Errors, Payload, measure
from trueup.comparison.measures.thresholds import CHANCE, ENOUGH, QUORUM, ROOM
from trueup.comparison.verdict.align import align
from trueup.foundation.facts.criteria import CARRY, Criterion
from trueup.foundation.frameworks.mapping import Mapping


def coherent(errors: Errors, at: Numbers) -> Array:
    """Return float64 ``(n,)``: the part of the relative L2 error of some entries that all elements share, beyond chance. 0 where
    nothing is known of it: without norms or means, where elements are not finite on one side only, and where the difference is
    larger than the baseline, of which nothing but rounding may be left."""
    (baseline, candidate), (k, j) = errors.streams, (side[at] for side in errors.slots)
    known = np.isin(errors.method[at], (SKETCH, TENSOR)) & np.isfinite(errors.absolute[at]) & (errors.absolute[at] > 0)
    with np.errstate(all="ignore"):
        apart, numel, norm = errors.absolute[at], baseline.numel[k], baseline.l2[k]
        along_itself = np.abs(candidate.l2[j] ** 2 - norm**2 - apart**2) / 2 / norm**2
        along_one = np.abs(candidate.mean[j] - baseline.mean[k]) * np.sqrt(numel) / norm
        found = np.fmax(along_itself, along_one)
        # What is left beside the direction is chance's, and of few elements all of it may lie along one by chance.
        rest = np.sqrt(np.maximum((apart / norm) ** 2 - np.where(numel > CHANCE**2, found**2, 0.0), 0.0))
        found -= CHANCE * rest / np.sqrt(numel)
    return np.where(known & (apart < norm) & np.isfinite(found), np.maximum(found, 0.0), 0.0)


STEADY = tuple(CARRY.index(kind) for kind in ("linear", "sum", "bilinear", "product", "smooth"))
"""Operators of these kinds make no large error in one element of small errors in many."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What is known of the calls that some outputs belong to: an entry for each output."""

    clean: Array  # whether all that the call read is known and bitwise equal
    known: Array  # whether all that it read is known, and no index, mask or NaN among it differs
    peak: Array  # largest error of what it read, relative to the root mean square there
    row: Numbers  # row of the criterion
    module: Array


def few_elements(
    errors: Errors, outputs: Numbers, unit: Array, own: Array, expected: Array, given: Reads, criterion: Criterion
) -> Array:
    """Return what is explained of each output, an entry of the errors; NaN where the norm decides as ever. ``unit``: unit
    roundoff of each; ``own``: what rounding explains of each, relative to the norm; ``expected``: the same with what the inputs
    carry; ``given``: what the calls read."""
    numel, error = errors.streams[0].numel[errors.slots[0][outputs]], errors.relative[outputs]
    with np.errstate(all="ignore"):
        least = np.minimum(own, ENOUGH * unit) / np.sqrt(numel)
        steady = np.isin(np.array([CARRY.index(row.carry) for row in criterion.rows])[given.row], STEADY) & ~given.module
        told = ~np.isnan(peaks(errors)[0][outputs]) & steady & given.known
        asked = np.isfinite(error) & (error > least) & (numel >= ENOUGH) & (unit > 0) & (given.clean | told)
        found = np.full(len(outputs), np.nan)
        at = np.flatnonzero(asked & np.isfinite(expected))
        if not len(at):
            return found
        peak, alone = largest(errors, outputs[at], sketches=given.clean[at])
        size, norm = _largest_element(errors, outputs[at]), errors.norm[outputs[at]]
        one = np.maximum(np.minimum(own[at], ENOUGH * unit[at]), 2 * unit[at])  # two neighbouring numbers are no further apart
        isolated = CHANCE * peak**2 >= errors.absolute[outputs[at]] ** 2
        some = criterion.certain * (own[at] + np.where(given.clean[at], 0.0, criterion.certain_carried * given.peak[at]))
        some = np.where(isolated & (given.clean[at] | told[at]), some, np.nan)
        limit = np.where(given.clean[at] & alone, one, some) * size / norm
        found[at] = np.where(limit < expected[at], limit, np.nan)
    return found


def peaks(errors: Errors) -> tuple[Array, Array]:
    """Return the largest difference and how many elements differ of each entry, NaN where tensors were not measured."""
    found = np.full((2, len(errors.pair)), np.nan)
    for n, both in errors.peaks.items():
        found[:, n] = both
    return found[0], found[1]


def largest(errors: Errors, at: Numbers, sketches: Array) -> tuple[Array, Array]:
    """Return the largest |candidate - baseline| of entries, NaN where unknown, and whether hardly any other element differs.
    Sketches, which take time to read, are asked for entries in ``sketches`` alone."""
    peak, differing = (values[at] for values in peaks(errors))
    alone = differing <= QUORUM
    asked = np.flatnonzero(np.isnan(peak) & (errors.method[at] == SKETCH) & sketches)
    if len(asked):
        (baseline, candidate), (k, j) = errors.streams, (side[at[asked]] for side in errors.slots)
        lanes = np.count_nonzero(baseline.sketch[k] - candidate.sketch[j], axis=1)
        alone[asked[lanes == 1]] = True
    return peak, alone


def few_elements_of(errors: Errors, error: Distance, own: float, unit: float, criterion: Criterion) -> float:
    """Return what is explained of the result of a run of calls that read nothing that differs; NaN where the norm decides."""
    at, stream = entry_of(errors, error), errors.streams[0]
    norm, numel = error.norm, float(stream.numel[error.baseline])
    if not len(at) or not np.isfinite(error.low) or norm == 0 or numel < ENOUGH or unit == 0:
        return float("nan")
    (peak,), (alone,) = largest(errors, at, np.ones(1, bool))
    size = float(_largest_element(errors, at)[0])
    if alone:
        return max(min(own, ENOUGH * unit), 2 * unit) * size / norm
    return criterion.certain * own * size / norm if CHANCE * peak**2 >= error.low**2 else float("nan")


def entry_of(errors: Errors, error: Distance) -> Numbers:
    """Return the entry of a distance, int64 ``(1,)``; none of two results that no matched calls made."""
    return np.flatnonzero((errors.slots[0] == error.baseline) & (errors.slots[1] == error.candidate))[:1]


def _largest_element(errors: Errors, at: Numbers) -> Array:
    """Return the largest absolute value on either side."""
    sides = zip(errors.streams, errors.slots, strict=True)
    found = [np.maximum(*(np.abs(stream.number(name)[slots[at]]) for name in ("min", "max"))) for stream, slots in sides]
    return np.asarray(np.maximum(*found))


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

    spread: Array | None = None  # by slot of the baseline: its largest distance from its repeats
    truth: tuple[Array, Array] | None = None  # by slot of the baseline, and of the candidate: the distance from the float64 run


NOTHING = Yardstick()


def yardstick_of(streams: Sequence[Stream], payloads: Sequence[Payload], repeats: int, mapping: Mapping) -> Yardstick:
    """Measure by the other runs: the streams and payloads after the two sides' are those of ``repeats`` repeats of the baseline,
    and of the float64 run if there is one."""

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
