"""What curves tell: tests of one number a run (two one-sided tests for equivalence, their power, how many repeats they would need),
and what is seen along the steps: where two curves part, by how many steps one is later, spikes, change points, slopes.

Schuirmann 1987 (two one-sided t-tests); Welch 1947 and Satterthwaite 1946 (unequal spreads); Sasabuchi 1980, Hauschke et al. 1999
(a margin that is a share of an unknown baseline: the bounds are tested as ``candidate - (1 -+ margin) * baseline``). Numbers of one
run at many steps depend on each other: they are never samples here. SciPy has the distributions (extra ``curves``).

Shapes are those of the logarithm of a positive curve, else of the curve itself, and need NumPy alone. A step alone says little:
"beyond the noise band" asks for three of five steps on the same side. The band comes from the baseline's repeats, left out one at a
time: its width is the most that a healthy run is off from the others anywhere (so a healthy candidate leaves it in 1 of n + 1
comparisons), or with fewer than three repeats from the steps of the baseline beside its own running median, and then nothing is
known of healthy runs.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trueup.foundation.model import TrueupError

Numbers = NDArray[np.float64]
Word = Literal["equivalent", "different", "different inside the margin", "could not tell"]
Better = Literal["lower", "higher"]

ALPHA = 0.05  # of each one-sided test, and of the two-sided one: Schuirmann 1987 and the usage since
WANTED = 0.8  # power that the repeats needed would have: Cohen 1988
MOST_REPEATS = 1000
SPLITS = 126  # of the baseline into halves, for the control: all of up to 9 runs
GRID, RATIOS = 400, 40  # spreads, and ratios of two spreads, over which the power is averaged

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
class Tested:
    """What the tests say of one number a run."""

    word: Word
    runs: tuple[int, int]
    paired: bool
    difference: float  # relative to the baseline
    low: float  # 90 % interval of it, within which both one-sided tests look
    high: float
    p_equivalent: float  # of the worse of the two one-sided tests
    p_same: float  # two-sided, against no difference
    spread: float  # standard deviation of a run (paired: of a difference), relative; NaN where nothing tells it
    power: float  # with which equal trainings of this spread would be found equivalent
    needed: int | None  # repeats a side for a power of `WANTED`; None: more than `MOST_REPEATS`, or not known


def require() -> None:
    """Say what is to be installed, where it is not; raises TrueupError."""
    if any(importlib.util.find_spec(name) is None for name in ("scipy", "ruptures")):
        raise TrueupError("Curves cannot be judged without SciPy and ruptures.\n  next:     pip install 'trueup[curves]'")


def equivalence(
    baseline: Sequence[float], candidate: Sequence[float], margin: float, *, logarithmic: bool, paired: bool = False,
    better: Better | None = None, spread: float | None = None,
) -> Tested:  # fmt: skip
    """Test whether a candidate's runs end within ``margin`` (0.005) of a baseline's: a number a run, both of the same kind.

    ``logarithmic``: all are positive and logarithms are compared, so that a margin is a factor. ``paired``: the n-th runs of both
    sides share seed and data. ``better``: only what is worse counts (non-inferiority). ``spread``: the relative standard deviation
    of a run, known from elsewhere. All numbers have to be finite.
    """
    b, c = (np.asarray(side, np.float64) for side in (baseline, candidate))
    center = abs(float(b.mean()))
    if logarithmic:
        scale, shift, known = 1.0, (-math.log1p(margin), math.log1p(margin)), spread
        b, c, factors = np.log(b), np.log(c), (1.0, 1.0)
    else:
        sign = 1.0 if b.mean() >= 0 else -1.0
        scale, shift, factors = center, (0.0, 0.0), (1 - sign * margin, 1 + sign * margin)
        known = None if spread is None else spread * center
    low, high = (_estimate(b, c, factor, paired, known) for factor in factors)
    middle = _estimate(b, c, 1.0, paired, known)
    p_low, p_high = _p(low, shift[0]), 1 - _p(high, shift[1])
    p_equivalent = {None: max(p_low, p_high), "lower": p_high, "higher": p_low}[better]
    p_same = 2 * min(_p(middle, 0.0), 1 - _p(middle, 0.0))
    worse = {None: True, "lower": middle.value > 0, "higher": middle.value < 0}[better]
    width = _quantile(1 - ALPHA, middle.freedom) * middle.error if middle.error else 0.0
    ends = [middle.value - width, middle.value, middle.value + width]
    if not scale:  # a baseline of zero: no share of it is a distance
        ends = [0.0 if end == 0 else math.copysign(math.inf, end) for end in ends]
        scale = 1.0
    if math.isnan(middle.error):
        ends[0], ends[2] = -math.inf, math.inf
    relative = [_relative(end, scale, logarithmic) for end in ends]
    bound = math.log1p(margin) if logarithmic else margin * scale
    word = _word(p_equivalent <= ALPHA, p_same <= ALPHA, worse and abs(middle.value) > bound, worse)
    one = middle.deviation / scale
    told = math.isfinite(one)
    alike = len(b) if len(b) == len(c) and not paired and spread is None else None
    power_now = power(middle.error / scale, middle.freedom, bound / scale, alike) if told else 0.0
    more = needed(one, bound / scale, paired, known=spread is not None) if told else None
    return Tested(
        word, (len(b), len(c)), paired, relative[1], relative[0], relative[2], p_equivalent, p_same, one, power_now, more
    )  # fmt: skip


def _word(equivalent: bool, differs: bool, beyond: bool, worse: bool) -> Word:
    if equivalent:
        return "different inside the margin" if differs and worse else "equivalent"
    return "different" if differs and beyond else "could not tell"


@dataclass(frozen=True, slots=True)
class _Estimate:
    value: float  # of candidate - factor * baseline
    error: float  # its standard error
    freedom: float
    deviation: float  # of one run, or of one pair


def _estimate(b: Numbers, c: Numbers, factor: float, paired: bool, known: float | None) -> _Estimate:
    value = float(c.mean() - factor * b.mean())
    if known is not None:
        count = 1 / len(c) + factor**2 / len(b)
        return _Estimate(value, known * math.sqrt(count), math.inf, known)
    if paired and len(b) > 1:
        deviation = float((c - factor * b).std(ddof=1))
        return _Estimate(value, deviation / math.sqrt(len(b)), len(b) - 1, deviation)
    squares = [float(side.var(ddof=1)) if len(side) > 1 else math.nan for side in (b, c)]
    if all(map(math.isnan, squares)):
        return _Estimate(value, math.nan, math.nan, math.nan)
    if any(map(math.isnan, squares)):  # a single run on one side: its spread is taken to be the other side's
        square, many = next((one, len(side)) for one, side in zip(squares, (b, c), strict=True) if not math.isnan(one))
        return _Estimate(value, math.sqrt(square * (1 / len(c) + factor**2 / len(b))), many - 1, math.sqrt(square))
    parts = [factor**2 * squares[0] / len(b), squares[1] / len(c)]
    total = sum(parts)
    freedom = len(b) + len(c) - 2.0
    if total:
        freedom = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (b, c), strict=True))
    return _Estimate(value, math.sqrt(total), freedom, math.sqrt(sum(squares) / 2))


def _p(estimate: _Estimate, at: float) -> float:
    """Return how likely a value that large is if the true one is ``at``."""
    from scipy import stats

    if math.isnan(estimate.error):
        return 0.5
    if not estimate.error:
        return 0.5 if estimate.value == at else float(estimate.value < at)
    away = (estimate.value - at) / estimate.error
    return float(stats.norm.sf(away) if math.isinf(estimate.freedom) else stats.t.sf(away, estimate.freedom))


def _quantile(share: float, freedom: float) -> float:
    from scipy import stats

    return float(stats.norm.ppf(share) if math.isinf(freedom) else stats.t.ppf(share, freedom))


def _relative(value: float, scale: float, logarithmic: bool) -> float:
    return value if math.isinf(value) else math.expm1(min(value, 700.0)) if logarithmic else value / scale


def power(error: float, freedom: float, bound: float, each: int | None = None) -> float:
    """Return how often two one-sided t-tests find equal trainings equivalent: ``error`` is the true standard error of the
    difference, ``bound`` the margin, ``each`` the runs a side where they are not paired.

    The estimated error is averaged over its distribution (chi), and the freedom of Welch's test over that of the ratio of both
    spreads (beta; independent of their sum where the true ones are equal), so that small samples are exact.
    """
    from scipy import stats

    if not error:
        return 1.0
    if math.isinf(freedom):
        rooms = np.array([bound / error - _quantile(1 - ALPHA, freedom)])
    else:
        quantiles, scales = _chances(freedom, each)
        rooms = bound / error - quantiles[:, None] * scales[None, :]
    return float(np.mean(np.where(rooms > 0, 2 * stats.norm.cdf(rooms) - 1, 0.0)))


@cache
def _chances(freedom: float, each: int | None) -> tuple[Numbers, Numbers]:
    """Return equally likely quantiles of t, and estimated errors relative to the true one."""
    from scipy import stats

    places, whole = (np.arange(GRID) + 0.5) / GRID, freedom if each is None else 2 * (each - 1)
    freedoms: Any = np.array([freedom])
    if each is not None:
        ratios = stats.beta.ppf((np.arange(RATIOS) + 0.5) / RATIOS, (each - 1) / 2, (each - 1) / 2)
        freedoms = (each - 1) / (ratios**2 + (1 - ratios) ** 2)
    return np.asarray(stats.t.ppf(1 - ALPHA, freedoms)), np.sqrt(stats.chi2.ppf(places, whole) / whole)


def needed(deviation: float, bound: float, paired: bool, *, known: bool = False) -> int | None:
    """Return the repeats a side with which the power is `WANTED`, None if that takes more than `MOST_REPEATS`."""

    def enough(count: int) -> bool:
        if known:
            return power(deviation * math.sqrt(2 / count), math.inf, bound) >= WANTED
        error = deviation * math.sqrt((1 if paired else 2) / count)
        return power(error, count - 1, bound, None if paired else count) >= WANTED

    low, high = (0 if known else 1), MOST_REPEATS
    if not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def control(baseline: Sequence[float], margin: float, *, logarithmic: bool, better: Better | None = None) -> dict[Word, int]:
    """Test the halves of a baseline's repeats against each other, by the same tests: how often each word is the answer. Empty below
    four repeats, of which no half has a spread. Two halves of one training that differ are no healthy baseline."""
    count = len(baseline)
    found: dict[Word, int] = {}
    if count < 4:
        return found
    everything = frozenset(range(count))
    for number, chosen in enumerate(combinations(range(count), count // 2)):
        if number >= SPLITS or (count % 2 == 0 and 0 not in chosen):
            break
        rest = [baseline[k] for k in sorted(everything.difference(chosen))]
        word = equivalence([baseline[k] for k in chosen], rest, margin, logarithmic=logarithmic, better=better).word
        found[word] = found.get(word, 0) + 1
    return found


def holm(found: Sequence[float]) -> list[bool]:
    """Tell which of several p-values reject together at `ALPHA` (Holm 1979)."""
    rejected = [False] * len(found)
    for place, which in enumerate(sorted(range(len(found)), key=lambda k: found[k])):
        if found[which] > ALPHA / (len(found) - place):
            break
        rejected[which] = True
    return rejected


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
