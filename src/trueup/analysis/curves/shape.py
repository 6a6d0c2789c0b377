"""Along the steps: where two curves part, by how many steps one is later, spikes, change points, slopes.

All on the logarithm of a positive curve, else on the curve itself. A step alone says little: "beyond the noise band" asks for three
of five steps on the same side. The band comes from the baseline's repeats, left out one at a time: its width is the most that a
healthy run is off from the others anywhere (so a healthy candidate leaves it in 1 of n + 1 comparisons), or with fewer than three
repeats from the steps of the baseline beside its own running median, and then nothing is known of healthy runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
SUSTAINED, OF = 3, 5  # steps beyond the band, of how many in a row, for one not to be an outlier
OWN_NOISE = 6.0  # times the step-to-step noise: MAD-based z of a spike, and of the band where nothing else is known
WINDOW = 128  # steps of a running median and MAD
NORMAL = 1.4826  # a normal distribution's standard deviation in units of its MAD
CHUNK = 1 << 14  # windows at a time, for memory
BLOCKS = 256  # a difference is averaged to so many blocks before change points are looked for
PENALTY = 3.0  # times log(blocks), of a change point (Killick et al. 2012, with a margin for noise that depends on its neighbours)
FEWEST = 30  # steps that a slope is told of
SMALLEST_PART = 8  # blocks between change points


@dataclass(frozen=True, slots=True)
class Band:
    """What healthy curves do."""

    center: Numbers
    half: Numbers
    repeats: int  # of the baseline that it is made of; below three, its own steps are

    @property
    def alarms(self) -> float | None:
        """How often a healthy candidate would leave it; None if that is not known."""
        return 1 / (self.repeats + 1) if self.repeats >= 3 else None


def band(baseline: Numbers) -> Band:
    """Return the noise band of ``(runs, steps)``."""
    runs, steps = baseline.shape
    center = baseline.mean(axis=0)
    if runs >= 3:
        unit = np.sqrt(_smoothed(baseline.var(axis=0, ddof=1), max(OF, steps // 20)))
        unit = np.maximum(unit, 1e-12 * np.abs(center).max(initial=1e-300))
        others = (runs * center - baseline) / (runs - 1)
        scores = (baseline - others) / (unit * math.sqrt(runs / (runs - 1)))
        widest = max(float(sustained(row).max(initial=0.0)) for row in scores)
        return Band(center, widest * unit * math.sqrt(1 + 1 / runs), runs)
    own = np.mean([_noise(row) for row in baseline], axis=0)
    return Band(center, OWN_NOISE * own * math.sqrt(2), runs)


def leaves(candidate: Numbers, held: Band) -> int | None:
    """Return the first place from which a curve stays beyond the band in three of five steps, None if it never does."""
    half = np.where(held.half > 0, held.half, np.finfo(float).tiny)
    away = np.nan_to_num((candidate - held.center) / half, nan=math.inf)
    found = np.flatnonzero(sustained(away) > 1)
    if not found.size:
        return None
    first = int(found[0])
    beyond = np.flatnonzero(np.abs(away[first : first + OF]) > 1)
    return first + int(beyond[0])


def sustained(away: Numbers) -> Numbers:
    """Return for each window of five steps how far at least three of them are off, on one side."""
    size = min(OF, len(away))
    windows = np.sort(sliding_window_view(away, size), axis=1)
    need = min(SUSTAINED, size)
    found: Numbers = np.maximum(windows[:, -need], -windows[:, need - 1])
    return found


def parts(one: Numbers, other: Numbers) -> int | None:
    """Return the first place at which two curves are not the same number, None if they are the same everywhere."""
    unequal = np.flatnonzero((one != other) & ~(np.isnan(one) & np.isnan(other)))
    return int(unequal[0]) if unequal.size else None


def _smoothed(values: Numbers, width: int) -> Numbers:
    """Return running means of about ``width`` steps, with what there is at the ends."""
    half = max(width // 2, 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    found: Numbers = (sums[high] - sums[low]) / (high - low)
    return found


def _noise(values: Numbers) -> Numbers:
    """Return the step-to-step noise around the running median, by the MAD of the last steps."""
    if len(values) < OF:
        return np.full(len(values), math.inf)
    rest = np.abs(values - _running_median(values, 9))
    size = min(WINDOW, len(values))
    around = NORMAL * _running_median(rest, size)
    found: Numbers = np.maximum(around, 1e-12 * np.abs(values).max(initial=1e-300))
    return found


def _running_median(values: Numbers, size: int) -> Numbers:
    """Return medians of ``size`` values around each place, the ends with the first and the last window."""
    size = min(size, len(values))
    windows = sliding_window_view(values, size)
    made = np.concatenate([np.median(windows[at : at + CHUNK], axis=1) for at in range(0, len(windows), CHUNK)])
    before = (len(values) - len(made)) // 2
    return np.pad(made, (before, len(values) - len(made) - before), mode="edge")


def spikes(values: Numbers) -> list[int]:
    """Return the places where spikes begin: over six MAD-based deviations above the median of the 128 steps before."""
    if len(values) <= WINDOW // 4 or not np.isfinite(values).all():
        return []
    size = min(WINDOW, len(values) // 2)
    found: list[int] = []
    for at in range(0, len(values) - size, CHUNK):
        windows = sliding_window_view(values[at : at + CHUNK + size], size)[:-1]
        middle = np.median(windows, axis=1)
        spread = NORMAL * np.median(np.abs(windows - middle[:, None]), axis=1)
        away = values[at + size : at + size + len(windows)] - middle
        found += [at + size + int(k) for k in np.flatnonzero(away > OWN_NOISE * np.maximum(spread, 1e-9))]
    return [place for n, place in enumerate(found) if n == 0 or place - found[n - 1] > 1]


def changes(difference: Numbers) -> list[int]:
    """Return where the level of a difference of curves changes (PELT, Killick et al. 2012), as places in it."""
    import ruptures

    size = max(1, -(-len(difference) // BLOCKS))
    count = len(difference) // size
    blocks = difference[: count * size].reshape(count, size).mean(axis=1)
    if count < 3 * SMALLEST_PART:
        return []
    noise = NORMAL * float(np.median(np.abs(np.diff(blocks)))) / math.sqrt(2)
    if not noise:
        return []
    signal = np.clip(blocks / noise, -1e6, 1e6)
    found = ruptures.Pelt(model="l2", min_size=SMALLEST_PART, jump=1).fit(signal).predict(pen=PENALTY * math.log(count) * 2)
    return [int(place) * size for place in found[:-1]]


def slope(steps: NDArray[np.int64], values: Numbers) -> float:
    """Return the least-squares slope of the last third, a thousand steps."""
    at = 2 * len(values) // 3
    x, y = steps[at:].astype(np.float64), values[at:]
    if len(x) < FEWEST or not np.isfinite(y).all():
        return math.nan
    return float(np.polyfit(x - x.mean(), y, 1)[0]) * 1000


@dataclass(frozen=True, slots=True)
class Lag:
    """How much longer a curve takes to get as low as the other one."""

    steps: int  # of the candidate; negative: the baseline takes longer
    share: float  # of the steps that both have
    there: int  # the step at which the earlier one is where the later one ends
    then: int  # the step at which the later one is


def lag(steps: NDArray[np.int64], baseline: Sequence[Numbers], candidate: Sequence[Numbers]) -> Lag | None:
    """Return by how many steps the candidate is later at the end; None where the curves do not fall, or are not finite. Mean curves
    are made monotone first (isotonic regression), so that noise does not count as progress."""
    from scipy import optimize

    before, after = (np.mean(side, axis=0) for side in (baseline, candidate))
    if len(steps) < 10 or not (np.isfinite(before).all() and np.isfinite(after).all()):
        return None
    first, second = (np.asarray(optimize.isotonic_regression(-one, increasing=True).x) * -1 for one in (before, after))
    whole = int(steps[-1] - steps[0])
    behind = second[-1] > first[-1]
    ahead, late, end = (first, second, second[-1]) if behind else (second, first, first[-1])
    if ahead[0] <= end or late[0] == late[-1] or not whole:  # it begins below the other's end, or does not fall
        return None
    there, then = (int(steps[int(np.argmax(one <= end))]) for one in (ahead, late))
    return Lag(then - there if behind else there - then, (then - there) / whole, there, then)
