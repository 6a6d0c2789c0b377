"""One rank and a step of a capture, or several small ones, in columns: an entry per call, an entry per slot, names as numbers.

Both sides of a comparison number names with the same `Vocabulary`, so that calls are matched, measured and judged by array
operations. A `Row` is a call as an object, made for the few that somebody looks at.

Which calls and slots of two runs are one another's counterparts, as data: what `align` finds and `measure` reads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.foundation.model import NUMBERS, CallKey, TensorStats
from trueup.foundation.store.ahead import Read as Read
from trueup.foundation.store.columns import NONE as NONE
from trueup.foundation.store.columns import Array as Array
from trueup.foundation.store.columns import Numbers as Numbers
from trueup.foundation.store.columns import Shapes, counts, digests, floats, integers
from trueup.foundation.store.reader import WRITTEN
from trueup.foundation.store.sketches import Column, Sketches

Located = tuple[str, str, "tuple[int, ...] | None"]
"""Where a slot's payload lies: segment, key, and which part of that tensor it is."""
FOREIGN = ("foreign_checksum", "foreign_statistics")
"""Columns of imported captures that are compared."""


@lru_cache(maxsize=4096)
def decoded(arguments: str | None) -> dict[str, Any]:
    """Return a call's non-tensor arguments by name, to be left as they are; nothing where the text is none."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def is_input(slot: str) -> bool:
    """Tell whether a slot is read by its call."""
    return slot.startswith(("input.", "param.", "grad_output.", "gradient."))


def is_output(slot: str) -> bool:
    """Tell whether a slot is computed by its call."""
    return slot.startswith(("output.", "grad_input.", "grad_param."))


def is_weight(slot: str) -> bool:
    """Tell whether a slot is a parameter of a module."""
    return slot.startswith("param.")


SPREAD = 4
"""Seqs between the first and the last call, for each call there is, up to which a table finds calls faster than a search."""


class Vocabulary:
    """Numbers for names: the same in all streams of a comparison."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._tables: dict[Callable[[str], Any], Array] = {}
        self._lock = Lock()

    def number(self, name: str) -> int:
        """Return the number of a name, a new one if need be."""
        found = self._numbers.get(name)
        if found is None:
            with self._lock:  # names are asked for by several threads
                found = self._numbers.get(name)
                if found is None:
                    self.names.append(name)
                    found = self._numbers[name] = len(self.names) - 1
        return found

    def numbers(self, column: pa.ChunkedArray, at: Numbers | None = None) -> Numbers:
        """Return int64 ``(n,)`` for all rows or those wanted, `NONE` for null."""
        if column.null_count == len(column):
            return np.full(len(column) if at is None else len(at), NONE, np.int64)
        encoded = column.unify_dictionaries() if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        known = np.array([self.number(name) for name in encoded.chunk(0).dictionary.to_pylist()] or [NONE], np.int64)
        places = [chunk.indices.fill_null(NONE).to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
        indices = np.concatenate(places) if at is None else np.concatenate(places)[at]
        return np.where(indices >= 0, known[indices], NONE)

    def name(self, number: int) -> str | None:
        """Return the name of a number."""
        return None if number < 0 else self.names[number]

    def table(self, of: Callable[[str], Any]) -> Array:
        """Return what a function says of each name, by number; of `NONE`, the last entry, what it says of an empty name."""
        known = self._tables.get(of)
        if known is None or len(known) <= len(self.names):
            before = [] if known is None else known[:-1].tolist()
            known = self._tables[of] = np.array([*before, *map(of, self.names[len(before) :]), of("")])
        return known


@dataclass(slots=True)
class Row:
    """A call; ``slots`` maps slot name to its index in the stream's arrays."""

    rank: int
    step: int
    seq: int
    parent: int | None
    phase: str
    level: str
    scope: str
    op: str
    ordinal: int
    forward_seq: int | None
    site: int | None
    slots: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> CallKey:
        """The call's name."""
        return CallKey(self.rank, self.step, self.phase, self.level, self.scope, self.op, self.ordinal)


_PLACE = ("payload_segment", "payload_key", "payload_view")
NEEDED = (
    "rank", "step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "forward_seq", "site", "slot", "dtype", "shape",
    "numel", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_saturated", "digest", "value", "producer_seq", "producer_slot",
    "payload_segment",
)  # fmt: skip
"""Columns that every comparison reads."""


_CALLS = ("seq", "step")
_COUNTS = ("n_nan", "n_posinf", "n_neginf")
SHARED = (
    *_CALLS, *_COUNTS, "n_saturated", "parent", "phase", "level", "scope", "op", "ordinal", "forward_seq", "site", "slot", "dtype",
    "shape", "numel", "value", "producer_seq", "producer_slot", "payload_segment",
)  # fmt: skip
"""Columns that two runs of one structure hold alike."""
_STRUCTURE = ("starts", "step", "phase", "level", "scope", "op", "slot", "shapes")


class Stream:
    """Calls sorted by ``seq``, and their slots: call ``i`` has the slots ``starts[i]`` to ``starts[i + 1]``.

    Args:
        read: gives columns of the records; the sketches and what only findings show are read when they are asked for.
        names: the numbers of names.
        values: the numbers of non-tensor arguments.
        imported: whether the records are of another tool's dump, which has columns of its own.
        translated: whether they are in neutral terms (`normalise.translated`), because the other side is of another framework.
        like: another stream with the same vocabularies. What both hold alike is taken from it and is the same object, so that two
            runs of one structure, as nearly all are, are read once and known to be so at a glance.
        sketches: gives those that are read part by part, None where they are a column like the others.
    """

    def __init__(
        self, read: Read, names: Vocabulary, values: Vocabulary, *, imported: bool = False, translated: bool = False,
        like: Stream | None = None, sketches: Callable[[], Sketches | None] | None = None,
    ) -> None:
        table = read(NEEDED)
        self._sketches = sketches
        self.imported = imported
        self.read, self.names, self.values, self._table = read, names, values, table
        alike = _alike(table, like._table) if like is not None else frozenset()

        def taken(attribute: str, of: Sequence[str], make: Callable[[], Any]) -> Any:
            return getattr(like, attribute) if alike.issuperset(of) else make()

        self.starts: Numbers = taken("starts", _CALLS, lambda: _starts(table))
        firsts = self.starts[:-1]
        self.call: Numbers = taken("call", _CALLS, lambda: np.repeat(np.arange(len(firsts)), np.diff(self.starts)))
        """Call of each slot."""
        self.rank = int(table["rank"][0].as_py()) if len(firsts) else 0

        def of_calls(name: str, numbers: Callable[[pa.ChunkedArray, Numbers], Numbers]) -> Numbers:
            found: Numbers = taken(name, (*_CALLS, name), lambda: numbers(table[name], firsts))
            return found

        self.seq, self.step, self.parent, self.ordinal, self.forward_seq, self.site = (
            of_calls(name, integers) for name in ("seq", "step", "parent", "ordinal", "forward_seq", "site")
        )
        self.phase, self.level, self.scope, self.op = (of_calls(name, names.numbers) for name in ("phase", "level", "scope", "op"))
        self.slot: Numbers = taken("slot", ("slot",), lambda: names.numbers(table["slot"]))
        self.dtype: Numbers = taken("dtype", ("dtype",), lambda: names.numbers(table["dtype"]))
        self.producer_slot: Numbers = taken("producer_slot", ("producer_slot",), lambda: names.numbers(table["producer_slot"]))
        self.producer: Numbers = taken("producer", ("producer_seq",), lambda: integers(table["producer_seq"]))
        """``seq`` of the call that last wrote the storage of a slot."""
        self.numel: Array = taken("numel", ("numel",), lambda: counts(table["numel"]))
        self.mean, self.l2 = floats(table["mean"]), floats(table["l2"])
        self.counts: Array = taken("counts", _COUNTS, lambda: np.stack([counts(table[name]) for name in _COUNTS], axis=1))
        """float64 ``(slots, 3)``: how many elements are NaN, Inf, -Inf; NaN where no statistics were recorded."""
        self.saturated: Array = taken("saturated", ("n_saturated",), lambda: counts(table["n_saturated"]))
        """How many elements are the dtype's largest number, float64; NaN where that was not recorded."""
        self.digest, self.has_digest = digests(table["digest"])
        self.shapes: Shapes = taken("shapes", ("shape",), lambda: Shapes(table["shape"]))
        self.has_payload: Array = taken("has_payload", ("payload_segment",), lambda: table["payload_segment"].is_valid().to_numpy())
        self.stands_for: dict[int, Counter[str]] = {}
        """By step, the operators that one call stands for in place of an optimizer's (`normalise.kernels`)."""
        self.translated = translated
        """Whether slots have neutral names and layouts, for the other side's are others."""
        neutral = names.numbers(self._again(["neutral"])["neutral"])[firsts] if translated else np.full(0, NONE)
        self.neutral: Numbers | None = neutral if (neutral >= 0).any() else None
        """Number of the name by which each call is matched, where that is not its operator's."""
        self.arguments: Numbers = taken("arguments", (*_CALLS, "slot", "value"), self._arguments)
        """Number of each call's non-tensor arguments."""

    def __len__(self) -> int:
        return len(self.seq)

    def _arguments(self) -> Numbers:
        found = np.full(len(self.seq), NONE, np.int64)
        given = np.flatnonzero(self.slot == self.names.number("arguments"))
        found[self.call[given]] = self.values.numbers(self._table["value"].take(pa.array(given)))
        return found

    def is_like(self, other: Stream) -> bool:
        """Whether both hold the same calls in the same order, with slots of the same names and shapes."""
        return all(getattr(self, name) is getattr(other, name) for name in _STRUCTURE)

    @property
    def mixed(self) -> bool:
        """Whether the other side's records are of another framework."""
        return self.neutral is not None

    @cached_property
    def measured(self) -> Array:
        """Whether statistics of each slot were recorded."""
        nan, above, below = self.counts.T
        return np.asarray(~np.isnan(nan + above + below))

    @cached_property
    def steps(self) -> Numbers:
        """The steps that it holds, in order."""
        return np.unique(self.step)

    @property
    def is_ordered(self) -> bool:
        """Whether a ``seq`` names one call, in whatever step: a process counts on, but not every dump does."""
        return bool(np.all(self.seq[1:] > self.seq[:-1]))

    @cached_property
    def sketch(self) -> Sketches:
        """Of each slot; read when it is asked for."""
        in_parts = None if self._sketches is None else self._sketches()
        return Sketches(Column(self._again(["sketch"])["sketch"])) if in_parts is None else in_parts

    @cached_property
    def foreign(self) -> dict[str, list[str | None]]:
        """`FOREIGN` of every slot: another tool's checksum as ``algorithm:value``, and its statistics where they mean no column."""
        if not self.imported:
            return {name: [None] * len(self.slot) for name in FOREIGN}
        found = self._again(FOREIGN)
        return {name: [text if isinstance(text, str) else None for text in found[name].to_pylist()] for name in FOREIGN}

    @cached_property
    def producers(self) -> Numbers:
        """Call that last wrote the storage of each slot, `NONE` where there is none here; of whatever step."""
        return self.index(self.producer)

    @cached_property
    def invocations(self) -> pa.ChunkedArray:
        """How each call was made, in the row of its arguments; nulls but at detail ``tensor``."""
        return self._again(["invocation"])["invocation"]

    @cached_property
    def details(self) -> pa.Table:
        """What findings show, and where payload lies."""
        return self._again([*NUMBERS, *_PLACE, "value", "digest"])

    def _again(self, columns: Sequence[str]) -> pa.Table:
        """Read more columns; nulls where the records are not what they were, for a part of them was damaged since."""
        found = self.read(columns)
        if len(found) == len(self.slot):
            return found
        return pa.table({name: pa.nulls(len(self.slot), found[name].type) for name in columns})

    @cached_property
    def parents(self) -> Numbers:
        """Index of the call around each call, `NONE` for those that have none here: a call comes before what runs inside it."""
        found = self.index(self.parent)
        return np.where((found < np.arange(len(found))) & (self.step[found] == self.step), found, NONE)

    @cached_property
    def has_children(self) -> Array:
        """Whether each call has others inside."""
        found = np.zeros(len(self.seq) + 1, bool)
        found[self.parents] = True
        return found[:-1]

    @cached_property
    def ready(self) -> Numbers:
        """When each slot was there, int64 ``(slots,)``: larger numbers are later, and no number is before the call began.

        A record is written when its tensor is there, so that the order of the rows tells what a call had at hand that began first
        and went on while others ran: a backward that recomputes its forward. What a call returns is there when all inside it is.
        """
        written = self._again([WRITTEN])[WRITTEN]
        found = np.arange(len(self.slot)) if written.null_count else integers(written)
        found = found - found.min(initial=0)
        last = np.full(len(self) + 1, NONE, np.int64)
        np.maximum.at(last, self.call, found)
        for call in np.flatnonzero(self.parents != NONE)[::-1].tolist():  # what runs inside a call comes after it
            last[self.parents[call]] = max(last[self.parents[call]], last[call])
        returned = self.names.table(is_output)[self.slot] & self.has_children[self.call]
        return np.where(returned, last[self.call], found)

    @cached_property
    def began(self) -> Numbers:
        """When each call recorded its first slot, int64 ``(calls,)`` on the scale of `ready`."""
        found = np.full(len(self), len(self.slot), np.int64)
        np.minimum.at(found, self.call, self.ready)
        return found

    @cached_property
    def saved(self) -> Numbers:
        """Call whose tensors each backward call reads: its forward call, or what recomputed that last; `NONE` of other calls."""
        of = self.index(self.forward_seq)
        latest = np.arange(len(self) + 1)
        latest[-1] = NONE
        again = np.flatnonzero(self.during("recompute") & (of != NONE))
        latest[of[again]] = again
        backward = self.during("backward") & (self.forward_seq != NONE)
        found = np.where(backward, latest[of], NONE)
        return np.where(self.step[found] == self.step, found, NONE)

    @cached_property
    def children(self) -> tuple[Numbers, Numbers]:
        """Calls in the order of their parents, and those parents."""
        order = np.argsort(self.parents, kind="stable")
        return order, self.parents[order]

    def around(self, call: int) -> Iterator[int]:
        """Yield the calls around a call, innermost first."""
        while call >= 0 and (call := int(self.parents[call])) >= 0:
            yield call

    def during(self, *phases: str) -> Array:
        """Tell which calls are of some phases."""
        return np.isin(self.phase, [self.names.number(phase) for phase in phases])

    def of_level(self, *levels: str) -> Array:
        """Tell which calls are of some levels."""
        return np.isin(self.level, [self.names.number(level) for level in levels])

    def inside(self, call: int) -> Numbers:
        """Return the calls directly inside a call, in order."""
        order, parents = self.children
        return order[slice(*np.searchsorted(parents, [call, call + 1]))]

    def index(self, seq: Numbers) -> Numbers:
        """Return the calls of these seqs, `NONE` where there is no such call."""
        if not len(self.seq):
            return np.full(len(seq), NONE, np.int64)
        if self._by_seq is not None:
            from_first = (seq - self.seq[0]).view(np.uint64)  # what comes before the first is beyond the last
            return np.asarray(self._by_seq[np.minimum(from_first, np.uint64(len(self._by_seq) - 1))])
        at = np.minimum(np.searchsorted(self.seq, seq), len(self.seq) - 1)
        return np.where(self.seq[at] == seq, at, NONE)

    @cached_property
    def _by_seq(self) -> Numbers | None:
        """Calls by their seq from the first on, and `NONE`; None where seqs are so far apart that a table would be too large."""
        span = int(self.seq[-1]) - int(self.seq[0]) + 1
        return numbered(self.seq - self.seq[0], span) if self.is_ordered and span <= SPREAD * len(self.seq) else None

    def find(self, seq: int | None) -> int:
        """Return the call of a seq, `NONE` where there is none."""
        return NONE if seq is None else int(self.index(np.array([seq]))[0])

    def slots(self, call: int) -> dict[int, int]:
        """Return the slots of a call: number of the name -> index."""
        start, stop = self.starts[call : call + 2].tolist()
        return dict(zip(self.slot[start:stop].tolist(), range(start, stop), strict=True))

    def row(self, call: int) -> Row:
        """Return a call as an object."""
        name, optional = self.names.name, _optional
        phase, level, scope, op = (name(int(c[call])) or "" for c in (self.phase, self.level, self.scope, self.op))
        return Row(
            self.rank, int(self.step[call]), int(self.seq[call]), optional(self.parent[call]), phase, level, scope, op,
            int(self.ordinal[call]), optional(self.forward_seq[call]), optional(self.site[call]),
            {self.names.names[slot]: k for slot, k in self.slots(call).items()},
        )  # fmt: skip

    def dtype_of(self, k: int) -> str | None:
        """Return the dtype of slot ``k``."""
        return self.names.name(int(self.dtype[k]))

    def producer_of(self, k: int) -> int | None:
        """Return the seq of the call that last wrote the storage of slot ``k``."""
        return _optional(self.producer[k])

    def value(self, number: int) -> str | None:
        """Return non-tensor arguments by their number."""
        return self.values.name(number)

    def given(self, call: int) -> dict[str, Any]:
        """Return the non-tensor arguments of a call by name."""
        return decoded(self.value(int(self.arguments[call])))

    def number(self, name: str) -> Array:
        """Return one of `NUMBERS` of every slot as float64, NaN where it was not recorded."""
        return (counts if name.startswith("n_") else floats)(self.details[name])

    def places(self, slots: Numbers) -> list[Located]:
        """Return where the payload of slots lies that have one."""
        columns = (self.details[name].take(pa.array(slots)).to_pylist() for name in _PLACE)
        return [(s or "", k or "", None if view is None else tuple(view)) for s, k, view in zip(*columns, strict=True)]

    def stats(self, k: int) -> TensorStats | str | None:
        """Return what is known of slot ``k``."""
        value, digest = (self.details[name][k].as_py() for name in ("value", "digest"))
        if value is not None and self.names.name(int(self.slot[k])) == "arguments":
            return str(value)
        found = {name: self.details[name][k].as_py() for name in NUMBERS}
        if found["n_nan"] is None or np.isnan(self.numel[k]):
            return None
        missing = {name: 0 if name.startswith("n_") else float("nan") for name in NUMBERS}
        numbers: dict[str, Any] = missing | {name: value for name, value in found.items() if value is not None}
        return TensorStats(numel=int(self.numel[k]), digest=digest, **numbers)


def _alike(table: pa.Table, other: pa.Table) -> frozenset[str]:
    """Return the columns of which two tables hold the same rows."""
    return frozenset(name for name in SHARED if table[name].equals(other[name]))


def _starts(table: pa.Table) -> Numbers:
    """Return where each call's slots begin, and the end."""
    seq, step = integers(table["seq"]), integers(table["step"])
    if not len(seq):
        return np.zeros(1, np.int64)
    return np.asarray(np.r_[0, 1 + np.flatnonzero((seq[1:] != seq[:-1]) | (step[1:] != step[:-1])), len(seq)])


def other_counts(streams: tuple[Stream, Stream], slots: tuple[Numbers, Numbers]) -> Array:
    """Tell which slots have other counts of NaN and Inf on the two sides, or none on one."""
    first, second = streams
    if first.counts is second.counts and slots[0] is slots[1]:
        return ~first.measured[slots[0]]
    differ = first.counts[slots[0]] != second.counts[slots[1]]
    return np.asarray(differ[:, 0] | differ[:, 1] | differ[:, 2])  # a reduction over so short an axis takes ten times as long


def spans(starts: Numbers, counts: Numbers) -> Numbers:
    """Return the numbers of ranges, one after the other: ``[5, 6, 9]`` for starts ``[5, 9]`` and counts ``[2, 1]``."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts - starts, counts)


def numbered(calls: Numbers, count: int) -> Numbers:
    """Return, for each of ``count`` calls, its place among some of them, `NONE` where it has none; one more entry, for `NONE`."""
    found = np.full(count + 1, NONE, np.int64)
    found[calls] = np.arange(len(calls))
    return found


def _optional(number: Any) -> int | None:
    return None if number < 0 else int(number)


WAYS = ("exact", "sequence", "renamed", "map", "data")
"""How a pair was made: by its key, by aligning sequences, in a scope that was found or told to be another, by equal data."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Matched calls, in the candidate's execution order, and what has no partner: indices into the streams."""

    baseline: Numbers
    candidate: Numbers
    only_baseline: Numbers
    only_candidate: Numbers
    paired: Array
    """Of each pair, how it was made: index into `WAYS`."""
    scopes: dict[str, str]
    """Scopes of the candidate that have another name in the baseline, as far as that was found and not told."""
    ignored: int = 0
    """Calls of both sides that are not to be compared."""


def same_slots(b: Numbers, c: Numbers, baseline: Stream, candidate: Stream) -> tuple[Numbers, Numbers, Numbers, list[int]]:
    """Pair the slots of pairs of calls whose slots have the same names in the same order.

    Returns:
        baseline's and candidate's slots, the number of the pair that each belongs to, and the pairs of other names or order.
    """
    if b is c and baseline.is_like(candidate) and len(b) == len(baseline):  # `_one_to_one`
        slots = np.arange(len(baseline.slot))
        return slots, slots, baseline.call, []
    counts = baseline.starts[b + 1] - baseline.starts[b]
    even = counts == candidate.starts[c + 1] - candidate.starts[c]
    k, j = spans(baseline.starts[b[even]], counts[even]), spans(candidate.starts[c[even]], counts[even])
    owner = np.repeat(np.flatnonzero(even), counts[even])
    differ = np.unique(owner[baseline.slot[k] != candidate.slot[j]])
    odd = ~even
    odd[differ] = True
    kept = ~odd[owner]
    return k[kept], j[kept], owner[kept], np.flatnonzero(odd).tolist()
