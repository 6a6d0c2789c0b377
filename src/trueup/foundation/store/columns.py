"""Columns of records as arrays: counts, digests and shapes of slots, names as numbers, states of random generators; and what
records tell at a glance, gathered as they are read: calls, losses, where a GradScaler worked, and how its scale went.

A name has the same number in all captures of a comparison. A capture of detail ``tensor`` keeps states with how calls were made
(docs/format.md).
"""

from __future__ import annotations

import binascii
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.operators import named
from trueup.foundation.kernels.sketch import splitmix64
from trueup.foundation.words.anomaly_sentence import loss_scale

if TYPE_CHECKING:
    from trueup.foundation.store.reader import Capture

Array = np.ndarray[Any, Any]
Numbers = NDArray[np.int64]

NONE = -1  # number of what a record leaves out: a parent, a producer, a name


_PLACES = splitmix64(np.arange(64, dtype=np.uint64)) | np.uint64(1)
"""Odd factors by dimension: a shape is the sum of its sizes times these, modulo 2**64, multilinear hashing."""


class Shapes:
    """The shapes of slots; a shape is compared by hashes, with and without its sizes of one, which devices add at will."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        lists = pa.concat_arrays(lists.chunks) if isinstance(lists, pa.ChunkedArray) else lists
        self._offsets = lists.offsets.to_numpy().astype(np.int64)
        values = lists.values.fill_null(NONE) if lists.values.null_count else lists.values
        self._values = values.to_numpy(zero_copy_only=False).astype(np.int64)
        self.known = lists.is_valid().to_numpy(zero_copy_only=False)  # whether each slot has a shape
        self._sizes = np.diff(self._offsets)
        self.ndim = np.where(self.known, self._sizes, 0)

    @cached_property
    def exact(self) -> Array:
        """A number for each shape."""
        values, ends = self._flat()
        return self._hash(values, np.arange(len(values)) - np.repeat(ends[:-1], self._sizes), ends)

    @cached_property
    def squeezed(self) -> Array:
        """A number for each shape, whatever sizes of one it has."""
        values, ends = self._flat()
        kept = values != 1
        before = np.r_[0, np.cumsum(kept)]
        position = before[:-1] - np.repeat(before[ends[:-1]], self._sizes)
        return self._hash(values[kept], position[kept], before[ends])

    def _flat(self) -> tuple[Numbers, Numbers]:
        """Return the sizes of all shapes, one after the other, and where each shape begins among them, and the end."""
        return self._values[self._offsets[0] : self._offsets[-1]], self._offsets - self._offsets[0]

    def _hash(self, values: Numbers, positions: Numbers, ends: Numbers) -> Array:
        """Return a number for each slot, whose sizes end before ``ends[1:]``."""
        mixed = (values + 1).view(np.uint64) * _PLACES[np.minimum(positions, len(_PLACES) - 1)]
        total = np.r_[np.uint64(0), np.cumsum(mixed, dtype=np.uint64)]
        return np.where(self.known, total[ends[1:]] - total[ends[:-1]], np.uint64(1))

    def size(self, k: Array, dimension: int, missing: float) -> Array:
        """Return one size of each of these slots as float64, ``missing`` where there is no such dimension."""
        ndim = self.ndim[k]
        there = (ndim > dimension) if dimension >= 0 else (ndim >= -dimension)
        at = self._offsets[k] + (dimension if dimension >= 0 else ndim + dimension)
        return np.where(there, self._values[np.where(there, at, 0)] if len(self._values) else missing, missing).astype(np.float64)

    def __getitem__(self, k: int) -> tuple[int, ...] | None:
        return tuple(self._values[self._offsets[k] : self._offsets[k + 1]].tolist()) if self.known[k] else None


def integers(column: pa.ChunkedArray, at: Numbers | slice = slice(None)) -> Numbers:
    """Return int64 of all rows or those wanted, `NONE` for null."""
    return np.asarray((column.fill_null(NONE) if column.null_count else column).to_numpy()[at], dtype=np.int64)


def floats(column: pa.ChunkedArray) -> Array:
    """Return float64, NaN for null."""
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))


COUNTABLE = 2.0**53  # beyond this float64 holds no count, and no tensor has so many elements


def alike_in(name: str, first: pa.Table, second: pa.Table) -> bool:
    """Tell whether two tables hold the same in a column. Arrow takes NaN for unlike itself, and the same words in dictionaries of
    another order, as parts have that ended at other calls, for other words."""
    one, other = first[name], second[name]
    if one.equals(other):
        return True
    if len(one) != len(other) or one.type != other.type:
        return False
    if pa.types.is_floating(one.type):
        known = one.is_valid().equals(other.is_valid())
        return known and np.array_equal(one.to_numpy(), other.to_numpy(), equal_nan=True)
    if not pa.types.is_dictionary(one.type):
        return False
    words = pa.chunked_array([*one.chunks, *other.chunks], one.type).unify_dictionaries()
    numbers = pa.chunked_array([chunk.indices for chunk in words.chunks], one.type.index_type)
    return bool(numbers[: len(one)].equals(numbers[len(one) :]))


def counts(column: pa.ChunkedArray) -> Array:
    """Return counts as float64, NaN for null and for what counts nothing."""
    found = np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    wrong = (found < 0) | (found > COUNTABLE)
    return np.where(wrong, np.nan, found) if wrong.any() else found


_HEXADECIMAL = np.full(256, 255, np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEXADECIMAL[np.frombuffer(_digits, np.uint8)] = np.arange(16)


def digests(column: pa.ChunkedArray) -> tuple[NDArray[np.uint64], Array]:
    """Return digests as numbers, and which are there: what has not 16 hexadecimal digits is none."""
    found, there = np.zeros(len(column), np.uint64), np.zeros(len(column), bool)
    edges = np.cumsum([0, *map(len, column.chunks)]).tolist()
    for start, chunk in zip(edges, column.chunks, strict=False):
        if not len(chunk):
            continue
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        whole = np.flatnonzero((np.diff(ends) == 16) & chunk.is_valid().to_numpy(zero_copy_only=False))
        if len(whole):
            found[start + whole], there[start + whole] = _parsed(memoryview(data), ends, whole)
    return found, there


def _parsed(data: memoryview, ends: Array, whole: Numbers) -> tuple[Array, Array | bool]:
    """Return 16 digits each as numbers, and which are digits."""
    if ends[-1] - ends[0] == 16 * len(whole):  # they lie one after the other
        try:
            return np.frombuffer(binascii.unhexlify(data[ends[0] : ends[-1]]), ">u8"), True
        except binascii.Error:
            pass
    digits = _HEXADECIMAL[np.frombuffer(data, np.uint8)[ends[whole][:, None] + np.arange(16)]]
    return ((digits[:, ::2] << 4) | digits[:, 1::2]).view(">u8")[:, 0], digits.max(axis=1) < 16


def distinct(numbers: Array) -> Array:
    """Return the different numbers, sorted, as `np.unique` does by hashing in ten to a hundred times as long (NumPy 2.4)."""
    found = np.sort(numbers, axis=None)
    first = np.ones(len(found), bool)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return found[first]


def spans(starts: Numbers, counts: Numbers) -> Numbers:
    """Return the numbers of ranges, one after the other: ``[5, 6, 9]`` for starts ``[5, 9]`` and counts ``[2, 1]``."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts - starts, counts)


