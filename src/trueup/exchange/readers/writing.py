"""Calls of a dump as records of a capture: statistics by our kernels where the tensors are there, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from trueup.exchange.readers.arrays import BROKEN, reason
from trueup.exchange.readers.dump import Array, ForeignCall, ForeignTensor, Frames, UnreadableError
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.numbering import Numbering, Place
from trueup.foundation.kernels import digest, hexadecimal, summarize
from trueup.foundation.model import NUMBERS, PACKED
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Writer, statistics
from trueup.foundation.store.segment import numpy_dtype

ROWS = 8192
"""Rows that wait for a part."""
PAYLOAD = 48 << 20
"""Bytes of payload that wait; one tensor may go beyond."""
FOREIGN = ("foreign_name", "foreign_checksum", "foreign_statistics")
"""Columns of an imported capture beside those of every capture."""

_CALL = ("seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "forward_seq", "site")
_TENSOR = ("dtype", "shape", "strides", "device", "numel", "digest", "payload_segment", "payload_key", "value")
MAX_TEXT = 4096
MAX_VALUE = 4000
MAX_DEPTH = 16
"""Characters and depth of what is kept of a call's arguments."""


@dataclass(slots=True)
class Counts:
    """What was imported."""

    calls: int = 0
    rows: int = 0
    tensors: int = 0
    """Tensors whose bytes were there."""
    measured: int = 0
    """Tensors of which the tool's numbers were there, and no bytes."""
    checksums: int = 0


@dataclass(slots=True)
class _Columns:
    """Rows that wait to be written."""

    values: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in (*_CALL, *_TENSOR, *FOREIGN)})
    packed: list[np.ndarray[Any, Any]] = field(default_factory=list)
    packed_rows: list[int] = field(default_factory=list)
    told: dict[int, Mapping[str, float]] = field(default_factory=dict)
    bytes: int = 0

    def __len__(self) -> int:
        return len(self.values["seq"])


