"""Slots of one rank as pieces, by their rows; and the rows of slots that are put together."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.layout.calls import Calls
from trueup.comparison.layout.pieces import Array, Piece, Statistics
from trueup.foundation.model import NUMBERS
from trueup.foundation.store import Capture, table


def piece_of(capture: Capture, calls: Calls, rank: int, at: int) -> Piece | None:
    """Return a recorded slot of a rank, by its row; None where it holds no tensor."""
    row = calls.rows[at]
    if row["dtype"] is None or row["shape"] is None:
        return None
    measured = row["n_nan"] is not None
    numbers = Statistics(row["min"], row["max"], row["mean"], row["l2"], tuple(row[n] for n in NUMBERS[4:])) if measured else None
    sketch = calls.sketches[at] if measured and not np.isnan(calls.sketches[at][0]) else None
    shape = tuple(row["shape"])
    load = functools.partial(_bytes, capture, rank, row, shape) if row["payload_segment"] is not None else None
    return Piece(row["dtype"], shape, row["digest"], numbers, sketch, load)


def _bytes(capture: Capture, rank: int, row: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    found = capture.payload(rank, row["payload_segment"], row["payload_key"], row["payload_view"], row["digest"])
    return found.reshape(shape)


def statistics_of(packed: Array) -> Statistics:
    """Return what the kernel measured."""
    low, high, mean, l2 = map(float, packed[:4])
    return Statistics(low, high, mean, l2, tuple(int(count) for count in packed[4 : len(NUMBERS)]))


def columns_of(piece: Piece) -> dict[str, Any]:
    """Return what a record says of a tensor that was put together."""
    numbers = piece.numbers
    told: dict[str, Any] = dict.fromkeys(NUMBERS) | {"digest": piece.digest, "sketch": piece.sketch, "value": None, "strides": None}
    if numbers is not None:
        told |= dict(zip(NUMBERS, (numbers.low, numbers.high, numbers.mean, numbers.l2, *numbers.counts), strict=True))
    return told | {"shape": list(piece.shape), "numel": piece.numel}


def nothing_known() -> dict[str, Any]:
    """Return the columns of a slot of which nothing is known."""
    place = dict.fromkeys(("payload_segment", "payload_key", "payload_view"))
    return dict.fromkeys(NUMBERS) | {"digest": None, "sketch": None, "value": None} | place


def records_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Return rows as a table."""
    names = dict.fromkeys(name for row in rows for name in row)
    return table({name: [row.get(name) for row in rows] for name in names})
