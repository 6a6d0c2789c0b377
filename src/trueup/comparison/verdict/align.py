"""Which baseline call is which candidate call, within one rank and each of its steps.

First, scopes get one name on both sides: by what the user says (`mapping`), then by what they execute (`renamed`). Calls are put
in buckets of the same step, phase, level and scope. Where both sides of a bucket execute the same operators in the same order,
the n-th is the n-th (the exact key). Else the sequences are aligned so that the sum of similarities is largest: same operator,
slots and shapes required, then how close the data are. What is left on both sides is paired in any order if operator, shapes and
data are alike: autocast casts a weight before or after an input. Last, calls left anywhere are paired where their data are
bitwise the same. The rest is unmatched.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from trueup.comparison.graph.streams import NONE, WAYS, Alignment, Array, Numbers, Stream, distinct, numbered, same_slots, spans
from trueup.comparison.measures.thresholds import PRECISE, SINGLE_DIGITS
from trueup.foundation.facts.arguments import other_numbers
from trueup.foundation.facts.operators import having
from trueup.foundation.facts.slots import SINGLE, is_input, is_of_module
from trueup.foundation.frameworks.mapping import Mapping
from trueup.foundation.kernels.sketch import splitmix64

RUN = 4096
"""Pairs of calls whose data are compared at a time."""

FIRST = ("output.0", "grad_output.0")  # slots that every tool records of a forward and of a backward call


@dataclass(slots=True)
class _Side:
    """A sequence of calls and, call by call, the number of its kind; calls of one kind have the same slots."""

    calls: list[int]
    stream: Stream
    kind: Array
    slots: list[list[int]]  # of each call, its slots but for the non-tensor arguments


class Likeness:
    """Likeness of calls of two sequences, indices into their streams. ``ops``: by call of each side, its operator's number."""

    def __init__(self, first: list[int], second: list[int], baseline: Stream, candidate: Stream, ops: tuple[Array, Array]) -> None:
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

    def alike(self, least: float) -> Array:
        """Tell of the n-th calls of both sequences, which are equally long, whether they are of one kind and that close."""
        found = np.equal(*(side.kind for side in self._sides))
        at = np.flatnonzero(found)
        found[at] = self._pairwise(at, at) >= least
        return found

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
        (first, second), count = self._sides, len(i)
        b = [k for call in i.tolist() for k in first.slots[call]]
        c = [k for call in j.tolist() for k in second.slots[call]]
        slots = np.array([len(first.slots[call]) for call in i.tolist()], np.int64)
        told = first.stream.has_digest[b] & second.stream.has_digest[c]
        equal = np.asarray(told & (first.stream.digest[b] == second.stream.digest[c]), bool)
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
    return np.where(np.isfinite(relative), np.minimum(_closeness_at(relative), 0.99), 0.0)


def _closeness_at(relative: Array | float) -> Array:
    """Return on how much of the digits of float32 two tensors agree that are so far apart, from 0 to 1."""
    return np.clip(np.log(np.maximum(relative, SINGLE)) / math.log(SINGLE), 0, 1)


def _side(calls: list[int], stream: Stream, ops: Array, kinds: dict[object, int], *, mixed: bool) -> _Side:
    arguments = stream.names.number("arguments")
    slots = [[k for name, k in sorted(stream.slots(call).items()) if name != arguments] for call in calls]
    if mixed:  # another tool sees other slots of a call, but hardly another first result
        first = [stream.names.number(name) for name in FIRST]
        slots = [[k for k in its if stream.slot[k] in first] for its in slots]
    is_complex, own = stream.names.table(_is_complex), stream.names.table(is_of_module)
    slots = [[k for k in its if not own[stream.slot[k]]] for its in slots]
    found = [
        (int(ops[call]), *((int(stream.slot[k]), int(stream.shapes.exact[k]), bool(is_complex[stream.dtype[k]])) for k in its))
        for call, its in zip(calls, slots, strict=True)
    ]
    return _Side(calls, stream, np.array([kinds.setdefault(kind, len(kinds)) for kind in found], dtype=np.int64), slots)


