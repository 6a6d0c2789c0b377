"""Losses of two runs: how far apart they are, what rounding explains, and which of two runs a third one follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Losses = Mapping[int, float]

ROUNDING = 64
"""How many units of rounding of the narrowest dtype a loss may move when the same mathematics is computed in another order. Ours:
float32 classifiers and transformers moved by up to 10 of them when kernels were fused or not; sums of large terms move more."""
UPDATED = 1e-3
"""What rounding may become by the first update of the weights. Ours: Adam makes a full step of a gradient that is all rounding."""
TELLING = 16
"""Below so many units of rounding (and `UPDATED`) other switches move a loss as far, and it does not tell which one is guilty."""
CLEAR = 0.05
"""A relative distance that no rounding explains within a few steps: that of `trueup compare`'s criterion (``loss``)."""
NOISE = 4.0
"""How many times further apart than the run from its own repeat; as a spread of two runs is itself uncertain by so much."""
NEAR = 0.1
"""A run follows another one where it is this near to it, in shares of the distance between the two."""


def gap(one: float, other: float) -> float:
    """Return the relative distance of two losses; infinite where one of them is no number and the other is."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


@dataclass(frozen=True, slots=True)
class Apart:
    """Two runs' losses, over the steps that both have."""

    steps: int
    first: int | None
    """First step in which they differ at all, None: bitwise the same."""
    largest: float
    widest: int | None
    """First step in which they are at least half as far apart as in any."""
    step: int | None
    """First step in which they differ by more than rounding and noise explain; None: in no step."""
    relative: float
    """How far apart they are there."""


def apart(one: Losses, other: Losses, again: Losses, unit: float) -> Apart:
    """Tell how far apart two runs are.

    Args:
        one: losses by step.
        other: of the other run.
        again: of a repeat of the first run.
        unit: rounding unit of the narrowest dtype that the training computes in.
    """
    both = sorted(set(one) & set(other))
    gaps = {step: gap(one[step], other[step]) for step in both}
    first = next((step for step in both if gaps[step] > 0), None)
    largest = max(gaps.values(), default=0.0)
    widest = next((step for step in both if first is not None and gaps[step] >= largest / 2), None)
    noise = 0.0
    for number, step in enumerate(both):
        noise = max(noise, gap(one[step], again[step]) if step in again else 0.0)
        allowed = (0.0, UPDATED)[number] if number < 2 else CLEAR  # later on rounding has gone through the weights
        if gaps[step] > max(min(ROUNDING * unit, CLEAR), allowed, NOISE * noise):
            return Apart(len(both), first, largest, widest, step, gaps[step])
    return Apart(len(both), first, largest, widest, None, 0.0)


def tells(relative: float, unit: float) -> bool:
    """Tell whether two losses are far enough apart to see which of them a third one follows."""
    return relative > min(TELLING * unit, UPDATED)


def follows(loss: float, one: float, other: float) -> bool:
    """Tell whether a loss is ``other``, rather than ``one`` or something between the two."""
    if math.isfinite(one) and math.isfinite(other):
        return math.isfinite(loss) and abs(loss - other) <= NEAR * abs(one - other)
    return gap(loss, other) <= CLEAR


def spread(one: Losses, again: Losses) -> float:
    """Return the largest distance of a run from its repeat."""
    return max((gap(one[step], again[step]) for step in set(one) & set(again)), default=0.0)
