"""One rank and a step of a capture, or several small ones, in columns: an entry per call, an entry per slot, names as numbers.

Both sides number names with the same `Vocabulary`, so array operations match, measure and judge calls. What both hold alike is
read once. A `Row` is a call as an object, and a tensor is read, only for the few that somebody looks at.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.slots import is_output
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.kernels import Pair, hexadecimal, pair
from trueup.foundation.kernels.sketch import splitmix64
from trueup.foundation.model import NUMBERS, CallKey, TensorStats, TrueupError
from trueup.foundation.store.columns import (
    NONE,
    Array,
    Numbers,
    Shapes,
    Vocabulary,
    alike_in,
    counts,
    digests,
    distinct,
    floats,
    integers,
    numbered,
)
from trueup.foundation.store.durable import side_by_side
from trueup.foundation.store.read_ahead import Column, Read, Sketches
from trueup.foundation.store.reader import Capture

Located = tuple[str, str, "tuple[int, ...] | None"]
"""Where a slot's payload lies: segment, key, and which part of that tensor it is."""

Payload = Callable[[Located, "int | None"], Array | None]
"""Returns the tensor that a record names, None where it is lost: also where it has not the digest that the record has."""

Wanted = tuple[tuple[Located, "int | None"], ...]  # where a tensor of each side lies, with its digest

PASSED_ON = 4
"""Calls in a row that hand a tensor on as it is, as the gradients of `contiguous` and `to` do."""

HEAPS = 32
"""Tasks that pairs of tensors are measured in, several at a time."""

FOREIGN = ("foreign_checksum", "foreign_statistics")  # columns of imported captures that are compared

_PLACE = ("payload_segment", "payload_key", "payload_view")
NEEDED = (
    "rank", "step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "forward_seq", "site", "slot", "dtype", "shape",
    "numel", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_saturated", "digest", "value", "producer_seq", "producer_slot",
    "payload_segment",
)  # fmt: skip
"""Columns that every comparison reads."""

SPREAD = 4
"""Seqs between the first and the last call, for each call there is, up to which a table finds calls faster than a search."""

_CALLS = ("seq", "step")
_COUNTS = ("n_nan", "n_posinf", "n_neginf")
SHARED = (
    *_CALLS, *_COUNTS, "n_saturated", "parent", "phase", "level", "scope", "op", "ordinal", "forward_seq", "site", "slot", "dtype",
    "shape", "numel", "value", "producer_seq", "producer_slot", "payload_segment",
)  # fmt: skip
"""Columns that two runs of one structure hold alike."""
_STRUCTURE = ("starts", "step", "phase", "level", "scope", "op", "slot", "shapes", "forward_seq")

MOST_TEXT = 1 << 20
MOST_STATE = 1 << 16
"""Characters of a description and bytes of a state that are read; the largest known state (of the CPU) has 5,056."""


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