MAX_CELLS = 4_000_000
"""Largest table of similarities; a longer pair of sequences is aligned window by window."""

WINDOW = 1000
"""Calls of each side in a window. Only the pairs of its first half are kept: the second half may depend on what follows."""

ALIKE = float(_closeness_at(SINGLE_DIGITS))  # closeness from which calls at the same place are a pair without a look at the rest
AKIN = float(_closeness_at(PRECISE))  # closeness from which left-over calls are a pair whatever their order
MANY = 2000
"""Scopes of a side beyond which only equal names are looked for: sequences are matched in quadratic time."""

Couples = list[tuple[int, int]]


def align(baseline: Stream, candidate: Stream, mapping: Mapping | None = None) -> Alignment:
    """Match the calls of two streams; what ``mapping`` says goes before anything that is found."""
    mapping, streams = mapping or Mapping(), (baseline, candidate)
    if mapping == Mapping() and baseline.is_like(candidate):
        # The n-th is the n-th: what all that follows finds where both sides hold the same calls in the same order.
        nth, none = np.arange(len(baseline)), np.empty(0, np.int64)
        return Alignment(nth, nth, none, none, np.zeros(len(nth), np.int8), {})
    keys = [(baseline.scope, baseline.matched_by), _told(candidate, mapping)]
    scopes, ops = [key[0] for key in keys], (keys[0][1], keys[1][1])
    told = (scopes[1] != candidate.scope) | (ops[1] != candidate.op)
    ops = ops[0], _of_one_path(streams, (scopes[0], scopes[1]), ops)
    scopes = _without_scopes(streams, scopes)
    # a map of two frameworks names all modules that both have: what is left is an activation here and a container there
    others = {} if baseline.mixed and mapping.modules else renamed(baseline, candidate, (scopes[0], scopes[1]), ops)
    moved = np.isin(scopes[1], list(others))
    scopes[1] = np.array([others.get(scope, scope) for scope in scopes[1].tolist()], np.int64) if others else scopes[1]
    kept = [_kept(stream, mapping) for stream in streams]
    calls = [np.flatnonzero(side) for side in kept]
    found = _by_bucket(streams, (scopes[0], scopes[1]), ops, calls)
    if not (baseline.mixed or baseline.imported or candidate.imported):
        found = _confirmed(found, streams, ops)
        found = _by_forward(found, streams, ops, _left(calls, found))
    by_data = _by_data(streams, ops, _left(calls, found))
    ways = np.where(moved[found[1]], WAYS.index("renamed"), np.where(told[found[1]], WAYS.index("map"), found[2]))
    found = np.concatenate([np.stack([found[0], found[1], ways]), by_data], axis=1)
    found = found[:, np.argsort(found[1], kind="stable")]
    alone = _left(calls, found)
    names = candidate.names.names
    ignored = sum(int(np.count_nonzero(~side)) for side in kept)
    renames = {names[c]: names[b] for c, b in others.items()}
    return Alignment(found[0], found[1], alone[0], alone[1], found[2].astype(np.int8), renames, ignored)


def _left(calls: list[Numbers], found: Numbers) -> list[Numbers]:
    return [np.setdiff1d(side, matched, assume_unique=True) for side, matched in zip(calls, found[:2], strict=True)]


def _told(stream: Stream, mapping: Mapping) -> tuple[Numbers, Numbers]:
    """Return the numbers of scopes and operators by which the candidate's calls are matched, as the user says."""
    scopes = stream.names.renamed(stream.scope, mapping.scope) if mapping.scopes or mapping.modules else stream.scope
    told = stream.names.renamed(stream.op, mapping.op) if mapping.ops else stream.op
    return scopes, np.where(told == stream.op, stream.matched_by, told)


