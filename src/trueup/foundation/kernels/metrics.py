"""How far two tensors are apart, in the named measures of the field, from one pass over both; and whether they are close.

>>> m = Metrics.of(np.array([[3.0, 4.0]]), np.array([[3.0, 4.5]], np.float32))
>>> m.relative_l2, m.max_absolute, m.max_index
(0.1, 0.5, (0, 1))

Measures are over the pairs of reals that count: both sides finite, neither a mask (``kernels.MASKING``); a complex element is two
reals. What does not count is compared as sets of positions. Where those differ, ``relative_l2`` is Inf: the tensors do not agree.

An element is close where ``|b - a| <= atol + rtol |a|``, the rule of ``numpy.isclose`` and ``torch.isclose`` with the baseline
as the reference; NaN is close to NaN, Inf to the same Inf. Of complex elements magnitudes are taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels import Pair, coarser_dtype, distance, pair, subtracted, summarize
from trueup.foundation.kernels.sketch import GROUP, ROWS_PER_GROUP
from trueup.foundation.model import LANES, PACKED, TensorStats

SINGLE_EPSILON = 2.0**-23  # up to which msaccucmp takes a golden value for zero, and to which it raises shares: float32's epsilon
PIECE = 1 << 16  # elements that the measures of a second pass take at a time

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The measures of a pair; ``a`` is the baseline, ``b`` the candidate, ``d = b - a``, sums over what counts (``counted`` of
    them). Where nothing counts and the positions agree (empty tensors, NaN everywhere on both sides), errors are 0, cosine and
    shares 1."""

    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    numel: int  # elements
    counted: int  # reals that count
    equal: int  # reals that are the same number on both sides (±0 are); integers and bool exactly
    relative_l2: float  # √Σd² / √Σa². 0 where nothing differs, Inf where only the baseline is zero, or NaN, Inf or masks disagree
    cosine: float
    """Σab / (√Σa² √Σb²). 1 where both sides are zero, NaN where one is (no direction: ptdbg, msaccucmp). Of one element: its
    sign."""
    rmse: float  # √(Σd² / n)
    max_absolute: float  # max |d|
    max_index: tuple[int, ...] | None  # where, first in C order; None where nothing differs. ``()`` of a 0-d tensor
    mean_absolute: float  # Σ|d| / n
    max_relative: float  # max |d| / |a|; where a is zero, |b| / epsilon of the baseline's dtype (ptdbg ``MaxRelativeErr``)
    mean_relative: float  # mean of the same
    thousandth: float  # share of reals whose relative error is below 1/1000 (ptdbg ``One Thousandth Err Ratio``); 1 is best
    five_thousandths: float  # share below 5/1000
    sign_flips: int  # reals above zero on one side and below on the other
    disagreeing: int  # reals where one side has a NaN, Inf or mask and the other has not the same
    first_disagreement: tuple[int, ...] | None  # index of the first of those
    unit: str  # the coarser dtype
    ulp: tuple[int, ...]
    """Counts of |d| of 0, 1, 2 to 3, 4 to 7 ... units in the last place: numbers of dtype ``unit`` between the two sides (Dawson,
    "Comparing Floating Point Numbers", 2012)."""
    pair: Pair  # all that the pass gave, the positions of NaN, Inf and masks among it

    @staticmethod
    def of(baseline: NDArray[Any], candidate: NDArray[Any], threads: int = 1) -> Metrics:
        """Measure two arrays of the same shape and any dtypes. Raises ValueError if the shapes differ, TypeError if a dtype holds
        no numbers or is wider than float64."""
        p = pair(baseline, candidate, threads)
        n = p.counted
        return Metrics(
            dtypes=(baseline.dtype.name, candidate.dtype.name),
            shape=baseline.shape,
            numel=baseline.size,
            counted=n,
            equal=p.equal,
            relative_l2=relative_l2(p),
            cosine=cosine(p),
            rmse=p.rmse if n else 0.0,
            max_absolute=p.max_absolute,
            max_index=index_of(p.max_index, baseline.shape),
            mean_absolute=p.mean_absolute if n else 0.0,
            max_relative=p.max_relative,
            mean_relative=p.mean_relative if n else 0.0,
            thousandth=p.n_thousandth / n if n else 1.0,
            five_thousandths=p.n_five_thousandths / n if n else 1.0,
            sign_flips=p.n_sign_flips,
            disagreeing=p.n_disagree,
            first_disagreement=index_of(p.first_disagreement, baseline.shape),
            unit=coarser_dtype(baseline.dtype, candidate.dtype).name,
            ulp=p.ulp,
            pair=p,
        )

    @property
    def same(self) -> bool:
        """Whether every element is the same number, or the same NaN, Inf or mask, on both sides."""
        return self.equal == self.counted and not self.disagreeing


