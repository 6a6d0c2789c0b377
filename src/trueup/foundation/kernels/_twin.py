"""The NumPy twin: statistics and sketch of a tensor, block by block, in float64.

It is the reference that the compiled kernel is tested against, and what runs where that one was not built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels._reals import Floats, Reals, reals_of
from trueup.foundation.kernels.sketch import BLOCK, add_block
from trueup.foundation.model import LANES, NUMBERS


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


def summarize(array: NDArray[Any], out: Floats) -> None:
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