def _of_one_path(streams: tuple[Stream, Stream], scopes: tuple[Numbers, Numbers], ops: tuple[Numbers, Numbers]) -> Numbers:
    """Return the candidate's operators; a module at the path of one of the baseline's has its class: it stands there now."""
    held = [(scope != stream.names.number("")) & (scope != NONE) for stream, scope in zip(streams, scopes, strict=True)]
    at = [stream.of_level("module") & named for stream, named in zip(streams, held, strict=True)]
    pairs = [np.unique(np.stack([scope[its], op[its]]), axis=1) for scope, op, its in zip(scopes, ops, at, strict=True)]
    single = [dict(pair.T[np.bincount(pair[0])[pair[0]] == 1].tolist()) for pair in pairs]  # a class a path
    other = {scope: op for scope, op in single[0].items() if single[1].get(scope, op) != op}
    found, there = ops[1].copy(), at[1] & np.isin(scopes[1], list(other))
    found[there] = [other[scope] for scope in scopes[1][there].tolist()]
    return found


def _kept(stream: Stream, mapping: Mapping) -> Array:
    """Tell which calls are compared."""
    kept, table = np.ones(len(stream), bool), stream.names.table
    for rule in mapping.ignored:
        at = table(rule.scope.fullmatch)[stream.scope].astype(bool) & table(rule.op.fullmatch)[stream.op].astype(bool)
        for name, numbers in ((rule.phase, stream.phase), (rule.level, stream.level)):
            at &= name is None or numbers == stream.names.number(name)
        kept &= ~at
    return kept


def _without_scopes(streams: tuple[Stream, Stream], scopes: list[Numbers]) -> list[Numbers]:
    """Return the scopes by which calls are matched: none at levels where an imported capture has none, on both sides. ptdbg and
    msprobe's L1 name functions alone, so such calls are matched by their order in the whole step. A dump that names scopes has
    none of a module that the model does not hold, as a loss that a forward makes."""
    if streams[0].imported == streams[1].imported:
        return scopes
    side = 0 if streams[0].imported else 1
    dump, other = streams[side], streams[1 - side]
    none = dump.names.number("")
    named = distinct(dump.level[scopes[side] != none])
    bare = ~np.isin(other.level, named) & np.isin(other.level, dump.level)
    found = list(scopes)
    module = other.names.number("module")
    held = other.scope[(other.level == module) & (other.scope != other.op)]
    loose = other.scope[(other.level == module) & (other.scope == other.op)]
    apart = np.isin(other.scope, loose) & ~np.isin(other.scope, np.r_[held, dump.scope])
    found[1 - side] = np.where(bare | apart, none, scopes[1 - side])
    return found


def _by_bucket(
    streams: tuple[Stream, Stream], scopes: tuple[Numbers, Numbers], ops: tuple[Numbers, Numbers], calls: list[Numbers]
) -> Numbers:
    """Match calls of the same step, phase, level and scope; return ``(3, n)``: baseline's, candidate's, how."""
    buckets = [_Buckets(calls, key) for calls, key in zip(calls, _places(streams, scopes, calls), strict=True)]
    shared = np.intersect1d(buckets[0].keys, buckets[1].keys, assume_unique=True)
    if not len(shared):
        return np.zeros((3, 0), np.int64)
    at = [np.searchsorted(b.keys, shared) for b in buckets]
    counts = [b.counts[k] for b, k in zip(buckets, at, strict=True)]
    even = counts[0] == counts[1]
    members = [b.order[spans(b.starts[k[even]], b.counts[k[even]])] for b, k in zip(buckets, at, strict=True)]
    bucket = np.repeat(np.flatnonzero(even), counts[0][even])
    same = _of_all(ops[0][members[0]] == ops[1][members[1]], bucket, len(shared)) & even
    fit = _of_all(_fit(members[0], members[1], *streams), bucket, len(shared)) & same
    exact = [m[fit[bucket]] for m in members]
    found: dict[str, Couples] = {"exact": [], "sequence": []}
    for k in np.flatnonzero(~fit):
        first, second = (b.members(int(n[k])) for b, n in zip(buckets, at, strict=True))
        if same[k]:
            found["exact"] += _reordered(first, second, streams, ops)
        else:
            found["sequence"] += _sequences(first, second, streams, ops)
    whole = [np.stack([*exact, np.zeros(len(exact[0]), np.int64)])]
    for way, pairs in found.items():
        couples = np.array(pairs, np.int64).reshape(-1, 2)
        whole.append(np.stack([*couples.T, np.full(len(couples), WAYS.index(way))]))
    return np.concatenate(whole, axis=1)


