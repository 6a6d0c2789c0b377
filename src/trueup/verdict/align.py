"""Which baseline call is which candidate call, within one rank and step.

Two passes. Calls are put in buckets of the same phase, level and scope. Where both sides of a bucket execute the same operators
in the same order, the n-th is the n-th (the exact key). Where they do not, the two sequences are aligned so that the sum of
similarities is largest: same operator and shapes required, then how close the data are. What stays over is unmatched.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from trueup.kernels import relative_distance
from trueup.model import NUMBERS
from trueup.verdict.streams import Array, Row, Stream, is_output

MAX_CELLS = 16_000_000
"""Largest matrix of similarities; a longer bucket is aligned by operator and order alone."""

L2 = NUMBERS.index("l2")


@dataclass(slots=True)
class Alignment:
    """Matched pairs in the candidate's execution order, and what has no partner."""

    pairs: list[tuple[Row, Row]]
    only_baseline: list[Row]
    only_candidate: list[Row]


def align(baseline: Stream, candidate: Stream) -> Alignment:
    """Match the calls of two streams."""
    buckets: defaultdict[tuple[str, str, str], tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for side, stream in enumerate((baseline, candidate)):
        for call in stream.calls:
            buckets[call.phase, call.level, call.scope][side].append(call)
    pairs: list[tuple[Row, Row]] = []
    for first, second in buckets.values():
        if [c.op for c in first] == [c.op for c in second]:
            pairs += zip(first, second, strict=True)
        elif first and second:
            pairs += _align_sequences(first, second, baseline, candidate)
    pairs.sort(key=lambda pair: pair[1].seq)
    matched_b, matched_c = {b.seq for b, _ in pairs}, {c.seq for _, c in pairs}
    return Alignment(
        pairs,
        [c for c in baseline.calls if c.seq not in matched_b],
        [c for c in candidate.calls if c.seq not in matched_c],
    )


def _align_sequences(first: list[Row], second: list[Row], baseline: Stream, candidate: Stream) -> list[tuple[Row, Row]]:
    if len(first) * len(second) > MAX_CELLS:
        return _align_by_order(first, second)
    score = _similarity(first, second, baseline, candidate)
    best = np.zeros((len(first) + 1, len(second) + 1))
    for i in range(len(first)):
        row = np.maximum(best[i, 1:], best[i, :-1] + score[i])
        best[i + 1, 1:] = np.maximum.accumulate(row)
    pairs = []
    i, j = len(first), len(second)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((first[i], second[j]))
    return pairs[::-1]


def _align_by_order(first: list[Row], second: list[Row]) -> list[tuple[Row, Row]]:
    """Pair the n-th call of each operator with the n-th: all that is affordable for very long buckets."""
    by_key = {(c.op, c.ordinal): c for c in second}
    return [(c, by_key[c.op, c.ordinal]) for c in first if (c.op, c.ordinal) in by_key]


def _similarity(first: list[Row], second: list[Row], baseline: Stream, candidate: Stream) -> Array:
    """Return float64 ``(len(first), len(second))``: 0 where operators or shapes differ, else 1 to 3 by how close the data are."""
    score = np.zeros((len(first), len(second)))
    ops = defaultdict(list)
    for j, call in enumerate(second):
        ops[call.op].append(j)
    for i, call in enumerate(first):
        others = ops.get(call.op)
        if not others:
            continue
        shapes = _shapes(call, baseline)
        same = np.array([shapes == _shapes(second[j], candidate) for j in others])
        score[i, others] = same * (1.0 + 2.0 * _closeness(call, [second[j] for j in others], baseline, candidate))
    return score


def _shapes(call: Row, stream: Stream) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    return tuple((slot, stream.shape[k]) for slot, k in call.slots.items() if slot != "arguments")


def _closeness(call: Row, others: list[Row], baseline: Stream, candidate: Stream) -> Array:
    """Return 1 for equal outputs down to 0 for unrelated ones, by the distance of their sketches."""
    slot = next((s for s in call.slots if is_output(s)), next(iter(call.slots), None))
    closeness = np.zeros(len(others))
    if slot is None or slot == "arguments":
        return closeness
    k = call.slots[slot]
    for n, other in enumerate(others):
        j = other.slots.get(slot)
        if j is None or candidate.numel[j] != baseline.numel[k]:
            continue
        if baseline.digest[k] is not None and baseline.digest[k] == candidate.digest[j]:
            closeness[n] = 1.0
            continue
        error = float(relative_distance(baseline.sketch[k], candidate.sketch[j], baseline.numbers[k, L2]))
        if np.isfinite(error):
            closeness[n] = np.clip(-np.log10(max(error, 1e-12)) / 8, 0, 1)
    return closeness