class CallColumns:
    """Calls sorted by ``seq``, and their slots: call ``i`` has the slots ``starts[i]`` to ``starts[i + 1]``.

    ``read`` gives columns of the records; sketches, and what only findings show, are read when asked for. ``names`` and
    ``values`` number the names and non-tensor arguments. ``imported``: records of another tool's dump, which has its own columns.
    ``translated``: in neutral terms (`normalise.translated`), because the other side is of another framework. ``like``: a stream
    with the same vocabularies; what both hold alike is taken from it and is the same object, so runs of one structure, as nearly
    all are, are read once and known to be alike at a glance. ``sketches`` gives those that are read part by part, None where they
    are a column.
    """

    def __init__(
        self,
        read: Read,
        names: Vocabulary,
        values: Vocabulary,
        *,
        imported: bool = False,
        translated: bool = False,
        like: CallColumns | None = None,
        sketches: Callable[[], Sketches | None] | None = None,
    ) -> None:
        table = read(NEEDED)
        self._sketches = sketches
        self.imported = imported
        self.read, self.names, self.values, self._table = read, names, values, table
        alike = frozenset(name for name in SHARED if alike_in(name, table, like._table)) if like is not None else frozenset()

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
        self.translated = translated  # whether slots have neutral names and layouts, for the other side's are others
        neutral = names.numbers(self._again(["neutral"])["neutral"])[firsts] if translated else np.full(0, NONE)
        self.neutral: Numbers | None = neutral if (neutral >= 0).any() else None
        """Number of the name by which each call is matched, where that is not its operator's."""
        self.arguments: Numbers = taken("arguments", (*_CALLS, "slot", "value"), self._arguments)
        """Number of each call's non-tensor arguments."""
        self._name_views()

    def __len__(self) -> int:
        return len(self.seq)

    def _arguments(self) -> Numbers:
        found = np.full(len(self.seq), NONE, np.int64)
        given = np.flatnonzero(self.slot == self.names.number("arguments"))
        found[self.call[given]] = self.values.numbers(self._table["value"].take(pa.array(given)))
        return found

    def _name_views(self) -> None:
        """Name as producer of what a slot holds the call that returned these bytes. Of several views of one storage, as gradients
        of `torch.cat` are, and of calls that hand one on as it is, the storage remembers the last one alone."""
        made = self.names.table(is_output)[self.slot] & self.has_digest
        several = np.bincount(self.call[made], minlength=len(self.seq)) > 1
        if not several.any():
            return
        producer = self.index(self.producer)  # each slot's call, where it is of these steps
        known = (producer != NONE) & ~made & self.has_digest & (self.producer >= 0)
        read, outputs = np.flatnonzero(known), np.flatnonzero(made)
        alone = np.full(len(self.seq), NONE)  # what a call returns, where that is one slot
        alone[self.call[outputs]] = outputs
        alone[several] = NONE
        its = alone[self.call[read]]
        passed = (its != NONE) & (self.digest[its] == self.digest[read])
        through = np.full(len(self.seq), NONE)
        through[self.call[read[passed]]] = producer[read[passed]]
        makers = producer[read]
        for _ in range(PASSED_ON):
            makers = np.where(through[makers] != NONE, through[makers], makers)

        def held(calls: Numbers, slots: Numbers, name: Numbers | int = 0) -> Array:
            return np.asarray(self.digest[slots] ^ splitmix64((calls + (name << 32)).astype(np.uint64)))

        of_several = several[makers]
        read, makers, outputs = read[of_several], makers[of_several], outputs[several[self.call[outputs]]]
        returned = held(self.call[outputs], outputs)
        order = np.argsort(returned)
        wanted, returned = held(makers, read), returned[order]
        place = np.minimum(np.searchsorted(returned, wanted), len(order) - 1)
        at = outputs[order[place]]
        other = (returned[place] == wanted) & (self.shapes.exact[at] == self.shapes.exact[read])
        other &= (makers != producer[read]) | (self.slot[at] != self.producer_slot[read])
        read, makers, at = read[other], makers[other], at[other]
        asked = np.zeros(len(self.seq), bool)
        asked[producer[read]] = True
        its = np.flatnonzero(made & asked[self.call])
        said = np.isin(held(producer[read], read, self.producer_slot[read]), held(self.call[its], its, self.slot[its]))
        if not said.all():
            read, makers, at = read[~said], makers[~said], at[~said]
            self.producer, self.producer_slot = self.producer.copy(), self.producer_slot.copy()
            self.producer[read], self.producer_slot[read] = self.seq[makers], self.slot[at]

    def is_like(self, other: CallColumns) -> bool:
        """Whether both hold the same calls in the same order, each the backward of the same, with slots of the same names and
        shapes."""
        return all(getattr(self, name) is getattr(other, name) for name in _STRUCTURE)

    @cached_property
    def identity(self) -> Array:
        """What tells by which slots of this run hold the same numbers, uint64 ``(slots,)``: the digest, or where a device took
        statistics and no digest, a hash of these. 0 where nothing is known."""
        found = np.where(self.has_digest, self.digest, np.uint64(0))
        at = np.flatnonzero(~self.has_digest & self.measured & ~self.imported)
        numbers = np.ascontiguousarray(np.c_[self.sketch[at], self.l2[at], self.mean[at], self.numel[at]])
        words: Any = numbers.view(np.uint64) + np.arange(numbers.shape[1], dtype=np.uint64)
        found[at] = np.bitwise_xor.reduce(splitmix64(words), axis=1) | np.uint64(1)
        return np.asarray(found)

    @cached_property
    def is_identified(self) -> Array:
        """Whether `identity` is known of each slot."""
        return np.asarray(self.identity != 0)

    @cached_property
    def measured(self) -> Array:
        """Whether statistics of each slot were recorded."""
        nan, above, below = self.counts.T
        return np.asarray(~np.isnan(nan + above + below))

    @cached_property
    def steps(self) -> Numbers:
        """The steps that it holds, in order."""
        return distinct(self.step)

    @property
    def repeated(self) -> int:
        """A slot that begins its call a second time, else `NONE`. Later slots may: both factors of ``mul(x, x)`` have one
        gradient."""
        begins = self.starts[:-1][self.call]
        again = (self.slot == self.slot[begins]) & (np.arange(len(self.slot)) > begins)
        return int(np.argmax(again)) if again.any() else NONE

    @property
    def is_ordered(self) -> bool:
        """Whether a ``seq`` names one call, in whatever step: a process counts on, but not every dump does."""
        return bool(np.all(self.seq[1:] > self.seq[:-1]))

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
    def invocations(self) -> pa.ChunkedArray:
        """How each call was made, in the row of its arguments; nulls but at detail ``tensor``."""
        return self._again(["invocation"])["invocation"]

    @cached_property
    def details(self) -> pa.Table:
        """What findings show, and where payload lies."""
        return self._again([*NUMBERS, *_PLACE, "value", "digest"])

    @cached_property
    def _numbers(self) -> pa.Table:
        return self._again(NUMBERS)

    def _again(self, columns: Sequence[str]) -> pa.Table:
        """Read more columns; nulls where the records are not what they were, for a part of them was damaged since."""
        found = self.read(columns)
        if len(found) == len(self.slot):
            return found
        return pa.table({name: pa.nulls(len(self.slot), found[name].type) for name in columns})

    def slots(self, call: int) -> dict[int, int]:
        """Return the slots of a call: number of the name -> index."""
        start, stop = self.starts[call : call + 2].tolist()
        return dict(zip(self.slot[start:stop].tolist(), range(start, stop), strict=True))

    def dtype_of(self, k: int) -> str | None:
        """Return the dtype of slot ``k``."""
        return self.names.name(int(self.dtype[k]))

    def value(self, number: int) -> str | None:
        """Return non-tensor arguments by their number."""
        return self.values.name(number)

    def given(self, call: int) -> dict[str, Any]:
        """Return the non-tensor arguments of a call by name."""
        return decoded(self.value(int(self.arguments[call])))

    def number(self, name: str) -> Array:
        """Return one of `NUMBERS` of every slot as float64, NaN where it was not recorded."""
        return (counts if name.startswith("n_") else floats)(self._numbers[name])

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

    def row(self, call: int) -> Row:
        """Return a call as an object."""
        name, optional = self.names.name, _optional
        phase, level, scope, op = (name(int(c[call])) or "" for c in (self.phase, self.level, self.scope, self.op))
        return Row(
            self.rank, int(self.step[call]), int(self.seq[call]), optional(self.parent[call]), phase, level, scope, op,
            int(self.ordinal[call]), optional(self.forward_seq[call]), optional(self.site[call]),
            {self.names.names[slot]: k for slot, k in self.slots(call).items()},
        )  # fmt: skip

    def producer_of(self, k: int) -> int | None:
        """Return the seq of the call that last wrote the storage of slot ``k``."""
        return _optional(self.producer[k])


