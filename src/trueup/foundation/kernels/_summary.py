"""The one entrance to the statistics kernels: the compiled one where it can, else its NumPy twin."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels import _compiled, _twin
from trueup.foundation.kernels._reals import Reals, reals_of
from trueup.foundation.model import NUMBERS, PACKED

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

    Args:
        array: any shape and strides; float16/32/64, bfloat16 and the narrow floats of ml_dtypes, integers, bool (by
            value), complex64/128 (as two reals an element, interleaved: mean and counts are over the reals).
        out: float64 ``(PACKED,)``, contiguous: ``model.NUMBERS`` in order, then the 64 lanes of the sketch.
        threads: most threads for arrays of 1 MB and more; what comes out does not depend on it.

    The largest finite number of float32, float64 and bfloat16, and in float32 that of bfloat16, is what attention masks are
    made of: it is counted in ``n_saturated`` and otherwise left out like Inf, for one of it would drown all else in the sums.

    ``min``, ``max``, ``mean``, ``l2`` are over the finite elements, NaN where there is none; NaN and Inf are counted
    and left out of sums and sketch. ``n_zero`` counts both zeros; ``n_subnormal`` and ``n_saturated`` (|x| is the
    dtype's largest finite number, of float32 at least that of bfloat16) are 0 for integers and bool. Sums are float64;
    ``mean`` and ``l2`` do not overflow; a lane of the sketch may where elements near 1e308 add up. Integers beyond
    2**53 are rounded to float64.

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
    _twin.summarize(array, out)
    reals = reals_of(array.dtype)
    if out[_SATURATED] and reals.dtype.name in MASKING:
        _summarize_unmasked(array, reals, out)


def _summarize_unmasked(array: NDArray[Any], reals: Reals, out: NDArray[np.float64]) -> None:
    """Take the twin's statistics again with saturated numbers as Inf; the counts of Inf and of saturation stay what they were."""
    counts = out[[_POSINF, _NEGINF, _SATURATED]]
    values = np.array(array, order="C").reshape(-1).view(reals.dtype)
    with np.errstate(all="ignore"):
        values[np.abs(reals.widen(values)) >= reals.largest] = np.inf
    _twin.summarize(values, out)
    out[[_POSINF, _NEGINF, _SATURATED]] = counts
