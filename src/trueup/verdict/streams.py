"""One rank and step of a capture, in memory: its calls in execution order and the arrays of their slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.model import LANES, NUMBERS, CallKey, TensorStats

Array = np.ndarray[Any, Any]


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
    """float64 ``(n, LANES)``; rows of NaN where there is none."""
    digest: list[str | None]
    dtype: list[str | None]
    shape: list[tuple[int, ...] | None]
    value: list[str | None]
    producer: list[int | None]
    payload: list[tuple[str, str] | None]

    def stats(self, k: int) -> TensorStats | str | None:
        """Return what is known of slot row ``k``."""
        if self.value[k] is not None:
            return self.value[k]
        if np.isnan(self.numbers[k, NUMBERS.index("n_nan")]):
            return None
        values = {n: float(v) if not n.startswith("n_") else int(v) for n, v in zip(NUMBERS, self.numbers[k], strict=True)}
        return TensorStats(numel=int(self.numel[k]), digest=self.digest[k], **values)  # type: ignore[arg-type]


COLUMNS = (
    "rank", "step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "numel", *NUMBERS,
    "digest", "sketch", "payload_segment", "payload_key", "value", "producer_seq", "forward_seq", "site",
)  # fmt: skip


def load(table: pa.Table) -> Stream:
    """Build a stream from the records of one rank and step, sorted by ``seq``."""
    column = {name: table.column(name).to_pylist() for name in COLUMNS if name not in (*NUMBERS, "sketch", "numel")}
    numbers = np.empty((table.num_rows, len(NUMBERS)))
    for k, name in enumerate(NUMBERS):
        numbers[:, k] = table.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False)
    calls: list[Row] = []
    by_seq: dict[int, Row] = {}
    for k, seq in enumerate(column["seq"]):
        row = by_seq.get(seq)
        if row is None:
            row = by_seq[seq] = Row(
                column["rank"][k], column["step"][k], seq, column["parent"][k], column["phase"][k], column["level"][k],
                column["scope"][k], column["op"][k], column["ordinal"][k], column["forward_seq"][k], column["site"][k],
            )  # fmt: skip
            calls.append(row)
        row.slots[column["slot"][k]] = k
    segments, keys = column["payload_segment"], column["payload_key"]
    return Stream(
        calls=calls,
        by_seq=by_seq,
        numbers=numbers,
        numel=table.column("numel").cast(pa.float64()).to_numpy(zero_copy_only=False),
        sketch=_sketches(table),
        digest=column["digest"],
        dtype=column["dtype"],
        shape=[None if s is None else tuple(s) for s in column["shape"]],
        value=column["value"],
        producer=column["producer_seq"],
        payload=[None if s is None else (s, k) for s, k in zip(segments, keys, strict=True)],
    )


def _sketches(table: pa.Table) -> Array:
    sketch = np.full((table.num_rows, LANES), np.nan)
    chunked = table.column("sketch").combine_chunks()
    chunk = chunked.chunk(0) if isinstance(chunked, pa.ChunkedArray) else chunked
    known = ~np.asarray(chunk.is_null())
    if known.any():
        sketch[known] = np.asarray(chunk.drop_null().flatten()).reshape(-1, LANES)
    return sketch
