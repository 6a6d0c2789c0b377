"""Histograms as rows of text; counted by `trueup.comparison.result.histogram`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trueup.comparison.result import histogram as counting

if TYPE_CHECKING:
    from numpy.typing import NDArray

BINS = 16
BLOCKS = " ▏▎▍▌▋▊▉█"


def histogram(values: NDArray[Any], bins: int = BINS) -> list[tuple[float, float, int]]:
    """Count finite elements in equal bins between their extremes, one bin if they are (nearly) all equal.

    Returns ``(from, to, count)`` rows. Of complex elements the magnitude is taken.
    """
    return [(low, high, counts[0]) for low, high, counts in histograms([values], bins)]


def histograms(tensors: Sequence[NDArray[Any]], bins: int = BINS) -> list[tuple[float, float, list[int]]]:
    """Count the finite elements of several tensors in the same bins: ``(from, to, [count of each])`` rows."""
    return counting.histograms([partial(counting.finite, values) for values in tensors], bins)


def bar(share: float, width: int) -> str:
    """Draw a bar in eighths of a character; anything above zero is seen."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
