"""Two tensors, element by element, in one pass: by the compiled kernel, or by its NumPy twin. The twin goes piece by piece in
float64. It is the reference, and what runs without a compiler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels._compiled import KINDS, native
from trueup.foundation.kernels._summary import MASKING, Floats, Reals, reals_of

BUCKETS = 66  # buckets of the histogram of units in the last place: 0, 1, 2 to 3, 4 to 7, ..., 2**64 to 2**65 - 1

PACKED = 30 + BUCKETS  # Float64 that the kernels fill for a pair, in the order of ``Pair``'s fields behind ``instead``


class Positions(NamedTuple):
    """Where tensors have a NaN (or an Inf, or a mask): elements where both do, and where one does and the other does not."""

    both: int
    baseline: int
    candidate: int


@dataclass(frozen=True, slots=True)
class Pair:
    """What one pass over a baseline ``a`` and a candidate ``b`` gives; ``d`` is ``b - a``.

    Counts and sums are over reals: a complex element is two. A real *counts* where both sides are finite and neither is a mask
    (``kernels.MASKING``); all but the last six fields are over those.
    """

    numel: int  # reals of a side
    parts: int  # reals of an element: 2 for complex dtypes, else 1
    floor: float
    instead: float  # as ``pair`` was told
    counted: int
    equal: int  # of those, how many are the same number
    l2_difference: float  # √Σd²; this and the next two neither overflow nor vanish
    l2_baseline: float
    l2_candidate: float
    dot: float  # Σab
    cosine: float  # Σab / (√Σa² √Σb²), in [-1, 1]; NaN where a norm is zero
    sum_absolute: float  # Σ|d|
    max_absolute: float  # largest |d|; 0 where nothing counts. Of integers exact up to 2**53, above to a last place of float64
    max_index: int | None  # flat index (C order, in elements) of the first such; None where ``max_absolute`` is 0
    max_relative: float  # largest |d| / |a|, where |a| <= ``floor`` is replaced by ``instead``
    sum_relative: float
    n_floored: int  # how many |a| are at most ``floor``
    n_thousandth: int  # relative error below 0.001. With ``instead`` infinite what is floored is not among them.
    n_five_thousandths: int  # relative error below 0.005; likewise
    n_sign_flips: int  # one side above zero, the other below
    n_disagree: int
    """Where one side has a NaN, Inf or mask and the other not the same (signs of Inf and mask matter, NaNs are alike)."""
    first_disagreement: int | None  # flat index, in elements, of the first of those
    nan: Positions
    posinf: Positions
    neginf: Positions
    mask: Positions  # saturated numbers of float32, float64 and bfloat16 (`trueup.foundation.kernels.summarize`), of either sign
    ulp: tuple[int, ...]
    """``BUCKETS`` counts: the sides are 0, 1, 2 to 3, 4 to 7 ... numbers of the coarser dtype (shorter significand) apart. The
    other side is rounded to it first. Of two integers the unit is 1."""

    @property
    def rmse(self) -> float:
        """√(Σd² / counted); NaN where nothing counts."""
        return self.l2_difference / math.sqrt(self.counted) if self.counted else math.nan

    @property
    def mean_absolute(self) -> float:
        """Σ|d| / counted; NaN where nothing counts."""
        return self.sum_absolute / self.counted if self.counted else math.nan

    @property
    def mean_relative(self) -> float:
        """Mean of |d| / |a|, those without a relative error (``instead`` infinite) left out; NaN where there is none."""
        count = self.counted - (self.n_floored if math.isinf(self.instead) else 0)
        return self.sum_relative / count if count else math.nan


def pair(
    baseline: NDArray[Any],
    candidate: NDArray[Any],
    threads: int = 1,
    *,
    floor: float = 0.0,
    instead: float | None = None,
) -> Pair:
    """Compare two arrays of the same shape and any dtypes, reading each once.

    >>> p = pair(np.array([1.0, 0.0, np.nan]), np.array([1.5, 0.0, np.nan], np.float32))
    >>> p.counted, p.l2_difference, p.max_index, p.n_disagree
    (2, 0.5, 0, 0)

    The interpreter's lock is released from 1 MB on. Sums are float64; where squares of float64 tensors leave its range, they are
    taken again, scaled. A difference beyond float64 is Inf.

    Args:
        baseline: any shape and strides, dtypes as in ``summarize``, read-only and memory-mapped too; what is not contiguous is
            copied by pieces of at most 512 KB.
        candidate: the same shape. Against a complex side a real one has imaginary parts of zero.
        threads: most threads for 256 KB and more; the result does not depend on it.
        floor: up to which |a| a relative error is taken against ``instead``.
        instead: default: the epsilon of the baseline's dtype, of float64 for integers, as ptdbg does where a is zero.
            Inf: such elements have no relative error, as in msaccucmp.

    Raises:
        ValueError: the shapes differ.
        TypeError: a dtype holds no numbers, or is wider than float64.
    """
    if baseline.shape != candidate.shape:
        raise ValueError(f"pair: expected two equal shapes, got {baseline.shape} and {candidate.shape}")
    kinds, parts, eps = _way(baseline.dtype, candidate.dtype)
    instead = eps if instead is None else instead
    out = np.empty(PACKED)
    kernel = native() if kinds else None
    if kernel is None or kinds is None:
        by_twin(baseline, candidate, floor, instead, out)
    else:
        first, second, to = (each.__array_interface__["data"][0] for each in (baseline, candidate, out))
        sides = first, kinds[0], baseline.strides, second, kinds[1], candidate.strides
        kernel.pair(*sides, baseline.shape, floor, instead, to, threads)
    return _unpacked(out, baseline.size * parts, parts, floor, instead)


def epsilon(dtype: np.dtype[Any]) -> float:
    """Return the distance from 1 to the next number of a floating dtype; of float64 for integers."""
    return float(ml_dtypes.finfo(dtype if dtype.kind not in "biu" and "int" not in dtype.name else np.float64).eps)


@lru_cache(maxsize=1024)
def _way(baseline: np.dtype[Any], candidate: np.dtype[Any]) -> tuple[tuple[int, int] | None, int, float]:
    """Return the compiled kernel's numbers of two dtypes (None: the twin takes them), reals of an element, and the epsilon."""
    reals = reals_of(baseline), reals_of(candidate)
    parts = max(each.parts for each in reals)
    kinds = KINDS.get(baseline.name), KINDS.get(candidate.name)
    alike = reals[0].parts == reals[1].parts and baseline.isnative and candidate.isnative
    known = (kinds[0], kinds[1]) if alike and kinds[0] is not None and kinds[1] is not None else None
    return known, parts, epsilon(reals[0].dtype)