def numbered(calls: Numbers, count: int) -> Numbers:
    """Return, for each of ``count`` calls, its place among some of them, `NONE` where it has none; one more entry, for `NONE`."""
    found = np.full(count + 1, NONE, np.int64)
    found[calls] = np.arange(len(calls))
    return found


def most(values: Array, of: Numbers, count: int, least: float = 0.0) -> Array:
    """Return the maximum of the values of each of ``count``, at least ``least``."""
    found = np.full(count, least)
    np.maximum.at(found, of, values)
    return found


class Vocabulary:
    """Numbers for names: the same in all streams of a comparison."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._tables: dict[Callable[[str], Any], Array] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[()]]:
        return Vocabulary, ()  # another process counts anew: numbers go from none to another

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

    def renamed(self, numbers: Numbers, rename: Callable[[str], str]) -> Numbers:
        """Return the numbers of other names for those of some."""
        distinct, which = np.unique(numbers, return_inverse=True)
        return np.array([self.number(rename(self.name(n) or "")) for n in distinct.tolist()], np.int64)[which.reshape(-1)]

    def name(self, number: int) -> str | None:
        """Return the name of a number."""
        return None if number < 0 else self.names[number]

    def table(self, of: Callable[[str], Any]) -> Array:
        """Return a function of all names, by number; the last entry, for `NONE`, is that of an empty name."""
        known = self._tables.get(of)
        if known is None or len(known) <= len(self.names):
            before = [] if known is None else known[:-1].tolist()
            known = self._tables[of] = np.array([*before, *map(of, self.names[len(before) :]), of("")])
        return known


class Overview:
    """The calls and losses of a capture."""

    COLUMNS = ("rank", "step", "seq", "op", "mean")

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.calls = 0
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self.scaled: set[int] = set()  # steps in which a GradScaler worked

    def add(self, table: pa.Table) -> None:
        """Count in some records: `COLUMNS` of whole steps of a rank."""
        changes = np.zeros(max(table.num_rows - 1, 0), dtype=bool)
        for name in ("rank", "step", "seq"):  # sorted by these
            column = table[name].to_numpy()
            changes |= column[1:] != column[:-1]
        self.calls += int(np.count_nonzero(changes)) + bool(table.num_rows)
        found = table.take(pa.array(_rows_of(table["op"], {*named("loss"), *named("scaler")})))
        for row in found.to_pylist():
            if row["op"] in named("scaler"):
                self.scaled.add(row["step"])
            elif row["mean"] is not None:  # else no statistics were kept
                self._losses[row["step"]].append(float(row["mean"]))

    def add_the_rest(self, seen: Collection[tuple[int, int]]) -> None:
        """Read what is missing: all but some ranks and steps."""
        left = [place for place in self._capture.sizes if place not in seen]
        for rank in sorted({rank for rank, _ in left}):
            steps = [step for other, step in left if other == rank]
            self.add(self._capture.records(columns=list(self.COLUMNS), rank=rank, step=steps))

    def told(self) -> tuple[int, dict[int, list[float]], set[int]]:
        """Return what was gathered, for `count_in` of another."""
        return self.calls, dict(self._losses), self.scaled

    def count_in(self, calls: int, losses: dict[int, list[float]], scaled: set[int]) -> None:
        """Add what was gathered of other ranks."""
        self.calls += calls
        for step, values in losses.items():
            self._losses[step] += values
        self.scaled |= scaled

    @property
    def passes(self) -> dict[int, int]:
        """How often each step went backward, on all ranks."""
        return {step: len(values) for step, values in self._losses.items()}

    @property
    def losses(self) -> dict[int, float]:
        """Loss per step: the mean over ranks and micro-batches of what ``backward()`` was called on."""
        return {step: sum(values) / len(values) for step, values in sorted(self._losses.items())}


def _rows_of(names: pa.ChunkedArray, wanted: Collection[str]) -> Numbers:
    """Return the rows of a dictionary column that hold one of some names."""
    found, start = [], 0
    for chunk in names.chunks:
        places = [n for n, name in enumerate(chunk.dictionary.to_pylist()) if name in wanted]
        indices = chunk.indices.fill_null(NONE).to_numpy(zero_copy_only=False)
        found += [start + np.flatnonzero(indices == place) for place in places]
        start += len(chunk)
    return np.sort(np.concatenate([np.empty(0, np.int64), *found]))


SCALE_COLUMNS = ("step", "slot", "max", "value")


def scales(table: pa.Table) -> list[tuple[int, float, bool]]:
    """Return ``(step, scale, skipped)`` for each step of a GradScaler, given its rows in order, with at least `SCALE_COLUMNS`."""
    found: list[tuple[int, float, bool]] = []
    overflow, scale = False, None
    for row in table.select(SCALE_COLUMNS).to_pylist():
        if row["slot"] == "input.scale":
            scale, overflow = row["max"], False
        elif (row["slot"] or "").startswith("input.found_inf"):
            overflow = overflow or bool(row["max"])
        elif row["slot"] == "arguments":
            said = decoded(row["value"])
            known = said.get("scale", scale)  # a capture of digests has the arguments only
            if known is not None:
                found.append((row["step"], float(known), bool(said.get("skipped", overflow))))
    return found


def loss_scale_in(table: pa.Table) -> str | None:
    """Say how the loss scale went, or return None where there was none."""
    return loss_scale([(scale, skipped) for _, scale, skipped in scales(table)])
