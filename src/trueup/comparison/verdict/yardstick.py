"""Yardsticks from the user's own runs: repeats of the baseline, and a run in float64.

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
from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers, Stream
from trueup.comparison.measures.measure import STATISTICS, Errors, Payload, measure
from trueup.comparison.measures.roundoff import SINGLE
from trueup.comparison.normalise.mapping import Mapping
from trueup.comparison.verdict.align import align
from trueup.comparison.verdict.criteria import Criterion


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


def loss_note(
    baseline: Map[int, float], candidate: Map[int, float], limit: float, repeats: Sequence[Map[int, float]] = (),
    allowed: float = 0.0,
) -> str | None:  # fmt: skip
    """Say that the losses are too far apart to call two runs aligned, or return None.

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
            return (
                f"the losses are {'' if math.isnan(apart) else f'{apart:.1%} '}apart at step {step} ({loss:.6g} and "
                f"{value:.6g}), more than {limit:.0%}, and no single call explains it: the difference may be the growth of "
                "rounding errors, or lie in calls not captured"
            )
    return None
