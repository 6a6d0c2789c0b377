"""The elements of a tensor on both sides: how they are spread, and where they are furthest apart.

Tensors are read in chunks from the mapped capture, so memory does not grow with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from trueup.comparison.result.histogram import histograms
from trueup.foundation.model import Histogram, WorstElement

Array = np.ndarray[Any, Any]

BINS = 40
WORST = 6
CHUNK = 1 << 20
"""Elements that are converted to float64 at a time: 8 MB a side."""
LARGEST = 1.7e308
MOST = 1 << 26
"""Elements of a tensor that are looked at; of a larger one the first so many, and that is said."""


def compare_elements(slot: str, baseline: Array, candidate: Array) -> tuple[Histogram | None, list[WorstElement], list[str]]:
    """Compare two tensors of equal size, element by element in logical C order.

    Args:
        slot: the name under which the results stand.
        baseline: any shape and dtype, as read from a capture.
        candidate: likewise, with as many elements.

    Returns:
        the histogram of both (None where no element is finite), the worst elements, and what was left out.
    """
    notes = []
    size = baseline.size * (2 if baseline.dtype.kind == "c" else 1)
    if size > MOST:
        notes.append(f"{slot}: of {size:,} elements the first {MOST:,} are shown")
    rows = histograms([partial(_shown, side) for side in (baseline, candidate)], BINS)
    histogram = None
    if rows:
        counts = (tuple(row[2][side] for row in rows) for side in (0, 1))
        histogram = Histogram(slot, _edges(rows), *counts)
    left_out = sum(len(numbers) for side in (baseline, candidate) for _, numbers in _chunks(side)) - sum(
        sum(row[2]) for row in rows
    )
    if left_out:
        notes.append(f"{slot}: {left_out:,} elements that are not finite, or the largest their dtype has, are not in the histogram")
    return histogram, _worst(slot, baseline, candidate), notes


def _chunks(array: Array) -> Iterator[tuple[int, Array]]:
    """Yield ``(offset, float64 elements)``; a complex element is two."""
    flat = array.reshape(-1) if array.flags.c_contiguous else None
    parts = 2 if array.dtype.kind == "c" else 1
    end = min(array.size, MOST // parts)
    for start in range(0, end, CHUNK):
        stop = min(start + CHUNK, end)
        held = flat[start:stop] if flat is not None else array.flat[start:stop]
        numbers = held.view(held.real.dtype) if parts == 2 else held
        yield start * parts, numbers.astype(np.float64)


def _largest(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a dtype that masks are made of; Inf where it is an ordinary number."""
    if dtype.kind == "c" or dtype.kind == "f" or dtype.kind == "V" or dtype.name.startswith(("bfloat", "float")):
        return float(ml_dtypes.finfo(dtype).max)
    return math.inf


def _shown(side: Array) -> Iterator[Array]:
    """Yield the elements that are counted: NaN, Inf and what masks are made of are not."""
    largest = _largest(side.dtype)
    for _, numbers in _chunks(side):
        yield numbers[np.abs(numbers) < largest]


def _edges(rows: Sequence[tuple[float, float, list[int]]]) -> tuple[float, ...]:
    """Return rising edges; what is all one number gets a bin around it."""
    low, high = rows[0][0], rows[-1][1]
    if low < high:
        return (*(row[0] for row in rows), high)
    margin = abs(low) * 0.5 or 0.5
    return max(low - margin, -LARGEST), min(high + margin, LARGEST)


def _worst(slot: str, baseline: Array, candidate: Array) -> list[WorstElement]:
    """Return the elements that are furthest apart: those that are finite on one side only come first."""
    best: list[tuple[float, int, float, float]] = []
    for (offset, b), (_, c) in zip(_chunks(baseline), _chunks(candidate), strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(c - b)
        same = (b == c) | (np.isnan(b) & np.isnan(c))
        apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
        count = min(WORST, len(apart))
        top = np.argpartition(-apart, count - 1)[:count] if count else np.empty(0, np.int64)
        best += [(float(apart[k]), offset + int(k), float(b[k]), float(c[k])) for k in top if apart[k] > 0]
        best = sorted(best, key=lambda one: (-one[0], one[1]))[:WORST]
    shape = (*baseline.shape, 2) if baseline.dtype.kind == "c" else baseline.shape
    return [
        WorstElement(slot, tuple(int(i) for i in np.unravel_index(k, shape)), b, c, _ulps(b, c, baseline.dtype, candidate.dtype))
        for _, k, b, c in best
    ]


def _ulps(baseline: float, candidate: float, *dtypes: np.dtype[Any]) -> float:
    """Return |candidate - baseline| in units in the last place of the larger of them, in the dtype with the fewest digits.

    So two numbers of which one is zero are about 2**p units apart, however small. The unit of x is 2**(e - p) with
    2**e <= |x| < 2**(e + 1) and p stored bits of mantissa, that of the least normal number below it (IEEE 754-2019).
    """
    infos = [ml_dtypes.finfo(dtype) for dtype in dtypes if _largest(dtype) < math.inf]
    if len(infos) < len(dtypes) or not (math.isfinite(baseline) and math.isfinite(candidate)):
        return math.nan
    coarse = min(infos, key=lambda info: int(info.nmant))
    least = float(coarse.smallest_normal)
    exponent = math.frexp(max(abs(baseline), abs(candidate), least))[1] - 1
    unit = math.ldexp(1.0, max(exponent - int(coarse.nmant), -1074))
    return abs(candidate - baseline) / unit
