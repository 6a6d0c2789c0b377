"""The slow truth about a pair of tensors: plain Python, one real at a time, sums exact."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from . import oracle

MASKED = ("float32", "float64", "bfloat16", "complex64", "complex128")
WIDE = ("float64", "complex128", "int32", "int64", "uint32", "uint64")


def reals(array: np.ndarray, parts: int) -> list[Any]:
    """Return Python numbers, integers as int; a real array has imaginary zeros where ``parts`` is 2."""
    flat = array.reshape(-1)
    if array.dtype.kind == "c":
        return [part for z in flat.tolist() for part in (z.real, z.imag)]
    values = [int(x) if "int" in array.dtype.name or array.dtype.kind == "b" else float(x) for x in flat]
    return values if parts == 1 else [part for x in values for part in (x, 0.0)]


def limits(dtype: np.dtype) -> tuple[int, float, float, float]:
    """Return bits of the significand, smallest normal, from where on a number is a mask (NaN: nowhere), and epsilon."""
    if "int" in dtype.name or dtype.kind == "b":
        return 64, 0.0, math.nan, 2.0**-52
    info = np.finfo(dtype) if dtype.kind == "c" else ml_dtypes.finfo(dtype)
    mask = oracle.saturated(float(info.max)) if dtype.name in MASKED else math.nan
    return int(info.nmant) + 1, float(info.smallest_normal), mask, float(info.eps)


def special(x: Any, mask: float) -> str:
    if isinstance(x, int):
        return ""
    if math.isnan(x):
        return "nan"
    if math.isinf(x):
        return "posinf" if x > 0 else "neginf"
    return ("+" if x > 0 else "-") + "mask" if abs(x) >= mask else ""


def code(x: Any, bits: int, tiny: float) -> int:
    """Number the values of a format from zero and return that of ``|x|``, rounded to even."""
    size = abs(Fraction(x))
    least = Fraction(tiny)
    if size < least:
        return round(size / (least / 2 ** (bits - 1)))
    exponent = math.frexp(float(size))[1] - math.frexp(tiny)[1]
    if Fraction(2) ** exponent * least > size:  # float(size) was rounded up
        exponent -= 1
    return exponent * 2 ** (bits - 1) + round(size / (least * Fraction(2) ** exponent) * 2 ** (bits - 1))


def compare(baseline: np.ndarray, candidate: np.ndarray) -> dict[str, Any]:
    """Return the fields of ``Pair`` by name, floats as they come out of exact sums."""
    parts = 2 if "c" in (baseline.dtype.kind, candidate.dtype.kind) else 1
    (bits_a, tiny_a, mask_a, eps), (bits_b, tiny_b, mask_b, _) = limits(baseline.dtype), limits(candidate.dtype)
    a, b = reals(baseline, parts), reals(candidate, parts)
    kinds = [(special(x, mask_a), special(y, mask_b)) for x, y in zip(a, b, strict=True)]
    kept = [k for k, kind in enumerate(kinds) if kind == ("", "")]
    d = {k: Fraction(b[k]) - Fraction(a[k]) for k in kept}
    sizes = {k: abs(oracle.rounded(each)) for k, each in d.items()}
    relative = {k: over(sizes[k], abs(float(a[k])) or eps) for k in kept}
    top = max(sizes.values(), default=0.0)
    apart = [k for k, (x, y) in enumerate(kinds) if x != y]
    found: dict[str, Any] = {
        "counted": len(kept), "equal": sum(not each for each in d.values()), "max_absolute": top,
        "l2_difference": norm(d.values()), "l2_baseline": norm(a[k] for k in kept), "l2_candidate": norm(b[k] for k in kept),
        "dot": oracle.rounded(sum((Fraction(a[k]) * Fraction(b[k]) for k in kept), Fraction(0))),
        "sum_absolute": oracle.rounded(sum(map(abs, d.values()), Fraction(0))),
        "max_index": next((k // parts for k in kept if sizes[k] == top), None) if top else None,
        "max_relative": max(relative.values(), default=0.0), "sum_relative": total(relative.values()),
        "n_floored": sum(a[k] == 0 for k in kept), "n_thousandth": sum(x < 0.001 for x in relative.values()),
        "n_five_thousandths": sum(x < 0.005 for x in relative.values()),
        "n_sign_flips": sum(a[k] * b[k] < 0 or (a[k] < 0 < b[k]) or (b[k] < 0 < a[k]) for k in kept),
        "n_disagree": len(apart), "first_disagreement": apart[0] // parts if apart else None,
    }  # fmt: skip
    for name in ("nan", "posinf", "neginf", "mask"):
        found[name] = (
            sum(x == y and x.endswith(name) for x, y in kinds),
            sum(x != y and x.endswith(name) for x, y in kinds),
            sum(x != y and y.endswith(name) for x, y in kinds),
        )
    bits, tiny = min((bits_a, -tiny_a), (bits_b, -tiny_b))
    ulp = [0] * 66
    for k in kept:
        units = abs(int(d[k])) if bits == 64 else distance(a[k], b[k], bits, -tiny)
        ulp[units.bit_length()] += 1
    return found | {"ulp": tuple(ulp)}


def total(values: Any) -> float:
    return oracle.rounded(sum(map(Fraction, values), Fraction(0))) if all(map(math.isfinite, values)) else math.inf


def over(size: float, base: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float64(size) / np.float64(base))


def distance(x: Any, y: Any, bits: int, tiny: float) -> int:
    codes = [code(each, bits, tiny) for each in (x, y)]
    return sum(codes) if math.copysign(1, x) != math.copysign(1, y) else abs(codes[0] - codes[1])


def norm(values: Any) -> float:
    exact = [Fraction(x) for x in values]
    top = max(map(abs, exact), default=Fraction(0)) or Fraction(1)
    root = Fraction(math.sqrt(sum((x / top) ** 2 for x in exact)))
    return oracle.rounded(root * top)
