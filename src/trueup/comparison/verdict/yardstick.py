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
from trueup.comparison.measures.measure import STATISTICS, Errors, measure
from trueup.comparison.measures.payloads import Payload
from trueup.comparison.normalise.mapping import Mapping
from trueup.comparison.verdict.align import align

LEAST = 1e-6
"""Relative distance from the truth that no baseline is blamed for: 16 units of float32."""


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
    baseline, candidate, *others = streams
    found = spread(baseline, others[:repeats], [payloads[0], *payloads[2 : 2 + repeats]]) if repeats else None
    if len(others) == repeats:
        return Yardstick(found)
    truth, payload = others[-1], payloads[-1]
    far = (
        distance_from(truth, baseline, (payload, payloads[0])),
        distance_from(truth, candidate, (payload, payloads[1]), mapping),
    )
    return Yardstick(found, far)


def spread(baseline: Stream, repeats: Sequence[Stream], payloads: Sequence[Payload]) -> Array:
    """Return how far each slot of the baseline is from its repeats.

    Args:
        baseline: the run.
        repeats: the same run, again.
        payloads: of the baseline, then of each repeat.
    """
    found = np.full(len(baseline.slot), np.nan)
    for repeat, payload in zip(repeats, payloads[1:], strict=True):
        errors = measure(align(baseline, repeat), baseline, repeat, (payloads[0], payload))
        np.fmax.at(found, errors.slots[0], errors.relative)
    return found


def behind(errors: Errors, yardstick: Yardstick, allowed: float) -> Numbers:
    """Return the matched calls of which the baseline is several times further from the float64 run than the candidate."""
    if yardstick.truth is None:
        return np.zeros(0, np.int64)
    baseline, candidate = (truth[slots] for truth, slots in zip(yardstick.truth, errors.slots, strict=True))
    worse = errors.outputs & (baseline > np.maximum(allowed * candidate, LEAST))
    return np.unique(errors.pair[worse])


def distance_from(
    reference: Stream, stream: Stream, payloads: tuple[Payload, Payload], mapping: Mapping | None = None
) -> Array:
    """Return how far each slot of a run is from the float64 run, relative to the latter."""
    found = np.full(len(stream.slot), np.nan)
    errors = measure(align(reference, stream, mapping), reference, stream, payloads)
    known = errors.method != STATISTICS  # which only bound a distance
    np.fmax.at(found, errors.slots[1][known], errors.relative[known])
    return found


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
