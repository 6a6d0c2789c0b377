"""Statistics and sketch of a tensor in one pass: by the compiled kernel where it can, else by its NumPy twin, block by block in
float64. The twin is the reference that the compiled kernel is tested against, and runs where that was not built. `streams` takes
sums of many tensors by one call, each element read once: what a monitor takes of gradients, weights, moments and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def by_twin(array: NDArray[Any], out: Floats) -> None:
    """Fill ``out`` without the compiled kernel."""
    reals = reals_of(array.dtype)
    flat = np.ascontiguousarray(array).reshape(-1).view(reals.dtype)
    blocks = [flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK)]
    sketch, totals = np.zeros(LANES), _Totals(reals)
    with np.errstate(all="ignore"):
        for number, block in enumerate(blocks):
            add_block(sketch, totals.add(block), number)
        if (scale := totals.better_scale()) != 1.0:
            totals = _Totals(reals, scale)
            for block in blocks:
                totals.add(block)
    totals.fill(out)
    out[len(NUMBERS) :] = sketch


@dataclass(slots=True)
class _Totals:
    """What has been seen so far; ``scale`` is a power of two that keeps squares and sums inside float64."""

    reals: Reals
    scale: float = 1.0
    low: float = math.inf
    high: float = -math.inf
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    kept: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(6, np.int64))  # the last six of ``model.NUMBERS``

    def add(self, block: Array) -> Floats:
        """Add a block; return it as float64 with zeros for what the sums leave out, for the sketch."""
        values = self.reals.widen(block)
        size = np.abs(values)
        nan, posinf, neginf = np.isnan(values), values == np.inf, values == -np.inf
        left_out = nan | posinf | neginf
        saturated = (size >= self.reals.largest) & ~left_out
        kinds = nan, posinf, neginf, values == 0, (size > 0) & (size < self.reals.tiny), saturated
        self.counts += [np.count_nonzero(kind) for kind in kinds]
        if self.reals.dtype.name in MASKING:
            left_out |= saturated
        if not left_out.any():
            self._add_kept(values)
            return values
        self._add_kept(values[~left_out])
        return np.where(left_out, 0.0, values)

    def _add_kept(self, values: Floats) -> None:
        if not values.size:
            return
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        self.kept += values.size
        scaled = values if self.scale == 1.0 else values * self.scale
        self.sums.append(float(np.add.reduce(scaled)))  # pairwise within the block
        self.squares.append(float(np.einsum("i,i", scaled, scaled)))  # not dot: BLAS would start threads

    def fill(self, out: Floats) -> None:
        """Write the numbers, in the order of ``model.NUMBERS``."""
        reduced = (math.nan,) * 4
        if self.kept:
            mean = math.fsum(self.sums) / self.kept / self.scale
            reduced = self.low, self.high, mean, math.sqrt(math.fsum(self.squares)) / self.scale
        out[: len(NUMBERS)] = *reduced, *self.counts

    def better_scale(self) -> float:
        """Return the scale to start again with when squares or sums left the range of float64, else 1."""
        largest = max(-self.low, self.high) if self.kept else 0.0
        if largest == 0.0 or 1e-120 < largest < 1e120:
            return 1.0
        return math.ldexp(1.0, max(-1000, min(1000, -math.frexp(largest)[1])))


# ---------------------------------------------------------------- sums of many tensors by one call
SPREAD, ALIKE, ABOVE, APART = range(4)
"""What is taken: of each tensor its squares, extremes and counts; of pairs how alike they are (gradient and momentum), where the
square of the one is above the other (momentum and variance), how far they are apart (weights now and before)."""

STREAMED = {name: _compiled.KINDS[name] for name in ("float32", "float16", "bfloat16")}
"""Dtypes that are taken, and the kernel's numbers."""


def streams(
    what: int, table: Sequence[int] | NDArray[np.int64], ends: tuple[float, float] = (-math.inf, math.inf), threads: int = 1
) -> NDArray[np.float64] | None:  # fmt: skip
    """Return a row for each five numbers of ``table``: address, kind (of `STREAMED`), address and kind of the other of the pair (0
    where there is none), and elements, which lie in a row in memory. None where the compiled kernel is not there.

    The columns of `SPREAD`: sum of squares, three that are 0, least, largest (NaN where an element is), elements that are not 0,
    elements outside of ``ends``. Of `ALIKE`: squares of the one, of the other, products, their signs. Of `ABOVE`: squares of both,
    0, signs of ``y - x ** 2``. Of `APART`: squares of the one, of the differences. All in float64, in which squares of float32 are
    exact: the same bits by whatever instruction set and number of threads, but for the last ones of squares of differences."""
    take = getattr(_compiled.native(), "streams", None)  # an older kernel, which was said, has none
    if take is None:
        return None
    entries = np.ascontiguousarray(table, np.int64).reshape(-1)
    count = len(entries) // 5
    out = np.empty((count, 8))
    take(what, _address(entries), count, *ends, _address(out), threads)
    return out


def _address(array: NDArray[np.int64] | NDArray[np.float64]) -> int:
    return int(array.__array_interface__["data"][0])