def _optional(number: Any) -> int | None:
    return None if number < 0 else int(number)


def _starts(table: pa.Table) -> Numbers:
    """Return where each call's slots begin, and the end."""
    seq, step = integers(table["seq"]), integers(table["step"])
    if not len(seq):
        return np.zeros(1, np.int64)
    return np.asarray(np.r_[0, 1 + np.flatnonzero((seq[1:] != seq[:-1]) | (step[1:] != step[:-1])), len(seq)])


def twice(capture: Capture, columns: CallColumns) -> Reason | None:
    """Return a slot that a call has twice, which no run records: some part of the records is there twice; or None."""
    if columns.imported or columns.translated or (slot := columns.repeated) == NONE:
        return None
    row = columns.row(int(columns.call[slot]))
    return Why.TWICE(capture.path.name, columns.names.name(int(columns.slot[slot])), row.key)


def read_payload(capture: Capture, rank: int, place: Located, expected: int | None) -> Array | None:
    """Return a tensor, None where it is lost: the capture then says so, and its sketch is measured instead."""
    segment, key, view = place
    try:
        return capture.payload(rank, segment, key, view, None if expected is None else hexadecimal(expected))
    except TrueupError as error:
        text = f"rank {rank}: {error}"
    if text not in capture.lost:
        capture.lost.append(text)
    return None


