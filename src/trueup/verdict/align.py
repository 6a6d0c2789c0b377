"""Which baseline call is which candidate call, within one rank and step.

Calls are put in buckets of the same phase, level and scope. Where both sides of a bucket execute the same operators in the same
order, the n-th is the n-th (the exact key). Where they do not, the two sequences are aligned so that the sum of similarities is
largest: same operator and shapes required, then how close the data are. What is left over, on both sides, is paired whatever its
order if operator, shapes and data are alike: autocast casts a weight before or after an input. The rest is unmatched.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from trueup.verdict.closeness import Likeness
from trueup.verdict.measure import sizes
from trueup.verdict.streams import Row, Stream

MAX_CELLS = 4_000_000
"""Largest table of similarities; a longer pair of sequences is aligned window by window."""

WINDOW = 1000
"""Calls of each side in a window. Only the pairs of its first half are kept: the second half may depend on what follows."""

ALIKE = 0.75
"""Closeness from which calls at the same place are a pair without a look at the rest: a relative distance of 1e-6."""


AKIN = 0.25
"""Closeness from which left-over calls are a pair whatever their order: a relative distance of 1e-2."""


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
            pairs += _reordered(first, second, baseline, candidate)
        elif first and second:
            likeness = Likeness(first, second, baseline, candidate)
            found = [(first[i], second[j]) for i, j in _align_sequences(likeness, len(first), len(second))]
            pairs += found + _left_over(found, first, second, baseline, candidate)
    pairs.sort(key=lambda pair: pair[1].seq)
    return Alignment(pairs, *_unpaired(pairs, baseline.calls, candidate.calls))


def _reordered(first: list[Row], second: list[Row], baseline: Stream, candidate: Stream) -> list[tuple[Row, Row]]:
    """Pair the n-th with the n-th, but calls whose shapes differ with such as are alike, where there are any.

    What is left of the dispatcher's operators stays without counterpart: the function around them speaks for them.
    """
    exact = list(zip(first, second, strict=True))
    same = [(b, c) for b, c in exact if _fit(b, c, baseline, candidate)]
    if len(same) == len(exact):
        return exact
    moved = _left_over(same, first, second, baseline, candidate)
    if first[0].level == "aten" and same:
        return same + moved
    return same + moved + list(zip(*_unpaired(same + moved, first, second), strict=True))


def _unpaired(pairs: list[tuple[Row, Row]], first: list[Row], second: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the calls of both sides that are in none of the pairs."""
    taken = {b.seq for b, _ in pairs}, {c.seq for _, c in pairs}
    return [c for c in first if c.seq not in taken[0]], [c for c in second if c.seq not in taken[1]]


def _fit(b: Row, c: Row, baseline: Stream, candidate: Stream) -> bool:
    """Tell whether the slots that both calls have are of the same shapes."""
    shared = ((k, c.slots[slot]) for slot, k in b.slots.items() if slot in c.slots)
    return all(sizes(baseline.shape[k]) == sizes(candidate.shape[j]) for k, j in shared)


def _left_over(
    pairs: list[tuple[Row, Row]], first: list[Row], second: list[Row], baseline: Stream, candidate: Stream
) -> list[tuple[Row, Row]]:
    """Pair what no sequence holds: each call with the most alike one left, if they are alike at all."""
    rest = _unpaired(pairs, first, second)
    if not rest[0] or not rest[1] or len(rest[0]) * len(rest[1]) > MAX_CELLS:
        return []
    score = Likeness(rest[0], rest[1], baseline, candidate).table(slice(0, len(rest[0])), slice(0, len(rest[1])))
    found = []
    for i, call in enumerate(rest[0]):
        j = int(np.argmax(score[i]))
        if score[i, j] >= 1 + 2 * AKIN:
            found.append((call, rest[1][j]))
            score[:, j] = 0
    return found


def _align_sequences(likeness: Likeness, n: int, m: int) -> list[tuple[int, int]]:
    """Pair the calls of two sequences, in time and memory bounded by `MAX_CELLS` and their length."""
    i = j = 0
    pairs: list[tuple[int, int]] = []
    tail = likeness.same(n - 1, m - 1, -1, min(n, m), ALIKE)
    end, last = n - tail, m - tail
    while i < end and j < last:
        run = likeness.same(i, j, 1, min(end - i, last - j), ALIKE)
        pairs += [(i + k, j + k) for k in range(run)]
        i, j = i + run, j + run
        whole = (end - i) * (last - j) <= MAX_CELLS
        high, wide = (end - i, last - j) if whole else (min(WINDOW, end - i), min(WINDOW, last - j))
        found = _best_pairs(likeness, i, j, high, wide)
        if whole:
            pairs += found
            break
        kept = [(a, b) for a, b in found if (a - i) * 2 < WINDOW and (b - j) * 2 < WINDOW]
        pairs += kept
        if kept:
            i, j = kept[-1][0] + 1, kept[-1][1] + 1
        elif end - i > last - j:  # nothing in common here: the longer side has to catch up
            i += WINDOW // 2
        else:
            j += WINDOW // 2
    return pairs + [(end + k, last + k) for k in range(tail)]


def _best_pairs(likeness: Likeness, i: int, j: int, high: int, wide: int) -> list[tuple[int, int]]:
    """Pair ``high`` calls from ``i`` on with ``wide`` calls from ``j`` on so that their likeness adds up to the most."""
    score = likeness.table(slice(i, i + high), slice(j, j + wide))
    best = np.zeros((high + 1, wide + 1))
    for row in range(high):
        through = np.maximum(best[row, 1:], best[row, :-1] + score[row])
        best[row + 1, 1:] = np.maximum.accumulate(through)
    pairs = []
    a, b = high, wide
    while a and b:
        if best[a, b] == best[a - 1, b]:
            a -= 1
        elif best[a, b] == best[a, b - 1]:
            b -= 1
        else:
            a, b = a - 1, b - 1
            pairs.append((i + a, j + b))
    return pairs[::-1]
