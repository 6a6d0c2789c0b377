"""The columns of a capture's tables, with what each means. ``RECORDS`` and ``SITES`` are the Arrow schemas; ``COLUMNS`` is the
table docs/format.md is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trueup.foundation.model import LANES, NUMBERS, PACKED, packed_columns

_NAME = pa.dictionary(pa.int32(), pa.string())
_INT = pa.int64()
_FLOAT = pa.float64()

COLUMNS: tuple[tuple[str, pa.DataType, str], ...] = (
    ("step", pa.int32(), "training step, from 0"),
    ("rank", pa.int32(), "process, from 0"),
    ("seq", _INT, "execution order of the call in its rank; all slots of a call share it"),
    ("parent", _INT, "seq of the enclosing call at the next coarser level, in the backward too; null at the top"),
    ("phase", _NAME, "forward, recompute, backward, optimizer, collective or data"),
    ("level", _NAME, "module, api or aten"),
    ("scope", _NAME, "module path, empty outside any module"),
    ("op", _NAME, "operator, function or module class"),
    ("ordinal", pa.int32(), "n-th call of that op in that scope, phase and step, from 0"),
    ("slot", _NAME, "input.0, input.weight, output.0, grad_output.0, ...; 'arguments' for what is no tensor"),
    ("dtype", _NAME, "name without a framework's prefix: float32, bfloat16, ..."),
    ("shape", pa.list_(_INT), "sizes; empty for a scalar tensor"),
    ("strides", pa.list_(_INT), "in elements; null where the layout has none"),
    ("device", _NAME, "cpu, cuda:0, npu:0, ..."),
    ("numel", _INT, "number of elements"),
    ("min", _FLOAT, "least finite element, NaN if there is none; null: no statistics were taken"),
    ("max", _FLOAT, "greatest finite element, likewise"),
    ("mean", _FLOAT, "mean of the finite elements, summed in float64"),
    ("l2", _FLOAT, "square root of the sum of squares of the finite elements"),
    ("n_nan", _INT, "elements that are NaN"),
    ("n_posinf", _INT, "elements that are +Inf"),
    ("n_neginf", _INT, "elements that are -Inf"),
    ("n_zero", _INT, "elements that are +0 or -0"),
    ("n_subnormal", _INT, "elements nearer to zero than the dtype's smallest normal number"),
    ("n_saturated", _INT, "finite elements of the dtype's largest size (float32: from the largest bfloat16 on); 0 for integers"),
    ("digest", pa.string(), "xxh3_64 of the bytes in logical C order, 16 hexadecimal digits"),
    ("sketch", pa.list_(_FLOAT, LANES), "64 signed sums, from which the distance of two tensors is estimated"),
    ("payload_segment", _NAME, "file in the rank's folder that holds the bytes; null: not kept"),
    ("payload_key", pa.string(), "name of the tensor in that file"),
    ("payload_view", pa.list_(_INT), "which of its elements: offset, sizes, strides, in elements; null: all, in order"),
    ("value", pa.string(), "JSON: non-tensor arguments in slot 'arguments'; of a local shard, its part in the whole"),
    ("producer_seq", _INT, "call that last wrote this storage; null: none that was recorded"),
    ("producer_slot", _NAME, "slot of that call"),
    ("forward_seq", _INT, "for a backward call its forward call, for a recompute call the one it repeats"),
    ("site", _INT, "id of the call stack, in the rank's sites files"),
)

RECORDS = pa.schema([(name, kind) for name, kind, _ in COLUMNS])
TYPES = {name: kind for name, kind, _ in COLUMNS}
NAMES = frozenset(TYPES)
ENCODED = [name for name, kind, _ in COLUMNS if kind == _NAME]  # columns of few distinct strings, held as Arrow dictionaries
DICTIONARIES = frozenset(ENCODED) | {
    "step", "rank", "shape.list.element", "strides.list.element", "payload_view.list.element", "producer_seq",
}  # fmt: skip
"""Parquet columns that repeat themselves enough for a dictionary."""

SKETCH_BYTES = 8 * LANES
STORED_SKETCH = pa.binary(SKETCH_BYTES)  # the sketch column in a file: little-endian float64, lane by lane

SITES = pa.schema([
    ("site", _INT),  # unique in the rank
    ("frames", pa.list_(pa.string())),  # innermost first, each "file:line in function"
    ("line_text", pa.string()),  # the innermost source line, null where the file could not be read
])  # fmt: skip


def leaf(field: pa.Field) -> str:
    """Return the Parquet path of a column's values."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name


def table(columns: Mapping[str, Any]) -> pa.Table:
    """Build a records table from columns of equal length: name -> list (None is null), NumPy array (1-d; ``sketch``: ``(n,
    64)``), NumPy masked array (masked is null) or Arrow array. Missing columns are null; unknown names are kept. Raises
    ValueError if columns differ in length, or hold what their type cannot."""
    if not columns:
        return RECORDS.empty_table()
    rows = len(next(iter(columns.values())))
    arrays = {}
    for name, kind, _ in COLUMNS:
        values = columns.get(name)
        arrays[name] = pa.nulls(rows, kind) if values is None else _array(values, kind)
    arrays |= {name: _array(values, None) for name, values in columns.items() if name not in NAMES}
    lengths = {name: len(array) for name, array in arrays.items() if len(array) != rows}
    if lengths:
        raise ValueError(f"columns of a records part differ in length: expected {rows}, got {lengths}")
    return pa.table(arrays)


