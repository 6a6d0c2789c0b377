"""Reading parts of records, each by itself, so that a damaged one costs only its own rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trueup.store import schema, seal

BROKEN = (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError)
"""What reading a damaged Parquet file raises."""

KEYS = ("rank", "step", "seq")
"""Columns by which records are sorted."""

ROWS_PER_BYTE = 64
"""Most rows a part may claim for a byte of its file; ours stay 10 times below. More is a bomb."""


@dataclass(frozen=True, slots=True)
class Part:
    """A readable part of records."""

    path: Path
    rank: int
    step: int
    rows: int
    names: tuple[str, ...]
    segments: frozenset[str]
    levels: frozenset[str]
    has_sites: bool


def inspect(path: Path, rank: int, step: int) -> Part:
    """Read a part's footer, and what its rows refer to.

    Raises:
        one of ``BROKEN``: it is truncated, damaged, or claims more than its file can hold.
    """
    size = path.stat().st_size
    seal.check(path)
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        # Nothing more of the metadata: in pyarrow 26 its accessors let a C++ exception end the process.
        rows, names = file.metadata.num_rows, file.schema_arrow.names
        if rows > ROWS_PER_BYTE * size:
            raise ValueError(f"claims {rows} rows in a file of {size} bytes")
        wanted = [name for name in ("step", "rank", "payload_segment", "level", "site") if name in names]
        references = file.read(wanted, use_threads=False)
    references.validate(full=True)
    _check_place({name: references[name] for name in wanted}, rank, step)
    found = {name: references[name].unique().drop_null().to_pylist() for name in references.column_names}
    segments, levels = (frozenset(map(str, found.get(name, ()))) for name in ("payload_segment", "level"))
    return Part(path, rank, step, rows, tuple(names), segments, levels, bool(found.get("site")))


def read(part: Part, columns: Collection[str] | None, where: Mapping[str, Collection[Any]]) -> pa.Table:
    """Read rows of a part whose columns have one of the wanted values, in the schema's types.

    Args:
        part: from ``inspect``.
        columns: names, None for all that the part has; a known column that it lacks is null.
        where: column -> accepted values.

    Raises:
        one of ``BROKEN``.
    """
    wanted = part.names if columns is None else {*columns, *where, *KEYS}
    needed = [name for name in part.names if name in wanted]
    with pq.ParquetFile(part.path, page_checksum_verification=True) as file:
        raw = file.read(needed, use_threads=False)
    if raw.num_rows != part.rows:
        raise ValueError(f"holds {raw.num_rows} rows, expected {part.rows}")
    raw.validate(full=True)
    arrays = {name: _typed(raw[name], name) for name in needed}
    _check_keys(arrays, part)
    lacking = schema.RECORDS.names if columns is None else [*columns, *where]
    for name in lacking:
        if name not in arrays and name in schema.NAMES:
            arrays[name] = pa.chunked_array([pa.nulls(part.rows, schema.RECORDS.field(name).type)])
    table = pa.table(arrays)
    if not set(where) <= set(arrays):  # an unknown column that this part lacks has no accepted value here
        return table.slice(0, 0)
    return _filter(table, where) if where else table


def _check_keys(arrays: Mapping[str, pa.ChunkedArray], part: Part) -> None:
    """Refuse a part whose rows are not of the step and rank of its folders, or of no call."""
    _check_place(arrays, part.rank, part.step)
    if "seq" not in arrays or arrays["seq"].null_count:
        raise ValueError("rows have no seq")


def _check_place(arrays: Mapping[str, pa.ChunkedArray], rank: int, step: int) -> None:
    for name, expected in (("step", step), ("rank", rank)):
        column = arrays.get(name)
        if column is None or column.null_count:
            raise ValueError(f"rows have no {name}")
        if not bool(np.all(column.to_numpy() == expected)):
            raise ValueError(f"rows are not of {name} {expected}, as the folder is")


def _typed(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    if name not in schema.NAMES:
        return column
    kind = schema.RECORDS.field(name).type
    return column if column.type == kind else column.cast(kind)


def _filter(table: pa.Table, where: Mapping[str, Collection[Any]]) -> pa.Table:
    import pyarrow.compute as pc  # here: it takes 0.1 s, for which a process that only records need not wait

    mask = None
    for name, accepted in where.items():
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        one = pc.is_in(column, value_set=pa.array(list(accepted), column.type))
        mask = one if mask is None else pc.and_(mask, one)
    # As a rule all rows of a part are wanted, and a copy of them costs as much as reading them.
    return table if mask is None or pc.all(mask, skip_nulls=False).as_py() else table.filter(mask)


def in_order(table: pa.Table) -> pa.Table:
    """Sort by rank, step and seq; rows of a call keep the order in which they were written."""
    keys = [table[name].to_numpy() for name in ("seq", "step", "rank")]
    order = np.lexsort(keys)  # stable
    if bool(np.all(order[1:] > order[:-1])):
        return table
    return table.take(pa.array(order))