def relative_l2(p: Pair) -> float:
    """Return √Σd² / √Σa²; see ``Metrics.relative_l2``."""
    if p.n_disagree:
        return math.inf
    if p.l2_difference == 0:
        return 0.0
    return p.l2_difference / p.l2_baseline if p.l2_baseline > 0 else math.inf


def cosine(p: Pair) -> float:
    """Return the cosine of the angle between the sides; see ``Metrics.cosine``."""
    if p.l2_baseline == 0 and p.l2_candidate == 0:
        return 1.0
    return p.cosine


def index_of(flat: int | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the index in each dimension of a flat one."""
    return None if flat is None else tuple(int(k) for k in np.unravel_index(flat, shape)) if shape else ()


@dataclass(frozen=True, slots=True)
class Msaccucmp:
    """The measures of msaccucmp (``compare``, ids 0 to 9), the golden side first; NaN where it gives none."""

    cosine: float
    max_absolute: float
    accumulated_relative: float
    """Σ |b/a - 1|: grows with the tensor. Like the next two but one, over elements with |a| above float32's epsilon."""
    relative_euclidean: float  # √Σd² / √Σa²; where √Σa² is at most epsilon msaccucmp gives 0, this Inf unless nothing differs
    kullback_leibler: float  # Σ p log(p / q) of the candidate p against the baseline q; see ``kullback_leibler``
    standard_deviation: tuple[tuple[float, float], tuple[float, float]]  # (mean, deviation) of the baseline and of the candidate
    mean_absolute: float
    rmse: float
    max_relative: float
    mean_relative: float

    @staticmethod
    def of(baseline: NDArray[Any], candidate: NDArray[Any], threads: int = 1) -> Msaccucmp:
        """Measure two arrays of the same shape; a second pass, and two for the divergence."""
        p = pair(baseline, candidate, threads, floor=SINGLE_EPSILON, instead=math.inf)
        sides = deviation(baseline, threads), deviation(candidate, threads)
        return Msaccucmp(
            cosine(p), p.max_absolute, p.sum_relative, relative_l2(p), kullback_leibler(baseline, candidate), sides,
            p.mean_absolute, p.rmse, p.max_relative, p.mean_relative,
        )  # fmt: skip


def deviation(values: NDArray[Any], threads: int = 1) -> tuple[float, float]:
    """Return mean and standard deviation (n in the denominator) of the reals that count; NaN where there is none."""
    out = np.empty(PACKED)
    summarize(values, out, threads)
    low, high, mean = out[:3].tolist()
    total, count = 0.0, 0
    for piece in _pieces(values):
        kept = piece[(piece >= low) & (piece <= high)]  # no NaN, Inf or mask
        total += float(np.sum(np.square(kept - mean)))  # l2 and mean alone would cancel
        count += kept.size
    return mean, math.sqrt(total / count) if count else math.nan


def kullback_leibler(baseline: NDArray[Any], candidate: NDArray[Any]) -> float:
    """Return Σ p log(p / q) of two tensors read as distributions, as msaccucmp's metric 4 does: blind to scale and shift.

    Each side is scaled to [0, 1], raised to float32's epsilon where it is below, and divided by its sum. A tensor of one value
    becomes all epsilon: the even distribution. NaN where an element is not finite, a side is complex or empty.
    """
    if not baseline.size or "c" in (baseline.dtype.kind, candidate.dtype.kind):
        return math.nan
    scales = [_span(side) for side in (candidate, baseline)]
    if not all(map(math.isfinite, (*scales[0], *scales[1]))):
        return math.nan
    sums = [sum(float(np.sum(_scaled(piece, scale))) for piece in _pieces(side))
            for side, scale in zip((candidate, baseline), scales, strict=True)]  # fmt: skip
    total = 0.0
    for p, q in zip(_pieces(candidate), _pieces(baseline), strict=True):
        share, other = _scaled(p, scales[0]) / sums[0], _scaled(q, scales[1]) / sums[1]
        total += float(np.sum(share * np.log(share / other)))
    return total


def _span(values: NDArray[Any]) -> tuple[float, float]:
    bounds = [(float(piece.min()), float(piece.max())) for piece in _pieces(values)]  # NaN goes through min and max
    low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
    return (low, high) if all(low <= b[0] for b in bounds) else (math.nan, math.nan)


def _scaled(values: NDArray[np.float64], span: tuple[float, float]) -> NDArray[np.float64]:
    low, high = span
    size = high / 2 - low / 2
    shifted = (values / 2 - low / 2) / size if size > 0 else np.zeros_like(values)
    return np.maximum(shifted, SINGLE_EPSILON)


def _pieces(values: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    """Yield float64 rows in C order, without a copy of the whole."""
    with np.nditer(values, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=PIECE) as pieces:
        for piece in pieces:
            row = np.ascontiguousarray(piece)
            yield (row.view(row.real.dtype) if row.dtype.kind == "c" else row).astype(np.float64)


@dataclass(frozen=True, slots=True)
class StatisticDifference:
    """One statistic on both sides."""

    name: str
    baseline: float
    candidate: float

    @property
    def absolute(self) -> float:
        """candidate - baseline (ptdbg 6: ``Max diff``, ``Min diff``, ``Mean diff``, ``L2norm diff``); 0 for equal Inf or NaN."""
        if self.baseline == self.candidate or (math.isnan(self.baseline) and math.isnan(self.candidate)):
            return 0.0
        return self.candidate - self.baseline

    @property
    def relative(self) -> float:
        """|difference| / (max(|baseline|, |candidate|) + 1e-10): at most 2. ptdbg 6 warns above 0.5."""
        size = abs(self.absolute)
        if math.isinf(size):
            return math.inf
        return size / (max(abs(self.baseline), abs(self.candidate)) + 1e-10) if size else 0.0


def moved_otherwise(tensors: Sequence[NDArray[Any] | None], factor: float) -> float | None:
    """Return the norm of what another gradient explains of an optimizer's update, element by element; None where a tensor lacks
    or they differ in size.

    ``tensors``: a weight before and after a step of the baseline, its gradient there and in the other run, of any one shape. An
    element that moved by d may be off by ``|d| min(2, factor |other - gradient| / |gradient|)``: Adam divides by the size of what
    it averages, so that a gradient of rounding alone still moves an element by a whole step, either way.
    """
    arrays = [array.reshape(-1) for array in tensors if array is not None]
    if len(arrays) < 4 or len({array.size for array in arrays}) > 1:
        return None
    total = 0.0
    for start in range(0, arrays[0].size, PIECE):
        old, new, own, its = (array[start : start + PIECE].astype(np.float64) for array in arrays)
        with np.errstate(all="ignore"):
            apart = np.where(own == its, 0.0, np.abs(its - own) / np.abs(own))
        total += float(np.nansum(((new - old) * np.fmin(2.0, factor * apart)) ** 2))
    return math.sqrt(total)


def differences(baseline: TensorStats, candidate: TensorStats) -> tuple[StatisticDifference, ...]:
    """Return max, min, mean and l2 of two tensors side by side, for captures without their elements."""
    names = ("max", "min", "mean", "l2")
    return tuple(StatisticDifference(name, float(getattr(baseline, name)), float(getattr(candidate, name))) for name in names)


def counts_that_differ(baseline: TensorStats, candidate: TensorStats) -> tuple[StatisticDifference, ...]:
    """Return the counts of NaN, of each Inf and of saturated elements that are not the same on both sides."""
    names = ("n_nan", "n_posinf", "n_neginf", "n_saturated")
    found = (StatisticDifference(name, getattr(baseline, name), getattr(candidate, name)) for name in names)
    return tuple(each for each in found if each.baseline != each.candidate)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What ``|b - a| <= atol + rtol |a|`` takes."""

    rtol: float = 1e-5
    atol: float = 1e-8

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}".replace("e-0", "e-") for name, value in (("rtol", self.rtol), ("atol", self.atol)))


@dataclass(frozen=True, slots=True)
class Element:
    """One element on both sides."""

    index: tuple[int, ...]
    baseline: Any  # as NumPy holds it: its own dtype
    candidate: Any
    absolute: float  # |b - a|; Inf where one side is NaN or Inf and the other is not the same
    times: float  # ``absolute`` over what the tolerance allows; Inf where that is nothing


@dataclass(frozen=True, slots=True)
class Closeness:
    """What a tolerance says of two tensors."""

    elements: int
    outside: int  # elements that are not close
    worst: tuple[Element, ...]  # the elements farthest from the tolerance, worst first; none that is the same on both sides

    @property
    def close(self) -> bool:
        """Whether all elements are."""
        return self.outside == 0


def closeness(baseline: NDArray[Any], candidate: NDArray[Any], tolerance: Tolerance, top: int = 10) -> Closeness:
    """Look at every element of two tensors of the same shape, in bounded memory. Raises ValueError if the shapes differ,
    TypeError if a dtype holds no numbers or is wider than float64."""
    parts = 2 if "c" in (baseline.dtype.kind, candidate.dtype.kind) else 1
    worst = np.empty((0, 3))  # times, absolute, flat index
    outside = start = 0
    for a, b, d in subtracted(baseline, candidate):
        size, base = _sizes(a, b, d, parts)
        with np.errstate(all="ignore"):
            allowed = tolerance.atol + tolerance.rtol * base
            outside += int(np.count_nonzero(~(size <= allowed)))
            times = np.where(size == 0, 0.0, np.where(np.isinf(size), np.inf, size / allowed))
        places = _largest(times, size, top)
        found = np.stack([times[places], size[places], start + places.astype(np.float64)], axis=1)
        worst = np.concatenate([worst, found])
        worst = worst[np.lexsort((worst[:, 2], -worst[:, 1], -worst[:, 0]))][:top]
        start += size.size
    elements = tuple(_element(baseline, candidate, row) for row in worst.tolist())
    return Closeness(baseline.size, outside, elements)


def _sizes(a: Floats, b: Floats, d: Floats, parts: int) -> tuple[Floats, Floats]:
    """Return |b - a| and |a| of each element; 0 where both sides are the same NaN or Inf, Inf where only one is."""
    with np.errstate(all="ignore"):
        size, base = np.abs(d), np.abs(a)
        odd = ~(np.isfinite(a) & np.isfinite(b))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        size[odd] = np.where(same[odd], 0.0, np.inf)
        base[~np.isfinite(base)] = 0.0  # an infinite reference would allow anything
    if parts == 2:
        return np.hypot(size[::2], size[1::2]), np.hypot(base[::2], base[1::2])
    return size, base


def _largest(times: Floats, size: Floats, top: int) -> NDArray[np.int64]:
    """Return where the at most ``top`` worst elements of a piece are, none of which is the same on both sides."""
    places = np.flatnonzero(size > 0)
    if places.size > 4 * top:  # what is tied at the edge is sorted out by its size
        edge = np.partition(times[places], -top)[-top] if top else math.inf
        places = places[times[places] >= edge]
    return places[np.lexsort((places, -size[places], -times[places]))][:top]


def _element(baseline: NDArray[Any], candidate: NDArray[Any], row: list[float]) -> Element:
    index = index_of(int(row[2]), baseline.shape)
    assert index is not None
    return Element(index, baseline[index], candidate[index], row[1], row[0])


@dataclass(frozen=True, slots=True)
class Estimate:
    """What statistics and sketches of two tensors tell about their elements."""

    relative_l2: float  # from the sketches, about ±18 %; NaN without them
    apart: str  # why the elements cannot all be close, or nothing


def estimate(
    baseline: TensorStats, candidate: TensorStats, sketches: tuple[Floats, Floats] | None, tolerance: Tolerance
) -> Estimate:
    """Compare two tensors of which only statistics were kept. If all elements are close, then counts of NaN and Inf are equal,
    max and min agree within the tolerance of either, norms within the norm of all tolerances, and sketches within `_farthest`.
    The converse does not hold."""
    found = _apart(baseline, candidate, tolerance)
    if sketches is None:
        return Estimate(math.nan, found)
    far = float(distance(*sketches))
    relative = 0.0 if far == 0 else far / baseline.l2 if baseline.l2 > 0 else math.inf
    if not found and baseline.n_saturated == candidate.n_saturated and far > _farthest(baseline, tolerance):
        found = f"the sketches are {far:.2g} apart"
    return Estimate(relative, found)


def _farthest(baseline: TensorStats, tolerance: Tolerance) -> float:
    """Return how far the sketches of two close tensors can be apart. A lane adds at most 8 of each 512 elements, so its square is
    at most that many times their squares (Cauchy-Schwarz), and those are at most what the tolerance allows."""
    n = baseline.numel * 2  # a complex element is two reals
    most = ROWS_PER_GROUP * math.ceil(n / GROUP)
    norm = baseline.l2 if math.isfinite(baseline.l2) else 0.0
    allowed = tolerance.atol * math.sqrt(n) + tolerance.rtol * norm
    return math.sqrt(most) * allowed + 1e-12 * math.sqrt(n) * norm


def _apart(baseline: TensorStats, candidate: TensorStats, tolerance: Tolerance) -> str:
    for each in counts_that_differ(baseline, candidate):
        if each.name != "n_saturated":
            return f"{each.name} is {each.baseline:,} and {each.candidate:,}"
    if baseline.n_saturated != candidate.n_saturated:
        return ""  # what is a mask on one side only is missing from the other numbers of that side
    for each in differences(baseline, candidate):
        if each.name == "mean" or not math.isfinite(each.absolute):
            continue
        allowed = tolerance.atol + tolerance.rtol * max(abs(each.baseline), abs(each.candidate))
        if each.name == "l2":
            allowed = tolerance.atol * math.sqrt(baseline.numel) + tolerance.rtol * each.baseline
        if abs(each.absolute) > allowed * (1 + 1e-9):
            return f"{each.name} is {each.baseline:.7g} and {each.candidate:.7g}"
    return ""


def from_sketch(stats: TensorStats, sketch: Floats, shape: tuple[int, ...], complex_: bool) -> Floats | None:
    """Return the elements of a small tensor from its sketch: float64 (complex128 for a complex one). None where it has more than
    64 reals, not as many as its shape says, or NaN, Inf or a mask, which a sketch does not hold."""
    from trueup.foundation.kernels import sketch as places

    reals = math.prod(shape) * (2 if complex_ else 1)
    if math.prod(max(size, 1) for size in shape) > LANES or reals > LANES or math.prod(shape) != stats.numel:
        return None
    if stats.n_nan or stats.n_posinf or stats.n_neginf or stats.n_saturated:
        return None
    values = places.elements(sketch, reals)
    return values.view(np.complex128).reshape(shape) if complex_ else values.reshape(shape)  # type: ignore[return-value]