def _unpacked(out: NDArray[np.float64], numel: int, parts: int, floor: float, instead: float) -> Pair:
    counted, equal, *reals, at, top, relative = out[:12].tolist()
    whole = out[12:].astype(np.int64).tolist()
    index = None if at < 0 else int(at) // parts
    first = None if whole[5] < 0 else whole[5] // parts
    special = [Positions(*whole[k : k + 3]) for k in range(6, 18, 3)]
    values = [numel, parts, floor, instead, int(counted), int(equal), *reals, index, top, relative, *whole[:5], first, *special]
    return Pair(*values, tuple(whole[18:]))  # type: ignore[call-arg]  # mypy does not count what a list holds


Array = NDArray[Any]

PIECE = 1 << 15  # elements taken at a time
WIDE = frozenset({"float64", "int32", "int64", "uint32", "uint64"})  # what float32 does not hold


def by_twin(baseline: Array, candidate: Array, floor: float, instead: float, out: Floats) -> None:
    """Fill ``out``, float64 ``(PACKED,)``; see ``trueup.foundation.kernels.pair``."""
    sides = _Side.of(baseline.dtype), _Side.of(candidate.dtype)
    totals = _Totals(*sides, floor, instead)
    with np.errstate(all="ignore"):
        for x, y in _pieces(baseline, candidate):
            totals.add(x, y)
        scales = [_scale(top) for top in (totals.top_a, totals.top_b, totals.top_d)]
        if scales != [1.0, 1.0, 1.0]:
            totals.rescale(scales, _pieces(baseline, candidate))
        totals.fill(out)


