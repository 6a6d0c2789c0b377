"""Two tensors, element by element, in one pass: the entrance to the compiled kernel or its NumPy twin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels import _pair_twin
from trueup.foundation.kernels._compiled import KINDS, native
from trueup.foundation.kernels._reals import reals_of

BUCKETS = 66
"""Buckets of the histogram of units in the last place: 0, 1, 2 to 3, 4 to 7, ..., 2**64 to 2**65 - 1."""

PACKED = 30 + BUCKETS
"""Float64 that the kernels fill for a pair, in the order of ``Pair``'s fields behind ``instead``."""


class Positions(NamedTuple):
    """Where tensors have a NaN (or an Inf, or a mask): elements where both do, and where one does and the other does not."""

    both: int
    baseline: int
    candidate: int


@dataclass(frozen=True, slots=True)
class Pair:
    """What one pass over a baseline ``a`` and a candidate ``b`` gives; ``d`` is ``b - a``.

    Counts and sums are over reals: a complex element is two. A real *counts* where both sides are finite and neither is a mask
    (``trueup.foundation.kernels.MASKING``); all but the last six fields are over those.
    """

    numel: int
    """Reals of a side."""
    parts: int
    """Reals of an element: 2 for complex dtypes, else 1."""
    floor: float
    instead: float
    """As ``pair`` was told."""
    counted: int
    equal: int
    """Of those, how many are the same number."""
    l2_difference: float
    """√Σd²; this and the next two neither overflow nor vanish."""
    l2_baseline: float
    l2_candidate: float
    dot: float
    """Σab."""
    cosine: float
    """Σab / (√Σa² √Σb²), in [-1, 1]; NaN where a norm is zero."""
    sum_absolute: float
    """Σ|d|."""
    max_absolute: float
    """Largest |d|; 0 where nothing counts. Differences of integers are exact up to 2**53, above to a last place of float64."""
    max_index: int | None
    """Flat index (C order, in elements) of the first such; None where ``max_absolute`` is 0."""
    max_relative: float
    """Largest |d| / |a|, where |a| <= ``floor`` is replaced by ``instead``."""
    sum_relative: float
    n_floored: int
    """How many |a| are at most ``floor``."""
    n_thousandth: int
    """Relative error below 0.001. With ``instead`` infinite what is floored is not among them."""
    n_five_thousandths: int
    """Relative error below 0.005; likewise."""
    n_sign_flips: int
    """One side above zero, the other below."""
    n_disagree: int
    """Where one side has a NaN, Inf or mask and the other has not the same (the sign of Inf and mask matters, NaNs are alike)."""
    first_disagreement: int | None
    """Flat index, in elements, of the first of those."""
    nan: Positions
    posinf: Positions
    neginf: Positions
    mask: Positions
    """Saturated numbers of float32, float64 and bfloat16 (`trueup.foundation.kernels.summarize`), of either sign."""
    ulp: tuple[int, ...]
    """``BUCKETS`` counts: how many numbers of the coarser dtype apart the two sides are (0, 1, 2 to 3, 4 to 7, ...). The
    coarser dtype has the shorter significand; the other side is rounded to it first. Of two integers the unit is 1."""

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

    Args:
        baseline: any shape and strides; the dtypes of ``summarize``. Read-only and memory-mapped arrays are as good; what
            is not contiguous is copied by pieces of at most 512 KB.
        candidate: the same shape; any of these dtypes. Against a complex side a real one has imaginary parts of zero.
        threads: most threads for 256 KB and more; what comes out does not depend on it.
        floor: up to which |a| a relative error is taken against ``instead``.
        instead: default: the epsilon of the baseline's dtype, of float64 for integers, which is what ptdbg does where a is
            zero. Inf: such elements have no relative error, which is what msaccucmp does.

    The interpreter's lock is released from 1 MB on. Sums are float64; of float64 tensors whose squares would leave float64
    they are taken again, scaled. A difference beyond float64 is Inf.

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
        _pair_twin.pair(baseline, candidate, floor, instead, out)
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