class RankWriter:
    """Writes the calls of one rank.

    Args:
        writer: makes the rank's writer when there is something to write.
        notes: where what cannot be read is said.
        counts: added to.
    """

    def __init__(self, writer: Callable[[], Writer], notes: Notes, counts: Counts) -> None:
        self._make, self._notes, self._counts = writer, notes, counts
        self._writer: Writer | None = None
        self._sites: dict[Frames, int] = {}
        self._rows = _Columns()

    @property
    def writer(self) -> Writer:
        """The rank's writer."""
        if self._writer is None:
            self._writer = self._make()
        return self._writer

    def add(self, step: int, call: ForeignCall, place: Place, numbering: Numbering) -> None:
        """Add a call, or a piece of one."""
        shared = {
            "seq": place.seq, "parent": numbering.seq(call.parent), "phase": call.phase, "level": call.level,
            "scope": _text(call.scope), "op": _text(call.op), "ordinal": place.ordinal,
            "forward_seq": numbering.seq(call.forward), "site": self._site(call.frames),
        }  # fmt: skip
        for tensor in call.tensors:
            self._add_tensor(shared, tensor)
            if len(self._rows) >= ROWS or self._rows.bytes >= PAYLOAD:
                self.flush(step)
        if call.arguments or not call.tensors:
            self._add(shared, slot="arguments", value=_encoded(call.arguments) if call.arguments else None)

    def flush(self, step: int) -> None:
        """Write the rows that wait."""
        rows, self._rows = self._rows, _Columns()
        if not len(rows):
            return
        columns: dict[str, Any] = dict(rows.values)
        for name in FOREIGN:
            columns[name] = pa.array(columns[name], pa.string())
        packed = np.array(rows.packed).reshape(-1, PACKED)
        columns |= _with_told(statistics(packed, np.array(rows.packed_rows, np.int64), len(rows)), rows.told)
        self.writer.write_records(step, columns)
        self._counts.rows += len(rows)

    def close(self, told: Mapping[str, Any]) -> None:
        """Write the last of it, and as notes, which every report shows, what was lost, what such a dump lacks, what else is."""
        for sentence in self._notes.lost:
            self.writer.note(f"lost: {sentence}")
        for sentence in (*told["lacks"], *self._notes.said):
            self.writer.note(f"imported from {told['tool']}: {sentence}")
        self.writer.update(imported=dict(told))
        self.writer.close()

    def _site(self, frames: Frames | None) -> int | None:
        if frames is None:
            return None
        number = self._sites.get(frames)
        if number is None:
            number = self._sites[frames] = len(self._sites)
            self.writer.add_sites([(number, [_text(frame) or "" for frame in frames[0]], _text(frames[1]))])
        return number

    def _add(self, shared: Mapping[str, Any], **fields: Any) -> int:
        row = {**shared, **fields}
        for name, values in self._rows.values.items():
            values.append(row.get(name))
        return len(self._rows) - 1

    def _add_tensor(self, shared: Mapping[str, Any], tensor: ForeignTensor) -> None:
        array = self._read(tensor)
        dtype = tensor.dtype if array is None else array.dtype.name
        shape = tensor.shape if array is None else array.shape
        fields: dict[str, Any] = {
            "slot": _text(tensor.slot), "dtype": _text(dtype), "shape": shape, "strides": tensor.strides,
            "device": tensor.device, "value": _text(tensor.value),
            "foreign_name": _text(tensor.name), "foreign_checksum": tensor.checksum,
            "foreign_statistics": _text(tensor.told) if array is None else None,
            "numel": None if shape is None else min(math.prod(shape), 2**63 - 1),
        }  # fmt: skip
        if tensor.checksum is not None:
            self._counts.checksums += 1
        if array is None:
            row = self._add(shared, **fields)
            if tensor.statistics:
                self._rows.told[row] = tensor.statistics
                self._counts.measured += 1
            return
        number = digest(array)
        fields["digest"] = hexadecimal(number)
        raw = np.ascontiguousarray(array).reshape(-1)
        if _is_mapped(raw):
            raw = raw.copy()  # it is kept until the segment is written, and the file may change
        segment, key = self.writer.add_payload(fields["digest"], array.dtype.name, array.shape, raw.view(np.uint8))
        row = self._add(shared, **fields, payload_segment=segment, payload_key=key)
        self._rows.packed.append(self._measured(array))
        self._rows.packed_rows.append(row)
        self._rows.bytes += raw.nbytes
        self._counts.tensors += 1

    def _measured(self, array: Array) -> np.ndarray[Any, Any]:
        out = np.empty(PACKED)
        summarize(array, out)
        return out

    def _read(self, tensor: ForeignTensor) -> Array | None:
        """Read a tensor; one that cannot be had leaves its row, and a note."""
        if tensor.load is None:
            if tensor.shape is not None and 0 in tensor.shape and tensor.dtype is not None:
                return _empty(tensor)
            return None
        try:
            array = tensor.load()
            summarize(array.reshape(-1)[:0], np.empty(PACKED))  # refuses dtypes that hold no numbers
        except UnreadableError as error:
            self._notes.lose(f"tensors could not be read: {error}", tensor.name)
            return None
        except BROKEN as error:
            self._notes.lose(f"tensors could not be read: {reason(error)}", tensor.name)
            return None
        if tensor.shape is not None and array.shape != tensor.shape and array.size == math.prod(tensor.shape):
            self._notes.say("tensors lie in their files in another shape than the dump says; they have the dump's", tensor.name)
            return array.reshape(tensor.shape)
        if tensor.shape not in (None, array.shape):
            self._notes.lose("files hold a tensor of another shape than the dump says; they were left out", tensor.name)
            return None
        if tensor.dtype not in (None, array.dtype.name):
            self._notes.say(f"tensors of {tensor.dtype} lie in their files as {array.dtype.name}", tensor.name)
        return array


def _encoded(arguments: Mapping[str, Any]) -> str:
    """Encode arguments as a native capture does: numbers that JSON has not are text, what is too long is told by its digest."""
    text = json.dumps(redacted({key: _finite(value) for key, value in arguments.items()}), sort_keys=True, default=str)
    if len(text) <= MAX_VALUE:
        return text
    return json.dumps({"length": len(text), "xxh3": xxhash.xxh3_64_hexdigest(text.encode("utf-8", "replace"))})


def _finite(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_finite(one, depth + 1) for one in value] if depth < MAX_DEPTH else "list"
    if isinstance(value, dict):
        return {str(key): _finite(one, depth + 1) for key, one in value.items()} if depth < MAX_DEPTH else "dict"
    return value


def _is_mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def _empty(tensor: ForeignTensor) -> Array | None:
    """A tensor without elements is known as a whole."""
    try:
        return np.empty(tensor.shape or (0,), numpy_dtype(str(tensor.dtype)))
    except (TypeError, ValueError):
        return None


def _with_told(columns: dict[str, Any], told: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Add the numbers that the tool gave to the columns that the kernels filled."""
    for name in NUMBERS:
        given = {row: numbers[name] for row, numbers in told.items() if name in numbers}
        values, absent = np.ma.getdata(columns[name]), np.ma.getmaskarray(np.ma.asarray(columns[name])).copy()
        if given:
            absent[list(given)] = False
            values[list(given)] = list(given.values())
        columns[name] = np.ma.MaskedArray(values, absent)
    return columns


def _text(text: str | None, limit: int = MAX_TEXT) -> str | None:
    """Return text as a table can hold it."""
    if text is None:
        return None
    return text[:limit].encode("utf-8", "replace").decode("utf-8")
