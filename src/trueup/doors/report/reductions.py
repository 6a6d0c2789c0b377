"""A record's statistics as the old tools show them: they reduce all elements, where a record leaves out what is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

REDUCED = ("max", "min", "mean", "l2")
COUNTS = ("n_nan", "n_posinf", "n_neginf")


def reduced(numbers: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return max, min, mean and l2 norm as PyTorch's reductions give them: one NaN makes all of them NaN, Inf stays.

    Args:
        numbers: `REDUCED` (of the finite elements, NaN where there are none) and `COUNTS` of records, float64 ``()`` or ``(n,)``.

    Returns:
        ``(4,)`` or ``(4, n)`` in the order of `REDUCED`.
    """
    highest, lowest, mean, norm = (np.asarray(numbers[name], np.float64) for name in REDUCED)
    has_nan, above, below = (np.asarray(numbers[name], np.float64) > 0 for name in COUNTS)
    highest = np.where(above, np.inf, np.where(below & ~np.isfinite(highest), -np.inf, highest))
    lowest = np.where(below, -np.inf, np.where(above & ~np.isfinite(lowest), np.inf, lowest))
    mean = np.where(above & below, np.nan, np.where(above, np.inf, np.where(below, -np.inf, mean)))
    norm = np.where(above | below, np.inf, norm)
    return np.where(has_nan, np.nan, np.stack([highest, lowest, mean, norm]))
