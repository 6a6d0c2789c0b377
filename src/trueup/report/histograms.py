"""Counting the elements of tensors in bins, and drawing the counts with characters; no tensor is copied as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BINS = 16
BLOCKS = " ▏▎▍▌▋▊▉█"
PIECE = 1 << 16
"""Elements taken at a time."""


def histogram(values: NDArray[Any], bins: int = BINS) -> list[tuple[float, float, int]]:
    """Count finite elements in equal bins between their extremes, one bin if they are (nearly) all equal.

    Returns ``(from, to, count)`` rows. Of complex elements the magnitude is taken.
    """
    return [(low, high, counts[0]) for low, high, counts in histograms([values], bins)]


def histograms(tensors: Sequence[NDArray[Any]], bins: int = BINS) -> list[tuple[float, float, list[int]]]:
    """Count the finite elements of several tensors in the same bins: ``(from, to, [count of each])`` rows."""
    found = [bounds for values in tensors if (bounds := _bounds(values)) is not None]
    if not found:
        return []
    low, high = min(each[0] for each in found), max(each[1] for each in found)
    scale = 1.0 if high / 4 - low / 4 < np.finfo(np.float64).max / 4 else 4.0  # the span must be a float64 itself
    if (high / scale - low / scale) <= 2 * bins * np.spacing(max(abs(low), abs(high)) / 4) * 4 / scale:
        return [(low, high, [sum(piece.size for piece in _finite(values)) for values in tensors])]
    edges = np.histogram_bin_edges(np.empty(0), bins, (low / scale, high / scale))
    counts = [_counts(values, edges, scale) for values in tensors]
    edges = edges * scale
    edges[np.abs(edges) < (high / scale - low / scale) * 1e-6] = 0.0  # an edge at zero, but for rounding
    rows = zip(edges[:-1].tolist(), edges[1:].tolist(), zip(*counts, strict=True), strict=True)
    return [(a, b, list(each)) for a, b, each in rows]


def bar(share: float, width: int) -> str:
    """Draw a bar in eighths of a character; anything above zero is seen."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()


def _finite(values: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    with np.nditer(values, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=PIECE) as pieces:
        for piece in pieces:
            row = np.asarray(piece)
            real = (np.abs(row) if row.dtype.kind == "c" else row).astype(np.float64)
            yield real[np.isfinite(real)]


def _bounds(values: NDArray[Any]) -> tuple[float, float] | None:
    found = [(float(piece.min()), float(piece.max())) for piece in _finite(values) if piece.size]
    return (min(each[0] for each in found), max(each[1] for each in found)) if found else None


def _counts(values: NDArray[Any], edges: NDArray[np.float64], scale: float) -> list[int]:
    total = np.zeros(len(edges) - 1, np.int64)
    for piece in _finite(values):
        total += np.histogram(piece / scale, edges)[0]
    return [int(count) for count in total]