def _by_forward(found: Numbers, streams: tuple[Stream, Stream], ops: tuple[Numbers, Numbers], left: list[Numbers]) -> Numbers:
    """Match what goes backward and is left by its forward: the backward of a backward may run before other calls in one run and
    after them in the other, as devices order it."""
    partner = np.full(len(streams[0]) + 1, NONE, np.int64)
    partner[found[0]] = found[1]
    groups: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for side, (stream, calls) in enumerate(zip(streams, left, strict=True)):
        forward = stream.origin[calls]
        its = forward if side else partner[forward]
        at = np.flatnonzero((its != NONE) & stream.during("backward")[calls])
        for call, of in zip(calls[at].tolist(), its[at].tolist(), strict=True):
            groups.setdefault((of, int(stream.step[call]), int(stream.level[call])), ([], []))[side].append(call)
    couples = [pair for one, other in groups.values() if one and other for pair in _sequences(one, other, streams, ops)]
    pairs = np.array(couples, np.int64).reshape(-1, 2).T
    return np.concatenate([found, np.stack([*pairs, np.full(pairs.shape[1], WAYS.index("sequence"))])], axis=1)


def _by_data(streams: tuple[Stream, Stream], ops: tuple[Numbers, Numbers], left: list[Numbers]) -> Numbers:
    """Match what is left by equal data: calls of one operator whose slots have the same digests, and no other call does."""
    keys = [_data(stream, op, calls) for stream, op, calls in zip(streams, ops, left, strict=True)]
    chosen = []
    for key, known in keys:
        single, at, count = np.unique(key[known], return_index=True, return_counts=True)
        chosen.append((single[count == 1], np.flatnonzero(known)[at[count == 1]]))
    _, b, c = np.intersect1d(chosen[0][0], chosen[1][0], assume_unique=True, return_indices=True)
    pairs = [left[0][chosen[0][1][b]], left[1][chosen[1][1][c]]]
    return np.stack([*pairs, np.full(len(b), WAYS.index("data"))])


def _confirmed(found: Numbers, streams: tuple[Stream, Stream], ops: tuple[Numbers, Numbers]) -> Numbers:
    """Return the pairs that something beside their place makes counterparts: a wire (who makes what one reads, or reads what it
    makes, is a counterpart likewise), of a backward its forward, or data. What has none of it only looks like a counterpart: one
    operator may stand at two places of a formula that is written another way."""
    partner = np.full(len(streams[0]) + 1, NONE, np.int64)
    partner[found[0]] = found[1]
    pair = numbered(found[1], len(streams[1]))
    k, j, owner, rest = same_slots(found[0], found[1], *streams)
    made = [stream.producers[slots] for stream, slots in zip(streams, (k, j), strict=True)]
    read = streams[0].names.table(is_input)[streams[0].slot[k]] & (streams[0].dtype[k] >= 0)
    wire = read & (made[1] != NONE) & (partner[made[0]] == made[1]) & (made[1] != found[1][owner])
    confirmed = np.ones(found.shape[1], bool)
    confirmed[owner[read]] = False
    confirmed[owner[wire]] = confirmed[pair[made[1][wire]]] = confirmed[rest] = True
    of = [stream.origin[calls] for stream, calls in zip(streams, found[:2], strict=True)]
    known = (of[0] != NONE) & (of[1] != NONE)
    confirmed |= streams[1].of_level("module")[found[1]]  # a layer stands at one place
    is_read = np.zeros(found.shape[1], bool)  # where nothing is recorded to read a result, no wire can say more
    for stream, calls in zip(streams, found[:2], strict=True):
        confirmed |= stream.has_children[calls]
        is_read |= np.isin(calls, stream.producers)
    confirmed |= ~is_read | streams[0].names.table(having("view"))[streams[1].op[found[1]]]
    confirmed[known] = partner[of[0][known]] == of[1][known]
    doubtful = np.flatnonzero(~confirmed & ~known)
    first, second = found[:2, doubtful].tolist()
    confirmed[doubtful] = Likeness(first, second, *streams, ops).alike(AKIN)
    return found if confirmed.all() else _confirmed(found[:, confirmed], streams, ops)