def subtracted(baseline: Array, candidate: Array) -> Iterator[tuple[Floats, Floats, Floats]]:
    """Yield a, b and b - a as float64, by rows of reals in C order; differences of 64-bit integers are exact up to 2**53. Raises
    ValueError if the shapes differ, TypeError if a dtype holds no numbers or is wider than float64."""
    if baseline.shape != candidate.shape:
        raise ValueError(f"expected two equal shapes, got {baseline.shape} and {candidate.shape}")
    of_a, of_b = _Side.of(baseline.dtype), _Side.of(candidate.dtype)
    with np.errstate(all="ignore"):
        for x, y in _pieces(baseline, candidate):
            (a, rest_a), (b, rest_b) = of_a.split(x), of_b.split(y)
            yield a, b, (b - a) + (rest_b - rest_a)


def coarser_dtype(baseline: np.dtype[Any], candidate: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in whose units in the last place ``Pair.ulp`` counts; of two integers the unit is 1."""
    return baseline if _Side.of(baseline).is_coarser(_Side.of(candidate)) else candidate


@dataclass(frozen=True, slots=True)
class _Side:
    """How a side is read, and how fine its numbers are."""

    reals: Reals
    bits: int  # bits of the significand, 64 for integers
    tiny: float

    @staticmethod
    def of(dtype: np.dtype[Any]) -> _Side:
        reals = reals_of(dtype)
        whole = math.isinf(reals.largest)
        return _Side(reals, 64 if whole else int(ml_dtypes.finfo(reals.dtype).nmant) + 1, reals.tiny)

    def is_coarser(self, other: _Side) -> bool:
        """Tell whether units are those of this side, on equal terms too."""
        return (self.bits, -self.tiny) <= (other.bits, -other.tiny)

    def split(self, values: Array) -> tuple[Floats, Floats | float]:
        """Return values as float64 and, for 64-bit integers, what that leaves of them."""
        wide = self.reals.widen(values)
        if self.reals.dtype.name not in ("int64", "uint64"):
            return wide, 0.0
        bits = values.view(np.uint64)
        nearest = np.zeros(values.size, np.uint64)
        below, above = wide < 0, (wide >= 0) & (wide < 2.0**64)
        nearest[below] = wide[below].astype(np.int64).view(np.uint64)
        nearest[above] = wide[above].astype(np.uint64)
        return wide, (bits - nearest).view(np.int64).astype(np.float64)

    def specials(self, values: Floats) -> NDArray[np.int8]:
        """Return 0 for what counts, 1 NaN, 2 and 3 the two Inf, 4 a mask, -4 a negative one."""
        kinds = np.zeros(values.size, np.int8)
        kinds[np.isnan(values)] = 1
        kinds[values == np.inf] = 2
        kinds[values == -np.inf] = 3
        if self.reals.dtype.name in MASKING:
            kinds[(kinds == 0) & (values >= self.reals.largest)] = 4
            kinds[(kinds == 0) & (values <= -self.reals.largest)] = -4
        return kinds


def _pieces(baseline: Array, candidate: Array) -> Iterator[tuple[Array, Array]]:
    """Yield both sides by contiguous rows of reals in C order."""
    dtypes = [each.dtype.newbyteorder("=") for each in (baseline, candidate)]
    if not baseline.size:
        return
    with np.nditer(
        [baseline, candidate], ["external_loop", "buffered", "zerosize_ok"], [["readonly"], ["readonly"]],
        op_dtypes=dtypes, order="C", casting="equiv", buffersize=PIECE,
    ) as pieces:  # fmt: skip
        for sides in pieces:
            rows = [np.ascontiguousarray(side) for side in sides]
            if (rows[0].dtype.kind == "c") != (rows[1].dtype.kind == "c"):
                rows = [row if row.dtype.kind == "c" else _with_zeros(row) for row in rows]
            yield tuple(row.view(reals_of(row.dtype).dtype) for row in rows)  # type: ignore[misc]


def _with_zeros(row: Array) -> Array:
    """Put a zero behind each real: its imaginary part."""
    both = np.zeros((row.size, 2), row.dtype)
    both[:, 0] = row
    return both.reshape(-1)


def _scale(top: float) -> float:
    if not top > 0 or math.isinf(top) or 1e-120 < top < 1e120:
        return 1.0
    return math.ldexp(1.0, max(-1000, min(1000, -math.frexp(top)[1])))


@dataclass(slots=True)
class _Sums:
    """Lists of partial sums, rounded once at the end."""

    dd: list[float] = field(default_factory=list)
    aa: list[float] = field(default_factory=list)
    bb: list[float] = field(default_factory=list)
    ab: list[float] = field(default_factory=list)
    d: list[float] = field(default_factory=list)

    def add(self, a: Floats, b: Floats, size: Floats) -> None:
        for sums, x, y in ((self.dd, size, size), (self.aa, a, a), (self.bb, b, b), (self.ab, a, b)):
            sums.append(float(np.einsum("i,i", x, y)))  # not dot: BLAS would start threads
        self.d.append(float(np.add.reduce(size)))


@dataclass(slots=True)
class _Totals:
    a: _Side
    b: _Side
    floor: float
    instead: float
    sums: _Sums = field(default_factory=_Sums)
    relative: list[float] = field(default_factory=list)
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    top_d: float = 0.0
    top_a: float = 0.0
    top_b: float = 0.0
    top_relative: float = 0.0
    at: int = -1
    seen: int = 0
    counted: int = 0
    equal: int = 0
    floored: int = 0
    within: list[int] = field(default_factory=lambda: [0, 0])
    flips: int = 0
    differing: int = 0
    first: int = -1
    special: NDArray[np.int64] = field(default_factory=lambda: np.zeros((4, 3), np.int64))
    units: NDArray[np.int64] = field(default_factory=lambda: np.zeros(66, np.int64))

    def _read(self, x: Array, y: Array) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
        """Return a, b, d of a piece, NaN where a pair does not count, and where it does."""
        (a, rest_a), (b, rest_b) = self.a.split(x), self.b.split(y)
        kinds_a, kinds_b = self.a.specials(a), self.b.specials(b)
        keep = (kinds_a == 0) & (kinds_b == 0)
        if not keep.all():
            self._add_specials(kinds_a, kinds_b)
        d = (b - a) + (rest_b - rest_a)
        return a, b, d, keep

    def add(self, x: Array, y: Array) -> None:
        a, b, d, keep = self._read(x, y)
        places = np.flatnonzero(keep)
        a, b, size = a[keep], b[keep], np.abs(d[keep])
        if size.size:
            self._add_counted(a, b, size, places)
        self.seen += keep.size

    def _add_counted(self, a: Floats, b: Floats, size: Floats, places: NDArray[np.int64]) -> None:
        base = np.abs(a)
        floored = ~(base > self.floor)
        quotient = size / np.where(floored, self.instead, base)
        self.sums.add(a, b, size)
        self.relative.append(float(np.add.reduce(quotient)))
        self.counted += size.size
        self.equal += int(np.count_nonzero(size == 0))
        self.floored += int(np.count_nonzero(floored))
        self.flips += int(np.count_nonzero(((a < 0) & (b > 0)) | ((a > 0) & (b < 0))))
        left = floored & math.isinf(self.instead)
        for k, limit in enumerate((0.001, 0.005)):
            self.within[k] += int(np.count_nonzero((quotient < limit) & ~left))
        top = float(size.max())
        if top > self.top_d:
            self.top_d, self.at = top, self.seen + int(places[np.argmax(size)])
        self.top_a, self.top_b = max(self.top_a, float(base.max())), max(self.top_b, float(np.abs(b).max()))
        self.top_relative = max(self.top_relative, float(quotient.max()))
        self.units += np.bincount(lengths(a, b, size, self.a, self.b), minlength=66)

    def _add_specials(self, of_a: NDArray[np.int8], of_b: NDArray[np.int8]) -> None:
        unlike = of_a != of_b
        count = int(np.count_nonzero(unlike))
        if count and not self.differing:
            self.first = self.seen + int(np.argmax(unlike))
        self.differing += count
        for k in range(4):
            here, there = np.abs(of_a) == k + 1, np.abs(of_b) == k + 1
            sides = here & ~unlike, here & unlike, there & unlike
            self.special[k] += [int(np.count_nonzero(side)) for side in sides]

    def rescale(self, scales: list[float], pieces: Iterator[tuple[Array, Array]]) -> None:
        """Take the sums again, multiplied by powers of two for a, b and d."""
        for_a, for_b, for_d = scales
        again = _Totals(self.a, self.b, self.floor, self.instead)
        for x, y in pieces:
            a, b, d, keep = again._read(x, y)
            size = np.abs(d[keep]) * for_d
            again.sums.add(a[keep] * for_a, b[keep] * for_b, size)
            again.sums.dd[-1] = float(np.einsum("i,i", size, size))
        self.sums, self.scales = again.sums, (for_a, for_b, for_d)

    def fill(self, out: Floats) -> None:
        """Write the numbers, in the order of ``Pair``."""
        dd, aa, bb, ab, d = (_total(getattr(self.sums, name)) for name in ("dd", "aa", "bb", "ab", "d"))
        for_a, for_b, for_d = self.scales
        cosine = max(-1.0, min(1.0, ab / (math.sqrt(aa) * math.sqrt(bb)))) if aa > 0 and bb > 0 else math.nan
        norms = math.sqrt(dd) / for_d, math.sqrt(aa) / for_a, math.sqrt(bb) / for_b
        head = (self.counted, self.equal, *norms, ab / for_a / for_b, cosine, d / for_d, self.top_d, self.at)
        relative = self.top_relative, _total(self.relative), self.floored, *self.within
        out[:18] = *head, *relative, self.flips, self.differing, self.first
        out[18:30] = self.special.reshape(-1)
        out[30:] = self.units


def _total(sums: list[float]) -> float:
    try:
        return math.fsum(sums)
    except (OverflowError, ValueError):  # the sum, or one of them, is infinite
        return float(np.add.reduce(sums))


def lengths(a: Floats, b: Floats, size: Floats, of_a: _Side, of_b: _Side) -> NDArray[np.int64]:
    """Return the bucket of each pair: how many bits its distance in units takes."""
    bits = min(of_a.bits, of_b.bits)
    if bits == 64:
        return np.where(size > 0, np.frexp(size)[1], 0).astype(np.int64)
    coarse = of_a if of_a.is_coarser(of_b) else of_b
    wide = of_a.reals.dtype.name in WIDE or of_b.reals.dtype.name in WIDE or coarse.tiny < 2.0**-126
    codes = [_codes(side, coarse, wide) for side in (a, b)]
    same = np.signbit(a) == np.signbit(b)
    low, high = np.minimum(*codes), np.maximum(*codes)
    apart = np.where(same, high - low, high + low)
    top = np.frexp((apart >> np.uint64(11)).astype(np.float64))[1] + 11  # exact beyond 2**53
    return np.where(apart < 2**53, np.frexp(apart.astype(np.float64))[1], top).astype(np.int64)


def _codes(values: Floats, coarse: _Side, wide: bool) -> NDArray[np.uint64]:
    """Number the values of the coarser dtype from zero, round to them, to even, and return each value's number."""
    work, word, own = (np.dtype("f8"), np.dtype("u8"), 53) if wide else (np.dtype("f4"), np.dtype("u4"), 24)
    size: Array = np.abs(values).astype(work)
    tiny: Array = np.full(1, coarse.tiny, work)
    one = np.ones(1, word)
    normal = size.view(word) - tiny.view(word) + (one << (one * (own - 1)))
    subnormal = (size + tiny).view(word) - tiny.view(word)
    number: NDArray[np.uint64] = np.where(size < tiny, subnormal, normal).astype(np.uint64)
    shift = own - coarse.bits
    if shift:
        odd = (number >> np.uint64(shift)) & np.uint64(1)
        number = (number + np.uint64((1 << (shift - 1)) - 1) + odd) >> np.uint64(shift)
    return number
