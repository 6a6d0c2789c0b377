"""Numbers of two tensors that the legacy tables show. A stand-in for ``trueup.verdict.metrics`` until that is there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """How far two tensors of equal size are apart; NaN where a number is not defined, with the reason."""

    cosine: float
    max_abs: float
    max_relative: float
    within_1000: float
    within_5000: float
    reason: str = ""

    @classmethod
    def of(cls, baseline: Array, candidate: Array) -> Elementwise:
        """Compare the elements in logical C order, in float64."""
        b, c = (_reals(side) for side in (baseline, candidate))
        finite = np.isfinite(b)
        if not (np.array_equal(finite, np.isfinite(c)) and np.array_equal(b[~finite], c[~finite], equal_nan=True)):
            nan = math.nan
            return cls(nan, nan, nan, nan, nan, "The position of inf or nan in NPU and bench Tensor do not match.")
        b, c = np.where(finite, b, 0.0), np.where(finite, c, 0.0)
        apart = np.abs(c - b)
        least = float(np.finfo(np.float64).tiny)
        with np.errstate(over="ignore"):
            relative = np.where(apart == 0, 0.0, apart / np.maximum(np.abs(b), least))
        near, nearer = (float(np.mean(relative < limit)) for limit in (1e-3, 5e-3))
        return cls(_cosine(b, c), float(apart.max()), float(relative.max()), near, nearer)


def _reals(array: Array) -> Array:
    flat: Array = np.ascontiguousarray(array).reshape(-1)
    return (flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat).astype(np.float64)


def _cosine(b: Array, c: Array) -> float:
    """Return 1 for two zero tensors, NaN for one; scaled first, so that no square leaves float64."""
    scales = [float(np.abs(side).max(initial=0.0)) for side in (b, c)]
    if 0.0 in scales:
        return 1.0 if scales == [0.0, 0.0] else math.nan
    b, c = b / scales[0], c / scales[1]
    return min(1.0, max(-1.0, float(b @ c) / math.sqrt(float(b @ b) * float(c @ c))))
