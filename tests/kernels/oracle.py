"""The slow truth: statistics and sketch in plain Python, one element at a time, straight from docs/format.md."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

from trueup.foundation.model import NUMBERS, PACKED

MASK = 2**64 - 1
FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64")) + tuple(
    np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz",
        "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn",
    )
)  # fmt: skip
INTEGERS = (
    *(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    np.dtype(ml_dtypes.int4),
    np.dtype(ml_dtypes.uint4),
)
COMPLEX = (np.dtype("complex64"), np.dtype("complex128"))
DTYPES = (*FLOATS, *INTEGERS, np.dtype(bool), *COMPLEX)


def splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def place(i: int) -> tuple[int, float]:
    """Return lane and sign of element ``i``."""
    sign = -1.0 if splitmix64(i // 64) >> (i % 64) & 1 else 1.0
    rotation = 8 * (splitmix64((i // 512) ^ 0x9E3779B97F4A7C15) >> 61)
    return (i % 64 + rotation) % 64, sign


def reals(array: np.ndarray) -> tuple[list[float], float, float]:
    """Return the elements as Python floats, the dtype's smallest normal number, and from where on a finite one is saturated."""
    dtype = array.dtype
    if dtype.kind == "c":
        parts = [part for z in array.reshape(-1).tolist() for part in (z.real, z.imag)]
        limits = np.finfo(dtype)
        return parts, float(limits.smallest_normal), saturated(float(limits.max))
    values = [float(x) for x in array.reshape(-1)]
    if dtype in FLOATS:
        limits = ml_dtypes.finfo(dtype)
        return values, float(limits.smallest_normal), saturated(float(limits.max))
    return values, 0.0, math.inf


def saturated(largest: float) -> float:
    """Return the largest bfloat16 for float32, where masks are cast from it."""
    return float(ml_dtypes.finfo(ml_dtypes.bfloat16).max) if largest == float(np.finfo(np.float32).max) else largest


def summary(array: np.ndarray) -> np.ndarray:
    """Return what ``summarize`` must fill, with exactly rounded sums."""
    values, tiny, largest = reals(array)
    masking = largest if array.dtype.name in ("float32", "float64", "bfloat16", "complex64", "complex128") else math.nan
    kept = [math.isfinite(x) and not abs(x) >= masking for x in values]
    finite = [x for x, is_kept in zip(values, kept, strict=True) if is_kept]
    exact = [Fraction(x) for x in finite]
    numbers = dict.fromkeys(NUMBERS, math.nan)
    if finite:
        numbers |= {"min": min(finite), "max": max(finite), "mean": float(sum(exact) / len(exact))}
        top = max(abs(x) for x in exact) or Fraction(1)
        numbers["l2"] = math.sqrt(sum((x / top) ** 2 for x in exact)) * float(top)
    numbers |= {
        "n_nan": sum(math.isnan(x) for x in values),
        "n_posinf": values.count(math.inf),
        "n_neginf": values.count(-math.inf),
        "n_zero": finite.count(0.0),
        "n_subnormal": sum(0 < abs(x) < tiny for x in finite),
        "n_saturated": sum(abs(x) >= largest for x in values if math.isfinite(x)),
    }
    lanes = [Fraction(0)] * (PACKED - len(NUMBERS))
    for i, x in enumerate(values):
        if kept[i]:
            lane, sign = place(i)
            lanes[lane] += Fraction(sign * x)
    return np.array([numbers[name] for name in NUMBERS] + [rounded(lane) for lane in lanes])


def rounded(number: Fraction) -> float:
    """Round to float64, to infinity where it is too large."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
