"""The table of a comparison in the columns of ptdbg_ascend, with the names that the dumps have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.doors.report.spreadsheet import ABSENT, TYPES, VERDICTS, Layout, Named, lines, write_tables
from trueup.exchange.readers.ascend import Marker
from trueup.foundation.model import Result
from trueup.foundation.store import Capture
from trueup_compat.ptdbg_ascend.errors import CompareException
from trueup_compat.ptdbg_ascend.tree import in_tree

COLUMNS: dict[str, dict[Layout, tuple[str, ...]]] = {
    "2.3": {
        "tensor": (
            "Cosine", "MaxAbsErr", "NPU max", "NPU min", "NPU mean", "Bench max", "Bench min", "Bench mean",
            "Accuracy Reached or Not", "Err_message",
        ),
        "stats": VERDICTS["stats"], "digest": VERDICTS["digest"],
    },
    "6.0": VERDICTS,
}  # fmt: skip
"""By version and by what the dumps hold. Version 2.3 had no table of its own for statistics alone: it gets that of 6.0."""
FAILED = pa.array(["No", "Warning", "Different"])
NONE = "NA"
"""The tool's word where there is no such row."""
DESCRIBED = ("seq", "op", "slot", "phase", "dtype", "shape", "numel")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Names:
    """What a dump calls the slots of its capture."""

    calls: dict[int, str]
    """The tool's names by `seq`."""
    marker: Marker
    separator: str

    def __call__(self, table: pa.Table, there: Array) -> pa.Array:
        """Name slots; null where the dump has no row of one."""
        rows = table.select(list(DESCRIBED)).to_pylist()
        return pa.array([self._name(row) if known else None for row, known in zip(rows, there.tolist(), strict=True)], pa.string())

    def _name(self, row: dict[str, Any]) -> str | None:
        name, slot = self.calls.get(row["seq"]), in_tree(row, self.marker.filtered, self.marker.sides)
        return None if name is None or slot is None else f"{name}{self.separator}{slot}"


class ForeignNames:
    """The same of a dump that another tool wrote: its names are in the capture that it was imported into."""

    def __init__(self, capture: Capture) -> None:
        self._names: dict[tuple[int, int, int, str], str] = {}
        columns = ["rank", "step", "seq", "slot", "foreign_name"]
        for row in capture.records(columns).to_pylist() if "foreign_name" in capture.names else ():
            if row["foreign_name"] is not None:
                self._names[row["rank"], row["step"], row["seq"], row["slot"]] = row["foreign_name"]

    def __call__(self, table: pa.Table, there: Array) -> pa.Array:
        """Name slots."""
        keys = zip(*(table[name].to_pylist() for name in ("rank", "step", "seq", "slot")), strict=True)
        found = [self._names.get(key) if known else None for key, known in zip(keys, there.tolist(), strict=True)]
        return pa.array(found, pa.string())


@dataclass(slots=True)
class Failed:
    """The rows that did not pass: how many, the first, and the first of a culprit."""

    count: int = 0
    first: str = NONE
    culprit: str = NONE

    def add(self, table: pa.Table) -> None:
        """Look at rows."""
        verdict = next(name for name in ("Accuracy Reached or Not", "Result") if name in table.column_names)
        found = table.filter(pc.is_in(table[verdict], FAILED))
        culprits = found.filter(pc.equal(found["Trueup Role"], "culprit"))
        self.first, self.culprit = (_first(had, rows) for had, rows in ((self.first, found), (self.culprit, culprits)))
        self.count += len(found)


def _first(had: str, rows: pa.Table) -> str:
    return rows["NPU Name"][0].as_py() if had == NONE and len(rows) else had


def headings(version: str, layout: Layout, *, stacks: bool) -> list[str]:
    """Return the titles of all columns.

    Raises:
        CompareException: there are no columns of that version.
    """
    if version not in COLUMNS:
        raise CompareException.of_parameter(f"columns {version!r}: expected {' or '.join(COLUMNS)}")
    return ["NPU Name", "Bench Name", *TYPES, *COLUMNS[version][layout], *(["NPU_Stack_Info"] if stacks else [])]


def write(
    path: Path, result: Result, named: tuple[Named, Named], rank: int | None, steps: Sequence[int] | None, version: str,
    *, stacks: bool,
) -> Failed:  # fmt: skip
    """Write the table as CSV; return what did not pass.

    Args:
        path: of the file.
        result: of the native comparison.
        named: name the slots of baseline and candidate.
        rank: that is compared, of captures that hold several; None: all.
        steps: likewise.
        version: of the columns.
        stacks: whether there is a column of call stacks.

    Raises:
        CompareException: there are no columns of that version.
        TrueupError: the file cannot be written.
    """
    layout, parts = lines(result, named)
    names, failed = headings(version, layout, stacks=stacks), Failed()

    def tables() -> Iterator[pa.Table]:
        for part in parts:
            table = part.table if steps is None else part.table.filter(pc.is_in(part.table["Step"], pa.array(steps)))
            table = table if rank is None else table.filter(pc.equal(table["Rank"], rank))
            failed.add(table)
            for name in TYPES[:2]:
                column = pc.cast(table[name], pa.string())
                named_so = pc.binary_join_element_wise("torch", column, ".")
                told = pc.if_else(pc.or_(pc.is_null(column), pc.equal(column, ABSENT)), column, named_so)
                table = table.set_column(table.column_names.index(name), name, told)
            yield table

    write_tables(tables(), names, path)
    return failed
