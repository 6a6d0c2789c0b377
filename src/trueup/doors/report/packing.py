"""The table of calls as it travels inside the page: one compressed column each, repeated text stored once.

A column is ``{"kind": "int32" | "float32" | "text", "data": base64(zlib(little-endian numbers))}``; a text column's
numbers point into its ``values``. 100,000 calls take about 1 MB.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation.words.wording import one_line

ROWS = 250_000
"""How many calls a page holds; the rest stays in calls.parquet and the page says so."""

TEXTS = ("phase", "level", "scope", "op", "state", "role", "rule", "source", "paired")
WHOLE = ("rank", "step", "ordinal", "seq_baseline", "seq_candidate")
ERRORS = ("error_in", "error_out", "expected", "ratio")
ROLES = ("culprit", "victim", "inherited")
STATES = ("deviates", "incomparable", "only baseline", "only candidate", "agrees", "equal")


def pack(calls: pa.Table, limit: int = ROWS) -> dict[str, Any]:
    """Pack the calls that matter most: culprits, then deviating calls, then the others, each in order of execution.

    Args:
        calls: ``Result.calls``; a column that is missing is packed as empty.
        limit: how many rows to keep.

    Returns:
        JSON-ready ``{"rows": kept, "total": all, "columns": {name: column}}``.
    """
    ordered = important_first(calls).slice(0, limit)
    columns: dict[str, Any] = {name: _text(_column(ordered, name, pa.string())) for name in TEXTS}
    for name in WHOLE:
        columns[name] = _numbers(_column(ordered, name, pa.int64()), "int32", -1)
    for name in ERRORS:
        columns[name] = _numbers(_column(ordered, name, pa.float64()), "float32", float("nan"))
    return {"rows": ordered.num_rows, "total": calls.num_rows, "columns": columns}


def important_first(calls: pa.Table) -> pa.Table:
    """Sort calls: culprits, victims, deviating, not comparable, of one run, agreeing, equal; each in order of execution."""
    keys = {
        "by_role": _rank(_column(calls, "role", pa.string()), ROLES),
        "by_state": _rank(_column(calls, "state", pa.string()), STATES),
        "by_step": _column(calls, "step", pa.int64()),
        "by_seq": _column(calls, "seq_candidate", pa.int64()),
        "by_rank": _column(calls, "rank", pa.int64()),
    }
    return calls.take(pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys]))


def _rank(column: pa.ChunkedArray, order: tuple[str, ...]) -> pa.ChunkedArray:
    return pc.fill_null(pc.index_in(column, pa.array(order)), len(order))


def _column(table: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, kind)])
    return pc.cast(table[name], kind)


def _text(column: pa.ChunkedArray) -> dict[str, Any]:
    encoded = pc.fill_null(column, "").combine_chunks().dictionary_encode()
    codes = np.asarray(encoded.indices, dtype="<i4")
    return {"kind": "text", "data": _squeeze(codes), "values": [one_line(v) for v in encoded.dictionary.to_pylist()]}


def _numbers(column: pa.ChunkedArray, kind: str, absent: float) -> dict[str, Any]:
    with np.errstate(over="ignore"):
        values = pc.fill_null(column, absent).to_numpy().astype(np.dtype(kind).newbyteorder("<"))
    return {"kind": kind, "data": _squeeze(values)}


def _squeeze(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode("ascii")
