"""What the old tools' files have in common: tensors as NumPy can hold them, statistics as PyTorch reduces, stacks as lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.doors.report.slot_pairs import COUNTS, REDUCED, reduced
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture

Row = dict[str, Any]


def calls_of(table: pa.Table) -> Iterator[list[Row]]:
    """Yield the rows of each call."""
    call: list[Row] = []
    for row in table.to_pylist():
        if call and row["seq"] != call[0]["seq"]:
            yield call
            call = []
        call.append(row)
    if call:
        yield call


def payload_of(capture: Capture, rank: int, row: Row) -> Any | None:
    """Return the elements of a row's tensor, None where they were not kept or cannot be read."""
    if row["payload_segment"] is None:
        return None
    try:
        place = (row[name] for name in ("payload_segment", "payload_key", "payload_view", "digest"))
        return capture.payload(rank, *place).reshape(row["shape"])
    except (TrueupError, ValueError):  # what of it was kept is said by the native capture
        return None


def savable(array: Any) -> Any:
    """Return what NumPy's own dtypes can hold: bfloat16 and narrower floats as float32, as the tool saves them."""
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)


def numbers_of(row: Mapping[str, Any], *, norm: bool) -> list[float]:
    """Return max, min, mean and, with ``norm``, the l2 norm, as PyTorch's reductions give them; empty where they mean nothing."""
    if row["max"] is None or row["dtype"] == "bool" or row["dtype"].startswith("complex") or not row["numel"]:
        return []
    found = [float(row[name]) for name in REDUCED]
    if any(row[name] for name in COUNTS):  # of the many rows of a dump few have such elements
        found = reduced(row).tolist()
    return found if norm else found[:3]


_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) in (?P<function>.*)", re.DOTALL)


def frames_of(frames: Sequence[str], text: str | None) -> list[list[str | None]]:
    """Return a stack as the tool writes it: file, line, function, code; the code is known of the innermost frame."""
    found = (_FRAME.fullmatch(frame) for frame in frames)
    places = [(m["file"], m["line"], m["function"]) for m in found if m]
    return [[*place, text if k == 0 else None] for k, place in enumerate(places)]
