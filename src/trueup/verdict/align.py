"""Which baseline call is which candidate call, within one rank and step.

Calls are put in buckets of the same phase, level and scope. Where both sides of a bucket execute the same operators in the same
order, the n-th is the n-th (the exact key). Where they do not, the two sequences are aligned so that the sum of similarities is
largest: same operator and shapes required, then how close the data are. What is left over, on both sides, is paired whatever its
order if operator, shapes and data are alike: autocast casts a weight before or after an input. The rest is unmatched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup.verdict.closeness import Likeness
from trueup.verdict.streams import Array, Numbers, Stream, spans

MAX_CELLS = 4_000_000
"""Largest table of similarities; a longer pair of sequences is aligned window by window."""

WINDOW = 1000
"""Calls of each side in a window. Only the pairs of its first half are kept: the second half may depend on what follows."""

ALIKE = 0.75
"""Closeness from which calls at the same place are a pair without a look at the rest: a relative distance of 1e-6."""

AKIN = 0.25
"""Closeness from which left-over calls are a pair whatever their order: a relative distance of 1e-2."""

Couples = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Alignment:
    """Matched calls, in the candidate's execution order, and what has no partner: indices into the streams."""

    baseline: Numbers
    candidate: Numbers
    only_baseline: Numbers
    only_candidate: Numbers


def align(baseline: Stream, candidate: Stream) -> Alignment:
    """Match the calls of two streams."""
    streams = baseline, candidate
    matched = np.zeros((2, 0), np.int64)
    pairs: Couples = []
    buckets = [_Buckets(stream) for stream in streams]
    shared = np.intersect1d(buckets[0].keys, buckets[1].keys, assume_unique=True)
    if len(shared):
        at = [np.searchsorted(b.keys, shared) for b in buckets]
        counts = [b.counts[k] for b, k in zip(buckets, at, strict=True)]
        even = counts[0] == counts[1]
        calls = [b.order[spans(b.starts[k[even]], b.counts[k[even]])] for b, k in zip(buckets, at, strict=True)]
        bucket = np.repeat(np.flatnonzero(even), counts[0][even])
        same = _of_all(baseline.op[calls[0]] == candidate.op[calls[1]], bucket, len(shared)) & even
        fit = _of_all(_fit(calls[0], calls[1], *streams), bucket, len(shared)) & same
        matched = np.stack([c[fit[bucket]] for c in calls])
        for k in np.flatnonzero(~fit):
            first, second = (b.members(int(n[k])) for b, n in zip(buckets, at, strict=True))
            if same[k]:
                pairs += _reordered(first, second, *streams)
            else:
                pairs += _sequences(first, second, *streams)
    found = np.concatenate([matched, np.array(pairs, np.int64).reshape(-1, 2).T], axis=1)
    found = found[:, np.argsort(found[1], kind="stable")]
    alone = [np.delete(np.arange(len(stream)), side) for stream, side in zip(streams, found, strict=True)]
    return Alignment(found[0], found[1], *alone)


class _Buckets:
    """The calls of a stream by phase, level and scope: those of ``keys[k]`` are ``order[starts[k]:][:counts[k]]``."""

    def __init__(self, stream: Stream) -> None:
        key = (stream.phase * len(stream.names.names) + stream.level) * len(stream.names.names) + stream.scope
        self.order = np.argsort(key, kind="stable")
        self.keys, self.starts, self.counts = np.unique(key[self.order], return_index=True, return_counts=True)

    def members(self, k: int) -> list[int]:
        start = int(self.starts[k])
        return list(self.order[start : start + int(self.counts[k])].tolist())


def _of_all(true: Array, bucket: Numbers, buckets: int) -> Array:
    """Return, by bucket, whether all of its calls are true."""
    return np.asarray(np.bincount(bucket[~true], minlength=buckets) == 0)


def _fit(b: Numbers, c: Numbers, baseline: Stream, candidate: Stream) -> Array:
    """Tell which pairs of calls have the same shapes in the slots that both have; sizes of one do not count."""
    k, j, owner, rest = same_slots(b, c, baseline, candidate)
    fits = np.ones(len(b), bool)
    fits[owner[baseline.shapes.squeezed[k] != candidate.shapes.squeezed[j]]] = False
    for n in rest:
        first, second = baseline.slots(int(b[n])), candidate.slots(int(c[n]))
        shared = ((i, second[slot]) for slot, i in first.items() if slot in second)
        fits[n] = all(baseline.shapes.squeezed[i] == candidate.shapes.squeezed[m] for i, m in shared)
    return fits


def same_slots(b: Numbers, c: Numbers, baseline: Stream, candidate: Stream) -> tuple[Numbers, Numbers, Numbers, list[int]]:
    """Pair the slots of pairs of calls whose slots have the same names in the same order.

    Returns:
        baseline's and candidate's slots, the number of the pair that each belongs to, and the pairs of other names or order.
    """
    counts = baseline.starts[b + 1] - baseline.starts[b]
    even = counts == candidate.starts[c + 1] - candidate.starts[c]
    k, j = spans(baseline.starts[b[even]], counts[even]), spans(candidate.starts[c[even]], counts[even])
    owner = np.repeat(np.flatnonzero(even), counts[even])
    differ = np.unique(owner[baseline.slot[k] != candidate.slot[j]])
    odd = ~even
    odd[differ] = True
    kept = ~odd[owner]
    return k[kept], j[kept], owner[kept], np.flatnonzero(odd).tolist()


def _sequences(first: list[int], second: list[int], baseline: Stream, candidate: Stream) -> Couples:
    likeness = Likeness(first, second, baseline, candidate)
    found = [(first[i], second[j]) for i, j in _align_sequences(likeness, len(first), len(second))]
    return found + _left_over(found, first, second, baseline, candidate)


def _reordered(first: list[int], second: list[int], baseline: Stream, candidate: Stream) -> Couples:
    """Pair the n-th with the n-th, but calls whose shapes differ with such as are alike, where there are any.

    What is left of the dispatcher's operators stays without counterpart: the function around them speaks for them.
    """
    exact = list(zip(first, second, strict=True))
    fits = _fit(np.array(first), np.array(second), baseline, candidate).tolist()
    same = [pair for pair, fit in zip(exact, fits, strict=True) if fit]
    moved = _left_over(same, first, second, baseline, candidate)
    if baseline.names.name(int(baseline.level[first[0]])) == "aten" and same:
        return same + moved
    return same + moved + list(zip(*_unpaired(same + moved, first, second), strict=True))


def _unpaired(pairs: Couples, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
    """Return the calls of both sides that are in none of the pairs."""
    taken = {b for b, _ in pairs}, {c for _, c in pairs}
    return [c for c in first if c not in taken[0]], [c for c in second if c not in taken[1]]


def _left_over(
    pairs: Couples, first: list[int], second: list[int], baseline: Stream, candidate: Stream
) -> Couples:
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