def _data(stream: Stream, ops: Numbers, calls: Numbers) -> tuple[Array, Array]:
    """Return a hash of the operator, shapes and data of each call, and whether there is data: some tensor of several elements."""
    slots = spans(stream.starts[calls], stream.starts[calls + 1] - stream.starts[calls])
    owner = np.repeat(np.arange(len(calls)), stream.starts[calls + 1] - stream.starts[calls])
    tensor = stream.dtype[slots] >= 0
    step, level, phase = (column[calls].astype(np.uint64) for column in (stream.step, stream.level, stream.phase))
    place = splitmix64(phase ^ splitmix64(level ^ splitmix64(step)))  # the same on both sides, however many names there are by now
    key = splitmix64(ops[calls].astype(np.uint64) ^ place)
    form = stream.slot[slots].astype(np.uint64) ^ splitmix64(stream.shapes.squeezed[slots].astype(np.uint64))
    data = splitmix64(stream.digest[slots] ^ splitmix64(form))
    np.add.at(key, owner[tensor], data[tensor])
    known = np.bincount(owner[tensor & (stream.numel[slots] > 1)], minlength=len(calls)) > 0
    known[owner[tensor & ~stream.has_digest[slots]]] = False
    return key, known


def _places(streams: tuple[Stream, Stream], scopes: tuple[Numbers, Numbers], calls: list[Numbers]) -> list[Numbers]:
    """Return a number for the step, phase, level and scope of each call, the same on both sides."""
    keys = [np.zeros(len(side), np.int64) for side in calls]
    for name in ("step", "phase", "level"):
        columns = [getattr(stream, name)[side] for stream, side in zip(streams, calls, strict=True)]
        known = distinct(np.concatenate(columns))
        keys = [key * len(known) + np.searchsorted(known, column) for key, column in zip(keys, columns, strict=True)]
    size = len(streams[0].names.names) + 1
    return [key * size + scope[side] for key, scope, side in zip(keys, scopes, calls, strict=True)]


class _Buckets:
    """Calls by a key: those of ``keys[k]`` are ``order[starts[k]:][:counts[k]]``."""

    def __init__(self, calls: Numbers, key: Numbers) -> None:
        order = np.argsort(key, kind="stable")
        self.order = calls[order]
        self.keys, self.starts, self.counts = np.unique(key[order], return_index=True, return_counts=True)

    def members(self, k: int) -> list[int]:
        start = int(self.starts[k])
        return list(self.order[start : start + int(self.counts[k])].tolist())


def _of_all(true: Array, bucket: Numbers, buckets: int) -> Array:
    """Return, by bucket, whether all of its calls are true."""
    return np.asarray(np.bincount(bucket[~true], minlength=buckets) == 0)


def _fit(b: Numbers, c: Numbers, baseline: Stream, candidate: Stream) -> Array:
    """Tell which pairs of calls have the same shapes in the slots that both have; sizes of one do not count."""
    k, j, owner, rest = same_slots(b, c, baseline, candidate)
    fits, is_complex = np.ones(len(b), bool), baseline.names.table(_is_complex)
    differ = baseline.shapes.squeezed[k] != candidate.shapes.squeezed[j]
    fits[owner[differ | (is_complex[baseline.dtype[k]] != is_complex[candidate.dtype[j]])]] = False
    for n in rest:
        first, second = baseline.slots(int(b[n])), candidate.slots(int(c[n]))
        shared = ((i, second[slot]) for slot, i in first.items() if slot in second)
        fits[n] = all(baseline.shapes.squeezed[i] == candidate.shapes.squeezed[m] for i, m in shared)
    return fits