def compare_payloads(payloads: tuple[Payload, Payload], wanted: Sequence[Wanted]) -> dict[Wanted, Pair | None]:
    """Measure pairs of tensors, several at a time; None where one is lost, they differ in size, or a dtype holds no numbers."""
    heaps = [wanted[first::HEAPS] for first in range(min(HEAPS, len(wanted)))]  # a task for each pair would cost more than it does
    done = side_by_side(lambda heap: [(one, _pair(payloads, one)) for one in heap], heaps)
    return dict(one for heap in done for one in heap)


def _pair(payloads: tuple[Payload, Payload], wanted: Wanted) -> Pair | None:
    first, second = (payload(*one) for payload, one in zip(payloads, wanted, strict=True))
    if first is None or second is None or first.size != second.size:
        return None
    try:
        return pair(*((first, second) if first.shape == second.shape else (first.reshape(-1), second.reshape(-1))))
    except TypeError:  # a dtype that holds no numbers
        return None


def random_states(invocations: pa.ChunkedArray) -> Iterator[tuple[int, str, bytes]]:
    """Yield ``(row, device, state)``, in order."""
    import pyarrow.compute as pc  # here: it takes 0.1 s, for which a process that only records need not wait

    if not (pa.types.is_string(invocations.type) or pa.types.is_large_string(invocations.type)):
        return
    for k in np.flatnonzero(pc.fill_null(pc.match_substring(invocations, '"random"'), False).to_numpy()).tolist():
        yield from ((k, device, state) for device, state in _states_of(invocations[k].as_py()).items())


def _states_of(text: str) -> dict[str, bytes]:
    found = {}
    try:
        random = json.loads(text).get("random") if len(text) <= MOST_TEXT else None
        for device, state in random.items() if isinstance(random, dict) else ():
            if isinstance(state, str) and len(state) <= 2 * MOST_STATE:
                found[str(device)] = zlib.decompressobj().decompress(base64.b64decode(state, validate=True), MOST_STATE)
    except (ValueError, AttributeError, RecursionError, zlib.error):
        return {}
    return found


Known = dict[bytes, int]  # numbers of states: the same on both sides


@dataclass
class States:
    """The generators of one side, by device: the number of the state before each call, `NONE` where it is not known."""

    before: dict[str, Numbers] = field(default_factory=dict)
    described: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # calls whose making is known, in order


def states_of(columns: CallColumns, known: Known) -> States:
    """Read the states that a capture keeps; it keeps one where it is not what it was at the call before, anew in each step."""
    told: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for k, device, state in random_states(columns.invocations):
        told[device].append((int(columns.call[k]), known.setdefault(state, len(known))))
    found = States(described=distinct(columns.call[np.flatnonzero(columns.invocations.is_valid().to_numpy())]))
    found.before = {device: _carried(columns, places) for device, places in told.items()}
    return found


def _carried(columns: CallColumns, told: list[tuple[int, int]]) -> Numbers:
    """Return, by call, the state that was described last in its step."""
    calls, states = (np.array(side, np.int64) for side in zip(*told, strict=True))
    last = np.searchsorted(calls, np.arange(len(columns)), "right") - 1
    at = np.maximum(last, 0)
    return np.where((last >= 0) & (columns.step[calls[at]] == columns.step), states[at], NONE)
