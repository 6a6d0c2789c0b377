"""Calls of a capture with their slots, a rank and step at a time; only what is asked for is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.analysis.anomalies.effects import place_of
from trueup.analysis.anomalies.judging import chosen
from trueup.comparison.graph.streams import Stream
from trueup.foundation.facts.anomaly import Place
from trueup.foundation.facts.operators import says
from trueup.foundation.store import Capture
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.words.wording import one_line

Steps = int | Sequence[int] | None  # steps, or ranks, that are asked for; None: all

AT_ONCE = 1 << 15  # rows that are turned into objects at a time

NAMES = ("seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "dtype")


@dataclass(frozen=True, slots=True)
class Found:
    """A call and the rows of its slots, by their names."""

    seq: int
    parent: int | None
    phase: str
    level: str
    scope: str
    op: str
    ordinal: int
    slots: dict[str, dict[str, Any]]

    @property
    def given(self) -> list[dict[str, Any]]:
        """Its input tensors."""
        return [row for name, row in self.slots.items() if name.startswith(("input.", "grad_output.")) and row["dtype"]]

    @property
    def made(self) -> list[dict[str, Any]]:
        """Its result tensors."""
        return [row for name, row in self.slots.items() if name.startswith(("output.", "grad_input.")) and row["dtype"]]


def parts(capture: Capture, step: Steps, rank: Steps) -> Iterator[tuple[int, int]]:
    """Yield the ranks and steps asked for; raises TrueupError if the capture lacks one."""
    ranks = chosen("rank", rank, sorted(capture.ranks))
    for one in chosen("step", step, capture.steps):
        for of in ranks:
            yield of, one


def calls(
    capture: Capture, rank: int, step: int, wanted: Callable[[str, str], bool], columns: Sequence[str] = (),
    levels: Sequence[str] | None = None,
) -> list[Found]:  # fmt: skip
    """Return the calls of a rank and step with a wanted operator and level, in order, with ``columns`` of their slots."""
    kinds = capture.records(["op", "level"], rank=rank, step=step).group_by(["op", "level"]).aggregate([]).to_pylist()
    kinds = [kind for kind in kinds if levels is None or kind["level"] in levels]
    ops = {kind["op"] for kind in kinds if kind["op"] is not None and wanted(kind["op"], kind["level"] or "")}
    if not ops:
        return []
    chosen_levels = {kind["level"] for kind in kinds}
    rows = capture.records([*NAMES, *columns], rank=rank, step=step, op=ops, level=chosen_levels)
    found = []
    for seq, slots in groupby(_rows(rows), key=lambda row: row["seq"]):
        held = list(slots)
        first = held[0]
        if not wanted(first["op"], first["level"] or ""):
            continue
        place = (first["phase"] or "", first["level"] or "", first["scope"] or "", first["op"], first["ordinal"] or 0)
        found.append(Found(seq, first["parent"], *place, {row["slot"] or "": row for row in held}))
    return found


def kinds(capture: Capture, rank: int, step: int) -> set[tuple[str, str, str]]:
    """Return the operator, level and dtype of all tensors of a rank and step, each kind once."""
    columns = ["op", "level", "dtype"]
    found = capture.records(columns, rank=rank, step=step).group_by(columns).aggregate([]).to_pylist()
    return {(kind["op"], kind["level"] or "", kind["dtype"]) for kind in found if kind["dtype"] and kind["op"] is not None}


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows, column by column with names from their dictionaries: ten times faster than Arrow's own way."""
    for start in range(0, len(table), AT_ONCE):
        columns = [_listed(table[name].slice(start, AT_ONCE)) for name in table.column_names]
        for values in zip(*columns, strict=True):
            yield dict(zip(table.column_names, values, strict=True))


def _listed(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        whole = column.unify_dictionaries()
        words = np.array([*whole.chunk(0).dictionary.to_pylist(), None], object) if whole.num_chunks else np.array([None])
        codes = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in whole.chunks]
        return list(words[np.concatenate(codes)].tolist()) if codes else []
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return list(column.to_pylist())
    if not column.null_count:
        return list(column.to_numpy().tolist())
    values = column.fill_null(0).to_numpy().astype(object)
    values[~column.is_valid().to_numpy()] = None
    return list(values.tolist())


def innermost(found: Sequence[Found]) -> list[Found]:
    """Leave out calls that hold another one of them."""
    around = {one.parent for one in found}
    return [one for one in found if one.seq not in around]


def outermost(found: Sequence[Found]) -> list[Found]:
    """Leave out calls inside another one of them: the function that the user called stays."""
    seqs = {one.seq for one in found}
    return [one for one in found if one.parent not in seqs]


def stream_of(capture: Capture, rank: int, step: int) -> Stream:
    """Return all calls of a rank and step, as columns."""
    return Stream(partial(capture.records, rank=rank, step=step), Vocabulary(), Vocabulary(), imported=capture.imported)


class Places:
    """Says where calls stand, with their lines of code; reads the records of a step when one of its calls is asked for."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._at: tuple[int, int] | None = None
        self._stream: Stream | None = None

    def of(self, rank: int, step: int, seq: int) -> Place:
        """Return where the call of a seq stands."""
        if self._stream is None or self._at != (rank, step):
            self._stream = stream_of(self._capture, rank, step)
            self._at = rank, step
        return place_of(self._stream, self._stream.find(seq), self._capture.sites(rank))


def described(place: Place) -> str:
    """Write a place as ``head, forward, step 0, rank 0 (torch.Tensor.half)``."""
    ops = " / ".join(one_line(name) for name in dict.fromkeys((place.api, place.op)) if name)
    return f"{one_line(place.name)} ({ops})" if place.scope else f"{ops}, {place.phase}, step {place.step}, rank {place.rank}"


def cast_source(op: str) -> str | None:
    """Return the slot whose tensor a cast casts, None if the call is no cast."""
    found: str | None = says(op, "cast")
    return found
