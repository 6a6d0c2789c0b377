"""Errors that sit in few elements: a norm hides them, and rounding does not make them.

One wrong element among a million changes a norm by a millionth, which rounding explains if all elements share it. Rounding hits
many elements, each by little. So where an error is known to sit in few elements, each must be explained by what rounding does to
one: ``own`` times the largest element, instead of ``own`` times the norm.

How few they are is known from tensors, and from statistics where the two sides are equal but for one lane of the sketch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers
from trueup.comparison.measures.measure import SKETCH, Distance, Errors
from trueup.comparison.measures.thresholds import CHANCE, ENOUGH, QUORUM
from trueup.foundation.facts.criteria import CARRY, Criterion

STEADY = tuple(CARRY.index(kind) for kind in ("linear", "sum", "bilinear", "smooth"))
"""Operators of these kinds make no large error in one element of small errors in many."""


@dataclass(frozen=True, slots=True)
class Given:
    """What is known of the calls that some outputs belong to: an entry for each output."""

    clean: Array  # whether all that the call read is known and bitwise equal
    known: Array  # whether all that it read is known, and no index, mask or NaN among it differs
    peak: Array  # largest error of what it read, relative to the root mean square there
    row: Numbers  # row of the criterion
    module: Array


def narrowed(
    errors: Errors, outputs: Numbers, unit: Array, own: Array, expected: Array, given: Given, criterion: Criterion
) -> Array:
    """Return what is explained of each output, an entry of the errors; NaN where the norm decides as ever. ``unit``: unit
    roundoff of each; ``own``: what rounding explains of each, relative to the norm; ``expected``: the same with what the inputs
    carry; ``given``: what the calls read."""
    numel, error = errors.streams[0].numel[errors.slots[0][outputs]], errors.relative[outputs]
    with np.errstate(all="ignore"):
        least = np.minimum(own, ENOUGH * unit) / np.sqrt(numel)
        steady = np.isin(np.array([CARRY.index(row.carry) for row in criterion.rows])[given.row], STEADY) & ~given.module
        told = ~np.isnan(known(errors)[0][outputs]) & steady & given.known
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


def known(errors: Errors) -> tuple[Array, Array]:
    """Return the largest difference and how many elements differ of each entry, NaN where tensors were not measured."""
    found = np.full((2, len(errors.pair)), np.nan)
    for n, both in errors.peaks.items():
        found[:, n] = both
    return found[0], found[1]


def largest(errors: Errors, at: Numbers, sketches: Array) -> tuple[Array, Array]:
    """Return the largest |candidate - baseline| of entries, NaN where unknown, and whether hardly any other element differs.
    Sketches, which take time to read, are asked for entries in ``sketches`` alone."""
    peak, differing = (values[at] for values in known(errors))
    alone = differing <= QUORUM
    asked = np.flatnonzero(np.isnan(peak) & (errors.method[at] == SKETCH) & sketches)
    if len(asked):
        (baseline, candidate), (k, j) = errors.streams, (side[at[asked]] for side in errors.slots)
        lanes = np.count_nonzero(baseline.sketch[k] - candidate.sketch[j], axis=1)
        alone[asked[lanes == 1]] = True
    return peak, alone


def of_slot(errors: Errors, error: Distance, own: float, unit: float, criterion: Criterion) -> float:
    """Return what is explained of the result of a run of calls that read nothing that differs; NaN where the norm decides."""
    (k, j), stream = errors.slots, errors.streams[0]
    at = np.flatnonzero((k == error.baseline) & (j == error.candidate))[:1]
    norm, numel = error.norm, float(stream.numel[error.baseline])
    if not len(at) or not np.isfinite(error.low) or norm == 0 or numel < ENOUGH or unit == 0:
        return float("nan")
    (peak,), (alone,) = largest(errors, at, np.ones(1, bool))
    size = float(_largest_element(errors, at)[0])
    if alone:
        return max(min(own, ENOUGH * unit), 2 * unit) * size / norm
    return criterion.certain * own * size / norm if CHANCE * peak**2 >= error.low**2 else float("nan")


def _largest_element(errors: Errors, at: Numbers) -> Array:
    """Return the largest absolute value on either side."""
    sides = zip(errors.streams, errors.slots, strict=True)
    found = [np.maximum(*(np.abs(stream.number(name)[slots[at]]) for name in ("min", "max"))) for stream, slots in sides]
    return np.asarray(np.maximum(*found))
