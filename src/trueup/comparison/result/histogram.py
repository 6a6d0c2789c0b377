"""Counting the elements of tensors in common bins; no tensor is copied as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Pieces = Callable[[], Iterable[Array]]  # gives the elements that are counted, float64, piece by piece; it is asked twice
PIECE = 1 << 16
"""Elements taken at a time."""


def histograms(tensors: Sequence[Pieces], bins: int) -> list[tuple[float, float, list[int]]]:
    """Count the elements of several tensors in the same bins between their extremes: ``(from, to, [count of each])`` rows; one
    bin if they are (nearly) all equal, none if there are no elements."""
    found = [bounds for pieces in tensors if (bounds := _bounds(pieces())) is not None]
    if not found:
        return []
    low, high = min(each[0] for each in found), max(each[1] for each in found)
    scale = 1.0 if high / 4 - low / 4 < np.finfo(np.float64).max / 4 else 4.0  # the span must be a float64 itself
    if (high / scale - low / scale) <= 2 * bins * np.spacing(max(abs(low), abs(high)) / 4) * 4 / scale:
        return [(low, high, [sum(piece.size for piece in pieces()) for pieces in tensors])]
    edges = np.histogram_bin_edges(np.empty(0), bins, (low / scale, high / scale))
    counts = [_counts(pieces(), edges, scale) for pieces in tensors]
    edges = edges * scale
    inner = edges[1:-1]
    inner[np.abs(inner) < (high / scale - low / scale) * 1e-6] = 0.0  # an edge at zero, but for rounding
    rows = zip(edges[:-1].tolist(), edges[1:].tolist(), zip(*counts, strict=True), strict=True)
    return [(a, b, list(each)) for a, b, each in rows]


def finite(values: Array) -> Iterator[Array]:
    """Yield the finite elements of a tensor in logical order; of complex ones the magnitude."""
    with np.nditer(values, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=PIECE) as pieces:
        for piece in pieces:
            row = np.asarray(piece)
            real = (np.abs(row) if row.dtype.kind == "c" else row).astype(np.float64)
            yield real[np.isfinite(real)]


def _bounds(pieces: Iterable[Array]) -> tuple[float, float] | None:
    found = [(float(piece.min()), float(piece.max())) for piece in pieces if piece.size]
    return (min(each[0] for each in found), max(each[1] for each in found)) if found else None


def _counts(pieces: Iterable[Array], edges: Array, scale: float) -> list[int]:
    total = np.zeros(len(edges) - 1, np.int64)
    for piece in pieces:
        total += np.histogram(piece / scale, edges)[0]
    return [int(count) for count in total]
