"""Statistics and sketch of a tensor in one pass: by the compiled kernel where it can, else by its NumPy twin, block by block in
float64. The twin is the reference that the compiled kernel is tested against, and runs where that was not built."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels import _compiled
from trueup.foundation.kernels.sketch import BLOCK, add_block
from trueup.foundation.model import LANES, NUMBERS, PACKED

Array = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reals:
    """A dtype as the kernels see it."""

    dtype: np.dtype[Any]  # dtype of one real: a complex dtype's component, else the dtype itself
    parts: int  # reals in an element: 2 for complex, else 1
    widen: Callable[[Array], Floats]  # contiguous 1-d array of ``dtype`` -> float64 (the array itself if it is float64)
    tiny: float  # smallest normal number; 0 for integers, which have no subnormals
    largest: float
    """Magnitude from which on a finite number is saturated: the largest there is; of float32 the largest bfloat16, for a mask
    made in bfloat16 stays one when cast. Inf for integers, which do not saturate."""


def _cast(array: Array) -> Floats:
    return array.astype(np.float64, copy=False)


def _widen_bfloat16(array: Array) -> Floats:
    bits = array.view(np.uint16).astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32).astype(np.float64)


def _widen_by_table(dtype: np.dtype[Any]) -> Callable[[Array], Floats]:
    codes = np.arange(256, dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = codes.view(dtype).astype(np.float64)
    return lambda array: values[array.view(np.uint8)]


@lru_cache(maxsize=64)
def reals_of(dtype: np.dtype[Any]) -> Reals:
    """Return how ``dtype`` is read; raises TypeError if it holds no numbers (object, string, time) or is wider than float64."""
    if dtype.kind == "c" and dtype.itemsize <= 16:
        part = reals_of(np.dtype(f"{dtype.byteorder}f{dtype.itemsize // 2}"))
        return Reals(part.dtype, 2, part.widen, part.tiny, part.largest)
    if dtype.kind in "biu" or dtype.name in ("int1", "uint1", "int2", "uint2", "int4", "uint4"):
        return Reals(dtype, 1, _cast, 0.0, np.inf)
    if dtype.kind == "f" and dtype.itemsize <= 8 and dtype.name in ("float16", "float32", "float64"):
        limits = np.finfo(dtype)
        largest = ml_dtypes.finfo(ml_dtypes.bfloat16).max if dtype.name == "float32" else limits.max
        return Reals(dtype, 1, _cast, float(limits.smallest_normal), float(largest))
    if dtype.name.startswith(("bfloat16", "float4", "float6", "float8")):
        narrow = ml_dtypes.finfo(dtype)
        widen = _widen_bfloat16 if dtype.name == "bfloat16" else _widen_by_table(dtype)
        return Reals(dtype, 1, widen, float(narrow.smallest_normal), float(narrow.max))
    raise TypeError(f"no statistics for dtype {dtype}: expected real or complex numbers of at most 64 bits a part")


MASKING = frozenset({"float32", "float64", "bfloat16"})
"""Dtypes that reach so far beyond any measurement that a saturated number can only be a mask."""

_POSINF, _NEGINF, _SATURATED = (NUMBERS.index(n) for n in ("n_posinf", "n_neginf", "n_saturated"))


def is_mask(value: float, dtype: str) -> bool:
    """Tell whether a number is saturated in a dtype of `MASKING`, to the seven digits that tools print.

    >>> is_mask(-3.402823e38, "float32"), is_mask(65504.0, "float16")
    (True, False)
    """
    if dtype not in MASKING or not math.isfinite(value):
        return False
    return abs(value) > (1 - 1e-6) * reals_of(np.dtype(getattr(ml_dtypes, dtype, dtype))).largest


def summarize(array: NDArray[Any], out: NDArray[np.float64], threads: int = 1) -> None:
    """Fill ``out`` with the statistics and the sketch of ``array``, reading its bytes once.

    >>> out = np.empty(PACKED)
    >>> summarize(np.array([3.0, -4.0], np.float32), out)
    >>> [float(x) for x in out[:4]]  # min, max, mean, l2
    [-4.0, 3.0, -0.5, 5.0]

    ``min``, ``max``, ``mean``, ``l2`` are over the finite elements, NaN where there is none; NaN and Inf are counted and left out
    of sums and sketch. So are saturated numbers of float32, float64 and bfloat16 (attention masks are made of them), for one
    would drown all else in the sums. ``n_zero`` counts both zeros; ``n_subnormal`` and ``n_saturated`` (|x| is the dtype's
    largest finite number, of float32 at least that of bfloat16) are 0 for integers and bool. Sums are float64; ``mean`` and
    ``l2`` do not overflow; a lane of the sketch may where elements near 1e308 add up. Integers beyond 2**53 are rounded to
    float64.

    Args:
        array: any shape and strides; float16/32/64, bfloat16 and the narrow floats of ml_dtypes, integers, bool (by value),
            complex64/128 (two reals an element, interleaved: mean and counts are over the reals).
        out: float64 ``(PACKED,)``, contiguous: ``model.NUMBERS`` in order, then the 64 lanes of the sketch.
        threads: most threads for arrays of 1 MB and more; the result does not depend on it.

    Raises:
        TypeError: the dtype holds no numbers, or is wider than float64.
        ValueError: ``out`` is not float64 ``(PACKED,)``.
    """
    if out.shape != (PACKED,) or out.dtype != np.float64:
        raise ValueError(f"out: expected float64 ({PACKED},), got {out.dtype} {out.shape}")
    if _compiled.measure(array, out, digest=False, threads=threads) is None:
        by_twin(array, out)


def by_twin(array: NDArray[Any], out: NDArray[np.float64]) -> None:
    """Do without the compiled kernel."""
    by_blocks(array, out)
    reals = reals_of(array.dtype)
    if out[_SATURATED] and reals.dtype.name in MASKING:
        _summarize_unmasked(array, reals, out)


def _summarize_unmasked(array: NDArray[Any], reals: Reals, out: NDArray[np.float64]) -> None:
    """Take the twin's statistics again with saturated numbers as Inf; the counts of Inf and of saturation stay what they were."""
    counts = out[[_POSINF, _NEGINF, _SATURATED]]
    values = np.array(array, order="C").reshape(-1).view(reals.dtype)
    with np.errstate(all="ignore"):
        values[np.abs(reals.widen(values)) >= reals.largest] = np.inf
    by_blocks(values, out)
    out[[_POSINF, _NEGINF, _SATURATED]] = counts


