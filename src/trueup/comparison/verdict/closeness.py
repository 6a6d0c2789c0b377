"""How alike two calls are: the same operator, slots and shapes, and then how close their data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import Array, Stream

DIGITS = 8
"""Relative distances below 10**-DIGITS are as good as equal."""

RUN = 4096
"""Pairs of calls whose data are compared at a time."""

FIRST = ("output.0", "grad_output.0")
"""Slots that every tool records of a forward and of a backward call."""


@dataclass(slots=True)
class _Side:
    """A sequence of calls and, call by call, the number of its kind; calls of one kind have the same slots."""

    calls: list[int]
    stream: Stream
    kind: Array
    slots: list[list[int]]
    """Of each call, its slots but for the non-tensor arguments."""


class Likeness:
    """Likeness of the calls of two sequences.

    Args:
        first: calls of the baseline, indices into its stream.
        second: calls of the candidate.
        baseline: the stream of the former.
        candidate: the stream of the latter.
        ops: by call of each side, the number of the operator by which it is matched.
    """

    def __init__(
        self, first: list[int], second: list[int], baseline: Stream, candidate: Stream, ops: tuple[Array, Array]
    ) -> None:
        kinds: dict[object, int] = {}
        sides = ((first, baseline, ops[0]), (second, candidate, ops[1]))
        mixed = baseline.imported != candidate.imported or baseline.mixed
        self._sides = tuple(_side(*side, kinds, mixed=mixed) for side in sides)

    def table(self, rows: slice, columns: slice) -> Array:
        """Return float64 ``(rows, columns)``: 0 where operators, slots or shapes differ, else 1 to 3 by closeness of data."""
        kinds = [side.kind[part] for side, part in zip(self._sides, (rows, columns), strict=True)]
        score = np.zeros((len(kinds[0]), len(kinds[1])))
        for kind in np.intersect1d(kinds[0], kinds[1]):
            i, j = (np.flatnonzero(k == kind) for k in kinds)
            score[np.ix_(i, j)] = 1.0 + 2.0 * self._close(i + rows.start, j + columns.start)
        return score

    def of(self, pairs: list[tuple[int, int]]) -> Array:
        """Return how close the data of some pairs of calls are, each of one kind: 1 for equal to 0 for unrelated."""
        i, j = np.array(pairs, np.int64).reshape(-1, 2).T
        return self._pairwise(i, j)

    def same(self, i: int, j: int, step: int, length: int, least: float) -> int:
        """Count how many of ``length`` calls from ``i`` and ``j`` on, forwards or backwards, are alike pair by pair."""
        a, b = (side.kind[k::step][:length] for side, k in zip(self._sides, (i, j), strict=True))
        differ = np.flatnonzero(a != b)
        run = int(differ[0]) if len(differ) else length
        for start in range(0, run, RUN):
            n = np.arange(start, min(start + RUN, run)) * step
            unlike = np.flatnonzero(self._pairwise(i + n, j + n) < least)
            if len(unlike):
                return start + int(unlike[0])
        return run

    def _pairwise(self, i: Array, j: Array) -> Array:
        """Return how close the data of pairs of calls are, each pair of one kind: 1 for equal to 0 for unrelated."""
        (first, second), count = self._sides, len(i)
        b = [k for call in i.tolist() for k in first.slots[call]]
        c = [k for call in j.tolist() for k in second.slots[call]]
        slots = np.array([len(first.slots[call]) for call in i.tolist()], np.int64)
        equal = _has_equal(first.stream, b, second.stream, c)
        close = equal.astype(np.float64)
        rest = np.flatnonzero(~equal)
        x, y = first.stream.sketch[np.array(b, np.int64)[rest]], second.stream.sketch[np.array(c, np.int64)[rest]]
        close[rest] = _closeness(np.sum(np.square(y - x), axis=1), np.sum(np.square(x), axis=1))
        total = np.bincount(np.repeat(np.arange(count), slots), close, count)
        return np.where(slots > 0, total / np.maximum(slots, 1), 0.0)

    def _close(self, i: Array, j: Array) -> Array:
        """Return 1 for equal data down to 0 for unrelated ones, ``(len(i), len(j))``, for calls of one kind."""
        first, second = self._sides
        count = len(first.slots[i[0]])  # a kind's calls have the same slots in the same order
        total = np.zeros((len(i), len(j)))
        for n in range(count):
            total += self._slot([first.slots[k][n] for k in i], [second.slots[k][n] for k in j])
        return total / max(count, 1)

    def _slot(self, b: list[int], c: list[int]) -> Array:
        baseline, candidate = (side.stream for side in self._sides)
        x, y = baseline.sketch[b], candidate.sketch[c]
        squares = np.einsum("ik,ik->i", x, x)
        # |x|² + |y|² − 2xy loses the digits beyond the eighth, which do not matter here
        apart = np.maximum(squares[:, None] + np.einsum("jk,jk->j", y, y) - 2 * (x @ y.T), 0.0)
        close = _closeness(apart, squares[:, None])
        known = baseline.has_digest[b][:, None] & candidate.has_digest[c]
        close[known & (baseline.digest[b][:, None] == candidate.digest[c])] = 1.0
        return close


def _closeness(apart: Array, squares: Array) -> Array:
    """Return 0.99 for a distance of next to nothing down to 0 for one as large as the tensor; both are squared."""
    with np.errstate(all="ignore"):
        relative = np.sqrt(apart / squares)
        close = np.clip(-np.log10(np.maximum(relative, 10.0**-DIGITS)) / DIGITS, 0, 0.99)
    return np.where(np.isfinite(relative), close, 0.0)


def _has_equal(baseline: Stream, b: list[int], candidate: Stream, c: list[int]) -> Array:
    """Tell which pairs of slots have the same digest."""
    both = baseline.has_digest[b] & candidate.has_digest[c]
    return np.asarray(both & (baseline.digest[b] == candidate.digest[c]), bool)


def _side(calls: list[int], stream: Stream, ops: Array, kinds: dict[object, int], *, mixed: bool) -> _Side:
    arguments = stream.names.number("arguments")
    slots = [[k for name, k in sorted(stream.slots(call).items()) if name != arguments] for call in calls]
    if mixed:  # another tool sees other slots of a call, but hardly another first result
        first = [stream.names.number(name) for name in FIRST]
        slots = [[k for k in its if stream.slot[k] in first] for its in slots]
    found = [
        (int(ops[call]), *((int(stream.slot[k]), int(stream.shapes.exact[k])) for k in its))
        for call, its in zip(calls, slots, strict=True)
    ]
    return _Side(calls, stream, np.array([kinds.setdefault(kind, len(kinds)) for kind in found], dtype=np.int64), slots)
