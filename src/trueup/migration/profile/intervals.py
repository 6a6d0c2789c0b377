"""Sets of intervals of time: float64 arrays of shape (n, 2), starts and ends in microseconds, sorted and apart."""

from __future__ import annotations

from typing import Any

import numpy as np

Intervals = np.ndarray[Any, np.dtype[np.float64]]
NONE: Intervals = np.zeros((0, 2))


def union(given: Intervals) -> Intervals:
    """Return the times that any of some intervals, in any order, covers."""
    if not len(given):
        return NONE
    given = given[np.argsort(given[:, 0], kind="stable")]
    ends = np.maximum.accumulate(given[:, 1])
    first = np.flatnonzero(np.append(True, given[1:, 0] > ends[:-1]))
    return np.stack([given[first, 0], ends[np.append(first[1:] - 1, len(given) - 1)]], 1)


def without(some: Intervals, others: Intervals) -> Intervals:
    """Return the times of a set that are not in another one."""
    if not len(some) or not len(others):
        return some
    edges = np.concatenate([[[-np.inf, others[0, 0]]], np.stack([others[:-1, 1], others[1:, 0]], 1), [[others[-1, 1], np.inf]]])
    return both(some, edges)


def both(some: Intervals, others: Intervals) -> Intervals:
    """Return the times that two sets have in common."""
    if not len(some) or not len(others):
        return NONE
    first = np.searchsorted(others[:, 1], some[:, 0], "right")
    last = np.searchsorted(others[:, 0], some[:, 1], "left")
    count = np.maximum(last - first, 0)
    of = np.repeat(np.arange(len(some)), count)
    with_ = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    starts = np.maximum(some[of, 0], others[with_, 0])
    ends = np.minimum(some[of, 1], others[with_, 1])
    found: Intervals = np.stack([starts, ends], 1)[ends > starts]
    return found


def total(some: Intervals) -> float:
    """Return how long a set is, in microseconds."""
    return float((some[:, 1] - some[:, 0]).sum())
