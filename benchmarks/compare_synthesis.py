"""Makes large pairs out of small ones: the real records of a step, over and over, each slot a little different on the two sides.

A float tensor of the candidate is 1e-7 of itself away from the baseline's, statistics and sketch alike and the same wherever the
tensor is seen, and its digest is another one: what two devices record of the same training. Integers and bools are equal.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import trueup
from trueup.foundation.store import Capture, Writer, claim

ROUNDING = 1e-7
BATCH = 64
"""Steps that are handed to the writer at once, as a recorder does where a step takes 15 ms: they are packed."""

SCALED = ("min", "max", "mean", "l2")
KIND = ("op", "level", "phase", "scope")
NUMBERED = ("seq", "parent", "producer_seq", "forward_seq")


ONE_FLUSH = 16
"""How often the step is in a part, where all of it is one step: as many rows as a recorder of a large model writes in a second."""


def captures(source: Path, slots: int, into: Path, *, one_step: bool = False) -> tuple[list[Path], int]:
    """Write (or find) a baseline and a candidate of about ``slots`` rows; return both and the rows of each.

    Args:
        source: a capture whose last step is repeated.
        into: kept between runs; what another number of slots left there is removed.
        one_step: repeat its calls within a step, as a large model has them, instead of the step.
    """
    mark = into / f"{slots}-5.json"
    sides = [into / "baseline", into / "candidate"]
    if not mark.exists():
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        rows = [_write(trueup.open_capture(source), slots, side, one_step, differs=side.name == "candidate") for side in sides]
        mark.write_text(json.dumps(rows[0]))
    return sides, json.loads(mark.read_text())


def _write(source: Capture, slots: int, directory: Path, one_step: bool, *, differs: bool) -> int:
    table = source.records(step=source.steps[-1])
    manifest = {k: v for k, v in source.ranks[0].items() if k not in ("rank", "pid", "status", "written", "notes")}
    root = {k: v for k, v in source.root.items() if k not in ("created", "format_version")}
    writer = Writer(directory, claim(directory, 0, root.get("run")), root, manifest)
    writer.add_sites((site, frames, text) for site, (frames, text) in source.sites(0).items())
    steps = max(1, round(slots / table.num_rows))
    template = Template(table)
    for first in range(0, steps, ONE_FLUSH if one_step else BATCH):
        if one_step:
            times = range(first, min(steps, first + ONE_FLUSH))
            writer.write_parts({0: _joined([template.at(time, differs=differs) for time in times], times)})
        else:
            writer.write_parts({step: template.at(step, differs=differs) for step in range(first, min(steps, first + BATCH))})
    writer.close()
    return steps * int(table.num_rows)


def _joined(tables: list[pa.Table], times: range) -> pa.Table:
    """Return the calls of several steps as calls of one: each repetition goes on counting where the one before ended."""
    counted = []
    for table, time in zip(tables, times, strict=True):
        place = table.column_names.index("ordinal")
        more = pc.add(table["ordinal"], pc.multiply(_calls_of_a_kind(table), pa.scalar(time, pa.int32())))
        counted.append(table.set_column(place, table.schema.field(place), more))
    return pa.concat_tables(counted).unify_dictionaries()


def _calls_of_a_kind(table: pa.Table) -> pa.Array:
    """Return, by row, how many calls of its operator, level, phase and scope the step has."""
    kinds = np.stack([table[name].cast(pa.string()).combine_chunks().dictionary_encode().indices.to_numpy() for name in KIND])
    which = np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)
    last = np.zeros(int(which.max(initial=0)) + 1, np.int32)
    np.maximum.at(last, which, table["ordinal"].to_numpy())
    return pa.array(last[which] + 1)


class Template:
    """The rows of one step, and which distinct float tensor each of them shows."""

    def __init__(self, table: pa.Table) -> None:
        first = min(table["seq"].to_pylist())
        self._span = max(table["seq"].to_pylist()) + 1 - first
        table = table.drop_columns(["payload_segment", "payload_key", "payload_view"])
        self._table = self._shifted(table, -first)
        digests = table["digest"].combine_chunks()
        floats = pc.starts_with(table["dtype"].cast(pa.string()), "float").fill_null(False)
        moves = pc.not_equal(table["min"], table["max"])  # no device rounds a constant
        changes = pc.and_(pc.and_(floats, digests.is_valid()), moves.combine_chunks().fill_null(False))
        changes = changes.to_numpy(zero_copy_only=False)
        self._rows = np.flatnonzero(changes)
        codes = digests.take(pa.array(self._rows)).dictionary_encode()
        self._tensor = codes.indices.to_numpy()
        self._digests = digests.to_pylist()
        self._count = len(codes.dictionary)
        self._sketch = _lanes(table["sketch"].take(pa.array(self._rows)))
        self._numbers = {name: table[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in SCALED}

    @staticmethod
    def _shifted(table: pa.Table, by: int) -> pa.Table:
        for name in NUMBERED:
            place = table.column_names.index(name)
            table = table.set_column(place, table.schema.field(place), pc.add(table[name], pa.scalar(by, pa.int64())))
        return table

    def at(self, step: int, *, differs: bool, rank: int = 0) -> pa.Table:
        """Return the records of a step; another rank rounds otherwise."""
        table = self._shifted(self._table, step * self._span)
        chance = np.random.default_rng([step, differs, rank])
        replaced: dict[str, Any] = {"digest": self._digested(chance)}
        shift = ROUNDING * chance.standard_normal(self._count) if differs else np.zeros(self._count)
        for name in SCALED:
            values = self._numbers[name].copy()
            values[self._rows] *= 1 + shift[self._tensor]
            replaced[name] = pa.array(values, from_pandas=True)
        replaced["sketch"] = self._sketched(chance, table) if differs else table["sketch"]
        for name, column in replaced.items():
            place = table.column_names.index(name)
            table = table.set_column(place, table.schema.field(place), column)
        return table

    def _digested(self, chance: np.random.Generator) -> pa.Array:
        fresh = chance.integers(0, 2**63, self._count)
        names = np.array([f"{number:016x}" for number in fresh], dtype=object)
        digests = np.array(self._digests, dtype=object)
        digests[self._rows] = names[self._tensor]
        return pa.array(digests, pa.string())

    def _sketched(self, chance: np.random.Generator, table: pa.Table) -> pa.Array:
        """Move each float tensor's sums by a vector that is ``ROUNDING`` of its norm long."""
        moved = self._sketch.copy()
        away = chance.standard_normal((self._count, 64)) / 8
        norms = np.nan_to_num(self._numbers["l2"][self._rows])
        moved += ROUNDING * norms[:, None] * away[self._tensor]
        values = np.full((table.num_rows, 64), np.nan)
        values[self._rows] = moved
        valid = table["sketch"].is_valid().to_numpy(zero_copy_only=False)
        rest = np.setdiff1d(np.flatnonzero(valid), self._rows)
        values[rest] = _lanes(table["sketch"].take(pa.array(rest)))
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 64, mask=pa.array(~valid))


def _lanes(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return a sketch column without nulls as ``(n, 64)``."""
    flat: np.ndarray[Any, Any] = column.combine_chunks().flatten().to_numpy()
    return flat.reshape(-1, 64)


def rival_dump(source: Path, times: int, into: Path) -> Path:
    """Write msprobe's ``dump.json`` with all its calls ``times`` over, their numbers counted on, and return it."""
    content = json.loads(source.read_text())
    data = {}
    for k in range(times):
        for name, entry in content["data"].items():
            op, number, phase = name.rsplit(".", 2)  # Functional.linear.3.forward
            data[f"{op}.{int(number) + 1000 * k}.{phase}"] = entry
    into.mkdir(parents=True, exist_ok=True)
    (into / "dump.json").write_text(json.dumps(content | {"data": data}))
    for beside in ("stack.json", "construct.json"):
        if (source.parent / beside).exists():
            shutil.copy(source.parent / beside, into / beside)
    return into / "dump.json"
