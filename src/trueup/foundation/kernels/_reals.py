"""How each dtype is read as real numbers: its view, its conversion to float64, its limits.

The narrow floats of ml_dtypes have a table of all their values, so reading them is one look-up an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reals:
    """A dtype as the kernels see it."""

    dtype: np.dtype[Any]
    """dtype of one real: a complex dtype's component, else the dtype itself."""
    parts: int
    """Reals in an element: 2 for complex, else 1."""
    widen: Callable[[Array], Floats]
    """Contiguous 1-d array of ``dtype`` -> float64 (the array itself if it is float64)."""
    tiny: float
    """Smallest normal number; 0 for integers, which have no subnormals."""
    largest: float
    """Magnitude from which on a finite number is saturated: the largest there is, and of float32 the largest bfloat16, for a mask
    made in bfloat16 stays one when it is cast. Inf for integers: they have no saturation to speak of."""


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
    """Return how ``dtype`` is read.

    Raises:
        TypeError: the dtype holds no numbers (object, string, void, time) or is wider than float64.
    """
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