def _is_complex(dtype: str) -> bool:
    """Tell of a dtype whether its numbers are pairs of real ones: none of them is a counterpart of a real one."""
    return dtype.startswith("complex")


def _sequences(first: list[int], second: list[int], streams: tuple[Stream, Stream], ops: tuple[Numbers, Numbers]) -> Couples:
    """Pair two sequences in order; a pair of unlike data gives way where its calls are alike with others out of order."""
    likeness = Likeness(first, second, *streams, ops)
    ordered = _align_sequences(likeness, len(first), len(second))
    close = likeness.of(ordered) >= ALIKE
    found = [(first[i], second[j]) for i, j in ordered]
    alike = [pair for pair, so in zip(found, close.tolist(), strict=True) if so]
    alike += _left_over(alike, first, second, streams, ops)
    free = [set(side) for side in _unpaired(alike, first, second)]
    return alike + [pair for pair in found if pair[0] in free[0] and pair[1] in free[1]]


def _reordered(first: list[int], second: list[int], streams: tuple[Stream, Stream], ops: tuple[Numbers, Numbers]) -> Couples:
    """Pair the n-th with the n-th, but calls whose shapes differ with such as are alike, if any. The dispatcher's other operators
    stay without counterpart: the function around them speaks for them."""
    exact = list(zip(first, second, strict=True))
    fits = _fit(np.array(first), np.array(second), *streams).tolist()
    same = [pair for pair, fit in zip(exact, fits, strict=True) if fit]
    moved = _left_over(same, first, second, streams, ops)
    stream = streams[0]
    if stream.names.name(int(stream.level[first[0]])) == "aten" and same:
        return same + moved
    return same + moved + list(zip(*_unpaired(same + moved, first, second), strict=True))


