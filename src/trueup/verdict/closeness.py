"""How alike two calls are: the same operator, slots and shapes, and then how close their data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup.verdict.streams import Array, Row, Stream

DIGITS = 8
"""Relative distances below 10**-DIGITS are as good as equal."""


@dataclass(slots=True)
class _Side:
    """A sequence of calls and, call by call, the number of its kind; calls of one kind have the same slots."""

    calls: list[Row]
    stream: Stream
    kind: Array


class Likeness:
    """Likeness of the calls of two sequences.

    Args:
        first: calls of the baseline.
        second: calls of the candidate.
        baseline: the stream of the former.
        candidate: the stream of the latter.
    """

    def __init__(self, first: list[Row], second: list[Row], baseline: Stream, candidate: Stream) -> None:
        kinds: dict[object, int] = {}
        self._sides = tuple(
            _Side(calls, stream, np.array([kinds.setdefault(_kind(c, stream), len(kinds)) for c in calls], dtype=np.int64))
            for calls, stream in ((first, baseline), (second, candidate))
        )
        self._digests: dict[str | None, int] = {None: -1}

    def table(self, rows: slice, columns: slice) -> Array:
        """Return float64 ``(rows, columns)``: 0 where operators, slots or shapes differ, else 1 to 3 by closeness of data."""
        kinds = [side.kind[part] for side, part in zip(self._sides, (rows, columns), strict=True)]
        score = np.zeros((len(kinds[0]), len(kinds[1])))
        for kind in np.intersect1d(kinds[0], kinds[1]):
            i, j = (np.flatnonzero(k == kind) for k in kinds)
            score[np.ix_(i, j)] = 1.0 + 2.0 * self._close(i + rows.start, j + columns.start)
        return score

    def same(self, i: int, j: int, step: int, length: int, least: float) -> int:
        """Count how many of ``length`` calls from ``i`` and ``j`` on, forwards or backwards, are alike pair by pair."""
        a, b = (side.kind[k::step][:length] for side, k in zip(self._sides, (i, j), strict=True))
        differ = np.flatnonzero(a != b)
        run = int(differ[0]) if len(differ) else length
        for n in range(run):
            if not self._equal(i + n * step, j + n * step) and self._pair(i + n * step, j + n * step) < least:
                return n
        return run

    def _equal(self, i: int, j: int) -> bool:
        first, second = (side.calls[k] for side, k in zip(self._sides, (i, j), strict=True))
        baseline, candidate = (side.stream.digest for side in self._sides)
        return all(
            baseline[k] is not None and baseline[k] == candidate[second.slots[slot]]
            for slot, k in first.slots.items()
            if slot != "arguments"
        )

    def _pair(self, i: int, j: int) -> float:
        return float(self._close(np.array([i]), np.array([j]))[0, 0])

    def _close(self, i: Array, j: Array) -> Array:
        """Return 1 for equal data down to 0 for unrelated ones, ``(len(i), len(j))``, for calls of one kind."""
        first, second = (side.calls for side in self._sides)
        slots = [s for s in first[i[0]].slots if s != "arguments"]
        total = np.zeros((len(i), len(j)))
        for slot in slots:
            b = [first[k].slots[slot] for k in i]
            c = [second[k].slots[slot] for k in j]
            total += self._slot(b, c)
        return total / max(len(slots), 1)

    def _slot(self, b: list[int], c: list[int]) -> Array:
        baseline, candidate = (side.stream for side in self._sides)
        x, y = baseline.sketch[b], candidate.sketch[c]
        with np.errstate(all="ignore"):
            squares = np.einsum("ik,ik->i", x, x)
            # |x|² + |y|² − 2xy loses the digits beyond the eighth, which do not matter here
            apart = np.maximum(squares[:, None] + np.einsum("jk,jk->j", y, y) - 2 * (x @ y.T), 0.0)
            relative = np.sqrt(apart / squares[:, None])
            close = np.clip(-np.log10(np.maximum(relative, 10.0**-DIGITS)) / DIGITS, 0, 0.99)
        close = np.where(np.isfinite(relative), close, 0.0)
        ids = [
            np.array([self._digests.setdefault(stream.digest[k], len(self._digests)) for k in ks])
            for stream, ks in ((baseline, b), (candidate, c))
        ]
        close[(ids[0][:, None] == ids[1]) & (ids[0][:, None] >= 0)] = 1.0
        return np.asarray(close)


def _kind(call: Row, stream: Stream) -> tuple[object, ...]:
    return call.op, *((slot, stream.shape[k]) for slot, k in call.slots.items() if slot != "arguments")