def filled(records: pa.Table, **constants: int) -> pa.Table:
    """Return a records table with the same integer in all rows of a column, for each of some columns."""
    for name, value in constants.items():
        place = records.schema.get_field_index(name)
        field = records.schema.field(place)
        records = records.set_column(place, field, pa.repeat(pa.scalar(value, field.type), records.num_rows))
    return records


def _array(values: Any, kind: pa.DataType | None) -> pa.Array:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values if kind is None else values.cast(kind)
    if kind is not None and pa.types.is_fixed_size_list(kind):
        return _sketches(values)
    if not isinstance(values, np.ndarray):
        return pa.array(values, kind)
    mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    return pa.array(np.ma.getdata(values), kind, mask=mask, from_pandas=False)  # NaN stays NaN, it is not null


def _sketches(values: Any) -> pa.Array:
    """Make the sketch column of an ``(n, 64)`` array, masked or not, or of a list of rows and Nones."""
    if not isinstance(values, np.ndarray):
        matrix = np.zeros((len(values), LANES))
        absent = np.array([row is None for row in values], bool)
        for index in np.flatnonzero(~absent):
            matrix[index] = values[index]
    else:
        matrix = np.asarray(np.ma.getdata(values), np.float64).reshape(len(values), LANES)
        absent = np.asarray(np.ma.getmaskarray(values).any(axis=1), bool)
    flat = pa.array(np.ascontiguousarray(matrix).reshape(-1), from_pandas=False)
    mask = pa.array(absent) if absent.any() else None
    return pa.FixedSizeListArray.from_arrays(flat, LANES, mask=mask)


def statistics(packed: NDArray[np.float64], rows: NDArray[np.integer[Any]], count: int) -> dict[str, Any]:
    """Spread kernel results, float64 ``(k, PACKED)``, over a part's ``count`` rows: ``packed[i]`` belongs to row ``rows[i]``
    (distinct integers), others are null. Return the ten statistics and ``sketch`` as arrays for ``table``, masked where some are
    null."""
    if len(rows) == count and bool((np.diff(rows) == 1).all()):
        return packed_columns(packed)
    full = np.zeros((count, PACKED))
    full[rows] = packed
    absent = np.ones(count, bool)
    absent[rows] = False
    columns = packed_columns(full)
    masked: dict[str, Any] = {name: np.ma.MaskedArray(columns[name], absent) for name in NUMBERS}
    matrix = columns["sketch"]
    masked["sketch"] = np.ma.MaskedArray(matrix, np.broadcast_to(absent[:, None], matrix.shape))
    return masked


def sketch_matrix(column: pa.ChunkedArray | pa.Array) -> NDArray[np.float64]:
    """Return a sketch column as float64 ``(n, 64)``, NaN in the rows that are null."""
    parts = []
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        matrix, there = sketch_rows(chunk)
        parts.append(matrix if there is None else np.where(there[:, None], matrix, np.nan))
    return np.concatenate(parts) if parts else np.empty((0, LANES))


def sketch_rows(chunk: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_] | None]:
    """Return a chunk of the sketch column where it lies, float64 ``(n, 64)``, and which rows are not null; None: all."""
    start = chunk.offset * LANES  # ``values`` ignores the offset of a slice
    values = chunk.values.slice(start, len(chunk) * LANES).to_numpy(zero_copy_only=False)
    there = chunk.is_valid().to_numpy(zero_copy_only=False) if chunk.null_count else None
    return values.reshape(len(chunk), LANES), there


def stored_sketches(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return sketches as a part holds them: 512 bytes each, which Parquet reads three times as fast as a list."""
    return _reinterpreted(column, STORED_SKETCH)


def read_sketches(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return sketches of a part as `RECORDS` has them."""
    return _reinterpreted(column, RECORDS.field("sketch").type)


def _reinterpreted(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Take the same bytes for another type of fixed width; null rows hold whatever they held."""
    to_bytes = pa.types.is_fixed_size_binary(kind)
    chunks = []
    for chunk in column.chunks:
        at, rows, valid = chunk.offset, len(chunk), chunk.buffers()[0] if chunk.null_count else None
        if to_bytes:
            lanes = chunk.values.fill_null(np.nan) if chunk.values.null_count else chunk.values
            held = lanes.buffers()[1], lanes.offset * SKETCH_BYTES // LANES
            whole = held[0].slice(held[1])
            chunks.append(pa.Array.from_buffers(kind, rows, [valid, whole], chunk.null_count, at))
        else:
            lanes = pa.Array.from_buffers(pa.float64(), (at + rows) * LANES, [None, chunk.buffers()[1]])
            chunks.append(pa.Array.from_buffers(kind, rows, [valid], chunk.null_count, at, [lanes]))
    return pa.chunked_array(chunks, kind)