def _unpaired(pairs: Couples, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
    taken = {b for b, _ in pairs}, {c for _, c in pairs}
    return [c for c in first if c not in taken[0]], [c for c in second if c not in taken[1]]


def _left_over(
    pairs: Couples, first: list[int], second: list[int], streams: tuple[Stream, Stream], ops: tuple[Numbers, Numbers]
) -> Couples:
    """Pair what no sequence holds: each call with the most alike one left, if any is; the most alike go first. A call with
    another number is another call: out of order, only its inputs and results tell which one it is."""
    rest = _unpaired(pairs, first, second)
    if not rest[0] or not rest[1] or len(rest[0]) * len(rest[1]) > MAX_CELLS:
        return []
    score = Likeness(rest[0], rest[1], *streams, ops).table(slice(0, len(rest[0])), slice(0, len(rest[1])))
    found = []
    for i in np.argsort(-score.max(axis=1), kind="stable").tolist():
        j = int(np.argmax(score[i]))
        pair = rest[0][i], rest[1][j]
        given, other = (stream.value(int(stream.arguments[call])) for stream, call in zip(streams, pair, strict=True))
        if score[i, j] >= 1 + 2 * AKIN and not other_numbers(given, other, SINGLE_DIGITS):
            found.append(pair)
            score[:, j] = 0
    return found


def _align_sequences(likeness: Likeness, n: int, m: int) -> Couples:
    """Pair the calls of two sequences, in time and memory bounded by `MAX_CELLS` and their length."""
    i = j = 0
    pairs: Couples = []
    tail = likeness.same(n - 1, m - 1, -1, min(n, m), ALIKE)
    end, last = n - tail, m - tail
    while i < end and j < last:
        run = likeness.same(i, j, 1, min(end - i, last - j), ALIKE)
        pairs += [(i + k, j + k) for k in range(run)]
        i, j = i + run, j + run
        whole = (end - i) * (last - j) <= MAX_CELLS
        high, wide = (end - i, last - j) if whole else (min(WINDOW, end - i), min(WINDOW, last - j))
        found = [(i + a, j + b) for a, b in best_pairs(likeness.table(slice(i, i + high), slice(j, j + wide)))]
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


def best_pairs(score: Array) -> Couples:
    """Return the ordered pairs whose scores (float64 ``(high, wide)``, not negative) add up to the most; 0 is never paired."""
    high, wide = score.shape
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
            pairs.append((a, b))
    return pairs[::-1]


def renamed(baseline: Stream, candidate: Stream, scopes: tuple[Numbers, Numbers], ops: tuple[Numbers, Numbers]) -> dict[int, int]:
    """Pair scopes that one side lacks: candidate's number -> baseline's. ``scopes`` and ``ops`` are, by call of each side, the
    numbers of the scope and operator by which it is matched. Two scopes are one when they execute the same operators on the same
    shapes, at the same place in the order of such scopes. What their names have in common then names those that are left:
    ``blocks.0`` is ``layers.0``, so ``blocks.1`` may be ``layers.1``."""
    if baseline.mixed:  # frameworks make other functions of a layer
        module = baseline.names.number("module")
        one, two = (np.where(s.level == module, side, NONE) for s, side in zip((baseline, candidate), scopes, strict=True))
        scopes = one, two
    held = [set(distinct(side[side != NONE]).tolist()) for side in scopes]
    alone = [np.array(sorted(one - other), np.int64) for one, other in (held, held[::-1])]
    if not all(0 < len(one) <= MANY for one in alone):
        return {}
    orders = [_executed(*side) for side in zip((baseline, candidate), scopes, ops, alone, strict=True)]
    first, second = ([key for _, key in order] for order in orders)
    found: dict[int, int] = {}
    for block in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        for n in range(block.size):
            found[orders[1][block.b + n][0]] = orders[0][block.a + n][0]
    return found | _by_name(baseline, found, [set(one.tolist()) for one in alone])


def _executed(stream: Stream, scopes: Numbers, ops: Numbers, wanted: Numbers) -> Couples:
    """Return ``(scope, what it executes)`` in order of execution."""
    slots = splitmix64(stream.shapes.squeezed ^ splitmix64(stream.slot.astype(np.uint64)))
    kind = _summed(slots, stream.call, len(stream))
    for numbers in (stream.phase, stream.level, ops):
        kind = splitmix64(kind ^ splitmix64(numbers.astype(np.uint64)))
    at = np.flatnonzero(np.isin(scopes, wanted))
    which = np.searchsorted(wanted, scopes[at])
    keys = _summed(kind[at], which, len(wanted))
    order = dict.fromkeys(which.tolist())
    return [(int(wanted[n]), int(keys[n])) for n in order]


def _summed(values: Array, of: Numbers, count: int) -> Array:
    found = np.zeros(count, np.uint64)
    np.add.at(found, of, values)
    return found


def _by_name(stream: Stream, found: dict[int, int], alone: list[set[int]]) -> dict[int, int]:
    """Apply the most frequent change of a name's beginning to the scopes that are left."""
    names = stream.names
    left = alone[0] - set(found.values()), alone[1] - set(found)
    changes = Counter(_change(names.names[c], names.names[b]) for c, b in found.items())
    more: dict[int, int] = {}
    for (before, after), _ in changes.most_common():
        for number in sorted(left[1] - set(more)):
            name = names.names[number]
            if name == before or name.startswith(f"{before}."):
                other = names.number(after + name[len(before) :])
                if other in left[0] - set(more.values()):
                    more[number] = other
    return more


def _change(candidate: str, baseline: str) -> tuple[str, str]:
    """Return what is left of two names without the end that they share: ``a`` and ``b`` of ``a.0.fc`` and ``b.0.fc``."""
    first, second = candidate.split("."), baseline.split(".")
    while len(first) > 1 and len(second) > 1 and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return ".".join(first), ".".join(second)
