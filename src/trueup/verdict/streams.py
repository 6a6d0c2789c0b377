"""One rank and step of a capture, in memory: its calls in execution order and the arrays of their slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.model import NUMBERS, CallKey, TensorStats
from trueup.store import sketch_matrix

Array = np.ndarray[Any, Any]
Place = tuple[str, str, "tuple[int, ...] | None"]
"""Where a slot's payload lies: segment, key, and which part of that tensor it is."""


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

    def inputs(self) -> list[str]:
        """Slots the call read."""
        return [s for s in self.slots if is_input(s)]

    def outputs(self) -> list[str]:
        """Slots the call computed."""
        return [s for s in self.slots if is_output(s)]


def is_input(slot: str) -> bool:
    """Tell whether a slot is read by its call."""
    return slot.startswith(("input.", "param.", "grad_output."))


def is_output(slot: str) -> bool:
    """Tell whether a slot is computed by its call."""
    return slot.startswith(("output.", "grad_input.", "grad_param."))


@dataclass(slots=True)
class Stream:
    """Calls sorted by ``seq``; every array has one entry per slot row."""

    calls: list[Row]
    by_seq: dict[int, Row]
    numbers: Array
    """float64 ``(n, len(NUMBERS))``, NaN where unknown."""
    numel: Array
    sketch: Array
    """float64 ``(n, 64)``; rows of NaN where there is none."""
    digest: list[str | None]
    dtype: list[str | None]
    shape: list[tuple[int, ...] | None]
    value: list[str | None]
    producer: list[int | None]
    producer_slot: list[str | None]
    payload: list[Place | None]

    def is_measured(self, k: int) -> bool:
        """Tell whether statistics of slot row ``k`` were recorded."""
        return not bool(np.isnan(self.numbers[k, NUMBERS.index("n_nan")]))

    def stats(self, k: int) -> TensorStats | str | None:
        """Return what is known of slot row ``k``."""
        if self.value[k] is not None:
            return self.value[k]
        if np.isnan(self.numbers[k, NUMBERS.index("n_nan")]):
            return None
        pairs = zip(NUMBERS, self.numbers[k], strict=True)
        values = {name: int(v) if name.startswith("n_") else float(v) for name, v in pairs}
        return TensorStats(numel=int(self.numel[k]), digest=self.digest[k], **values)  # type: ignore[arg-type]


_CALL = ("rank", "step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "forward_seq", "site")
_SLOT = ("slot", "dtype", "shape", "digest", "payload_segment", "payload_key", "payload_view", "value",
         "producer_seq", "producer_slot")

COLUMNS = (*_CALL, *_SLOT, "numel", *NUMBERS, "sketch")


def load(table: pa.Table) -> Stream:
    """Build a stream from the records of one rank and step, sorted by ``seq``."""
    seq = table.column("seq").to_numpy()
    starts = np.flatnonzero(np.r_[True, seq[1:] != seq[:-1]]) if len(seq) else np.empty(0, dtype=np.int64)
    firsts = table.select(_CALL).take(pa.array(starts))  # what a call has once is read once
    calls = [Row(*values) for values in zip(*(_values(firsts.column(name)) for name in _CALL), strict=True)]
    slots = {name: _values(table.column(name)) for name in _SLOT}
    ends = [*starts[1:].tolist(), len(seq)]
    for row, start, end in zip(calls, starts.tolist(), ends, strict=True):
        row.slots = {slots["slot"][k]: k for k in range(start, end)}
    numbers = np.empty((table.num_rows, len(NUMBERS)))
    for k, name in enumerate(NUMBERS):
        numbers[:, k] = table.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False)
    places = zip(slots["payload_segment"], slots["payload_key"], slots["payload_view"], strict=True)
    return Stream(
        calls=calls,
        by_seq={row.seq: row for row in calls},
        numbers=numbers,
        numel=table.column("numel").cast(pa.float64()).to_numpy(zero_copy_only=False),
        sketch=sketch_matrix(table.column("sketch")),
        digest=slots["digest"],
        dtype=slots["dtype"],
        shape=slots["shape"],
        value=[v if slot == "arguments" else None for v, slot in zip(slots["value"], slots["slot"], strict=True)],
        producer=slots["producer_seq"],
        producer_slot=slots["producer_slot"],
        payload=[None if segment is None else (segment, key, view) for segment, key, view in places],
    )


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as a list, lists in it as tuples: several times faster than ``to_pylist`` for what repeats itself."""
    if column.null_count == len(column):
        return [None] * len(column)
    if pa.types.is_dictionary(column.type):
        words = column.unify_dictionaries().combine_chunks()
        chunk = words.chunk(0) if isinstance(words, pa.ChunkedArray) else words
        known = chunk.dictionary.to_pylist()
        return [None if k is None else known[k] for k in chunk.indices.to_pylist()]
    if pa.types.is_list(column.type):
        return [None if shape is None else tuple(shape) for shape in _lists(column)]
    return list(column.to_pylist())


def _lists(column: pa.ChunkedArray) -> Iterator[list[int] | None]:
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy().tolist()
        sizes = chunk.values.to_numpy(zero_copy_only=False).tolist()
        valid = chunk.is_valid().to_numpy(zero_copy_only=False).tolist()
        yield from (sizes[a:b] if there else None for a, b, there in zip(ends, ends[1:], valid, strict=False))