@dataclass(slots=True)
class _Totals:
    """What has been seen so far; ``scale`` is a power of two that keeps squares and sums inside float64."""

    scale: float = 1.0
    low: float = math.inf
    high: float = -math.inf
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    finite: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0
    saturated: int = 0

    def add(self, values: Floats, reals: Reals) -> Floats:
        """Add a block of float64 values; return it with zeros for NaN and Inf, for the sketch."""
        low, high = float(values.min()), float(values.max())
        clean = finite = values
        if not (math.isfinite(low) and math.isfinite(high)):  # NaN passes through min and max
            mask = np.isfinite(values)
            self.nan += int(np.count_nonzero(np.isnan(values)))
            self.posinf += int(np.count_nonzero(values == np.inf))
            self.neginf += int(np.count_nonzero(values == -np.inf))
            finite, clean = values[mask], np.where(mask, values, 0.0)
            if not finite.size:
                return clean
            low, high = float(finite.min()), float(finite.max())
        self._add_finite(finite, low, high, reals)
        return clean

    def _add_finite(self, finite: Floats, low: float, high: float, reals: Reals) -> None:
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.finite += finite.size
        if low <= reals.tiny and high >= -reals.tiny:  # all far from zero on one side: nothing to count
            small = int(np.count_nonzero(np.abs(finite) < (reals.tiny or 0.5)))
            zero = finite.size - int(np.count_nonzero(finite)) if small else 0
            self.zero += zero
            self.subnormal += small - zero
        if max(-low, high) >= reals.largest:
            self.saturated += int(np.count_nonzero(np.abs(finite) >= reals.largest))
        scaled = finite if self.scale == 1.0 else finite * self.scale
        self.sums.append(float(np.add.reduce(scaled)))  # pairwise within the block
        self.squares.append(float(np.einsum("i,i", scaled, scaled)))  # not dot: BLAS would start threads

    def fill(self, out: Floats) -> None:
        """Write the numbers, in the order of ``model.NUMBERS``."""
        counts = (self.nan, self.posinf, self.neginf, self.zero, self.subnormal, self.saturated)
        if self.finite:
            mean = math.fsum(self.sums) / self.finite / self.scale
            l2 = math.sqrt(math.fsum(self.squares)) / self.scale
            out[: len(NUMBERS)] = (self.low, self.high, mean, l2, *counts)
        else:
            out[: len(NUMBERS)] = (math.nan,) * 4 + counts

    def better_scale(self) -> float:
        """Return the scale to start again with when squares or sums left the range of float64, else 1."""
        largest = max(-self.low, self.high) if self.finite else 0.0
        if largest == 0.0 or 1e-120 < largest < 1e120:
            return 1.0
        return math.ldexp(1.0, max(-1000, min(1000, -math.frexp(largest)[1])))


def by_blocks(array: NDArray[Any], out: Floats) -> None:
    """Fill ``out``, float64 ``(PACKED,)``, with numbers and sketch of ``array``; see ``trueup.foundation.kernels.summarize``."""
    reals = reals_of(array.dtype)
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype != reals.dtype:
        flat = flat.view(reals.dtype)
    sketch = np.zeros(LANES)
    totals = _Totals()
    with np.errstate(all="ignore"):
        for block, start in enumerate(range(0, flat.size, BLOCK)):
            add_block(sketch, totals.add(reals.widen(flat[start : start + BLOCK]), reals), block)
        scale = totals.better_scale()
        if scale != 1.0:
            totals = _Totals(scale)
            for start in range(0, flat.size, BLOCK):
                totals.add(reals.widen(flat[start : start + BLOCK]), reals)
    totals.fill(out)
    out[len(NUMBERS) :] = sketch
