"""Two runs that begin alike: what differs in their first steps is no noise of their batches.

Two runs with the same weights and batches compute the same at first, up to rounding, and wander apart later: what a rule for whole
runs (`comparing`) has to allow hides a fault of 10 % then. Whether two runs begin alike their first layer says: in the first step
its outputs agree (`SAME`). Two rules look at the first `FIRST` steps, as far as they have everything:

- **behind layers that agree**: the loss, gradients and updates in three of the first five. How far outputs of layers are apart in a
  step, at most, is what rounding does there; a loss may be off by six times that, as many times more as the largest output of the
  last layer is larger than the loss, and so may gradients; one of a layer by so much of the whole gradient, for rounding of large
  terms may be all that there is of a small one.
- **in the middle**: a number of its own in each step (an output, a gradient; no moment, which remembers) whose difference has a
  median of over six robust deviations of the difference. Other dropout masks make no such thing: their differences change sides.

Both leave differences of under 2 % alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.curves.statistics import NORMAL, OF, OWN_NOISE, SUSTAINED
from trueup.analysis.monitor.kinds import Joined
from trueup.foundation.store.series import SeriesReader

Floats = NDArray[np.float64]
FIRST = 20  # steps: a monitor takes everything in each of them
SAME = (1e-3, 2**-7)  # of the first layer's outputs in the first step, relative: of their root mean square, of the largest
LEAST = 0.02  # on the log scale, as everywhere
ROUNDED = 1e-6  # of a gradient: what float32 does to it, whatever agrees before
FEWEST = 8  # steps that a median is told of
BEHIND = ("loss", "gradient_norm", "gradient_norm_before_clip", "local_gradient_norm", "update_ratio")
FRESH = (
    "loss", "gradient_norm", "gradient_norm_before_clip", "local_gradient_norm", "activation_rms", "attention_largest_logit",
    "router_largest_logit", "output_gradient_rms",
)  # fmt: skip
Sides = Sequence[SeriesReader | Joined]


@dataclass(frozen=True)
class Start:
    """The first steps of two runs that begin alike."""

    steps: NDArray[np.int64]
    apart: Floats  # how far a loss may be apart in a step: six times what layers are; NaN where they were not taken
    share: Floats  # of the whole gradient that a layer's may be off by, times the whole gradient
    gradients: dict[str, Floats]  # norms of layers in the baseline

    def leaves(self, name: str, steps: NDArray[np.int64], difference: Floats) -> tuple[int, float] | None:
        """Return the place of the first step in which a series leaves, and how far apart it might be; None: it does not.
        ``difference``: of logarithms, by step."""
        kind, _, scope = name.partition("/")
        here = np.flatnonzero(np.isin(steps, self.steps))
        at = np.searchsorted(self.steps, steps[here])
        told = difference[here]
        limit = np.fmax(LEAST, self.apart[at])
        least = np.full(len(here), LEAST)
        if scope and kind in BEHIND:
            own = self.gradients.get(scope)
            if own is None:
                return None
            least = np.fmax(least, self.share[at] / np.maximum(own[at], 1e-300))
            limit = np.fmax(limit, least)
        if kind in BEHIND:
            known = np.flatnonzero(np.isfinite(self.apart[at]) & np.isfinite(told))[:OF]
            for side in (1, -1):
                beyond = known[side * told[known] > limit[known]]
                if len(beyond) >= SUSTAINED:
                    return int(here[beyond[0]]), float(limit[beyond[0]])
        if kind in FRESH:
            finite = np.isfinite(told) & np.isfinite(self.apart[at])
            if finite.sum() >= FEWEST:
                some = told[finite]
                middle = float(np.median(some))
                noise = max(float(np.median(least[finite])), OWN_NOISE * NORMAL * float(np.median(np.abs(some - middle))))
                beyond = np.flatnonzero(finite & (np.sign(middle) * told > noise))
                if abs(middle) > noise:
                    return int(here[beyond[0]]), noise
        return None


@np.errstate(divide="ignore", invalid="ignore")
def start(sides: Sides, rank: int, names: Sequence[str], steps: NDArray[np.int64]) -> Start | None:
    """Return the first steps of two runs, None where they do not begin alike: with other batches, or not at the same step."""
    begun = [side.steps(rank)[:1] for side in sides]
    if not len(steps) or any(int(one[0]) != int(steps[0]) for one in begun):
        return None
    first = steps[steps < steps[0] + FIRST]
    places = [np.searchsorted(side.steps(rank), first) for side in sides]
    outputs = [name for name in names if name.partition("/")[0] in ("activation_rms", "activation_max")]
    layers = [name for name in names if name.startswith("gradient_norm/")]
    wanted = [*outputs, *layers, *(name for name in ("loss", "gradient_norm") if name in names)]
    held = [
        {name: one[place] for name, one in side.columns(rank, wanted).items()} for side, place in zip(sides, places, strict=True)
    ]
    apart = {name: np.abs(np.log(held[1][name] / held[0][name])) for name in outputs}
    scopes = {name.partition("/")[2]: None for name in outputs}
    scope = next((one for one in scopes if one and not any(other.startswith(f"{one}.") for other in scopes)), None)
    if scope is None or len(outputs) < 4 or "loss" not in names or "gradient_norm" not in names:
        return None
    far = [apart.get(f"{kind}/{scope}", np.full(1, np.inf))[0] for kind in ("activation_rms", "activation_max")]
    if not all(one <= most for one, most in zip(far, SAME, strict=True)):
        return None
    every = np.array([apart[name] for name in outputs])
    there = np.isfinite(held[0][outputs[0]])
    rounding = np.where(there, np.fmax.reduce(np.where(np.isfinite(every), every, 0.0)), np.nan)
    last = held[0][next(name for name in reversed(outputs) if name.startswith("activation_max"))]
    more = 1 + np.nan_to_num(last / held[0]["loss"], nan=0.0, posinf=np.inf)
    share = OWN_NOISE * np.fmax(rounding, ROUNDED) * more * held[0]["gradient_norm"]
    return Start(first, OWN_NOISE * rounding * more, share, {name.partition("/")[2]: held[0][name] for name in layers})
