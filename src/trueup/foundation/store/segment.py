"""Payload segments: tensors in safetensors files, read in place, and a segment that is being filled.

The layout is that of safetensors (8 bytes of header length, a JSON header, the data), written and checked by Trueup because
a capture must be durable on the way out and is not trusted on the way in. A dtype that safetensors does not know is
stored as bytes (U8), its true dtype and shape in the file's metadata under the tensor's key.

Tensors that lie next to one another in memory, as the recorder's do, are one *run*: one write, past the page cache where the header
is as long as that takes (`durable`). The others follow in single writes, widest elements first, so that all are aligned.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trueup.foundation.model import TrueupError
from trueup.foundation.store import durable

HEADER_LIMIT = 100_000_000  # longest header, as in safetensors

SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3",
    "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32",
    "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip
"""Names of dtypes in safetensors since its first release that had them; the rest travels as bytes."""
_PLAIN = {stored: name for name, stored in SAFETENSORS.items()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a record's ``dtype``; raises TypeError if neither NumPy nor ml_dtypes has it."""
    if name in ("complex64", "complex128") or (name in SAFETENSORS and not hasattr(ml_dtypes, name)):
        return np.dtype(name)
    if name.startswith(("bfloat16", "float4", "float6", "float8", "int2", "int4", "uint2", "uint4")):
        kind = getattr(ml_dtypes, name, None)
        if isinstance(kind, type):
            return np.dtype(kind)
    raise TypeError(f"dtype {name!r} is unknown to NumPy and ml_dtypes")


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment on disk, mapped into memory."""

    path: Path
    data: memoryview
    header: dict[str, Any]

    def check(self) -> None:
        """Raise TrueupError if some tensor lies beyond the end of the file."""
        ends = [e["data_offsets"][1] for k, e in self.header.items() if k != "__metadata__" and _has_offsets(e)]
        if max(ends, default=0) > len(self.data):
            raise TrueupError(
                f"{self.path} is truncated: expected {max(ends)} bytes of data, got {len(self.data)}; record it again"
            )

    def place(self, key: str) -> tuple[int, int]:
        """Return where a tensor's bytes begin and end in the file; raises as `tensor` does."""
        size, whole = self._whole(key).nbytes, self.path.stat().st_size - len(self.data)
        start = whole + int(self.header[key]["data_offsets"][0])
        return start, start + size

    def tensor(self, key: str, view: Sequence[int] | None = None) -> NDArray[Any]:
        """Return a tensor, or its part ``view`` (offset, sizes, strides in elements), as a read-only array over the file. Raises
        TrueupError if the segment does not hold it, or its entry or the view is damaged."""
        whole = self._whole(key)
        if view is None:
            return whole
        try:
            return _part(whole, [int(number) for number in view])
        except (TypeError, ValueError) as error:
            raise TrueupError(f"{self.path}: the view of tensor {key!r} is damaged ({error}); record it again") from None

    def _whole(self, key: str) -> NDArray[Any]:
        entry = self.header.get(key)
        if entry is None or key == "__metadata__":
            raise TrueupError(f"{self.path} holds no tensor {key!r}: the capture is damaged; record it again")
        try:
            dtype, shape, begin, end = _entry(entry, self.header.get("__metadata__"), key)
            if not 0 <= begin <= end <= len(self.data) or math.prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"shape {shape} and bytes {begin} to {end} of {len(self.data)} do not fit")
            return np.frombuffer(self.data[begin:end], np.uint8).view(dtype).reshape(shape)
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise TrueupError(f"{self.path}: the entry of tensor {key!r} is damaged ({error}); record it again") from None


def _part(whole: NDArray[Any], view: list[int]) -> NDArray[Any]:
    offset, count = view[0] if view else -1, len(view) // 2
    sizes, strides = view[1 : 1 + count], view[1 + count :]
    if len(sizes) != len(strides) or count > 64 or min(view) < 0:
        raise ValueError(f"expected an offset, and as many strides as sizes, got {view[:129]}")
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if math.prod(sizes) > whole.size or (0 not in sizes and last >= whole.size):
        raise ValueError(f"{view} reaches beyond its {whole.size} elements")
    start = whole.reshape(-1)[offset:] if 0 not in sizes else whole.reshape(-1)[:0]
    bytes_of = [stride * whole.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(start, sizes, bytes_of, writeable=False)


def _has_offsets(entry: Any) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int


def _entry(entry: Any, metadata: Any, key: str) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    begin, end = entry["data_offsets"]
    shape, name = entry["shape"], _PLAIN[entry["dtype"]]
    if isinstance(metadata, dict) and key in metadata:
        true = json.loads(metadata[key])
        shape, name = true["shape"], true["dtype"]
    sizes = [begin, end, *shape]
    if len(sizes) > 66 or not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError("sizes are not natural numbers")
    return numpy_dtype(name), tuple(shape), begin, end


def open_segment(path: Path) -> Segment:
    """Map a segment and read its header; raises TrueupError if it is damaged, OSError if it cannot be opened."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 8:
            raise TrueupError(f"{path} is truncated: expected a safetensors header, got {size} bytes; record it again")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    length = int.from_bytes(mapped[:8], "little")
    if length > min(size - 8, HEADER_LIMIT):
        raise TrueupError(f"{path} is truncated: its header claims {length} bytes, the file has {size}; record it again")
    try:
        header = json.loads(bytes(mapped[8 : 8 + length]))
        if not isinstance(header, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise TrueupError(f"{path}: the header is damaged ({error}); record it again") from None
    return Segment(path, mapped[8 + length :], header)


ALIGNMENT = 8  # bytes to which data is aligned: the widest element that safetensors knows

Entry = tuple[str, str, tuple[int, ...], memoryview]  # key, dtype, sizes and bytes of a tensor


@dataclass(slots=True)
class PendingSegment:
    """A segment that is being filled, in memory."""

    name: str
    size: int = 0
    _run: list[Entry] = field(default_factory=list)
    _begin: int = 0
    _end: int = 0  # where the run lies in memory
    _others: list[Entry] = field(default_factory=list)

    @property
    def tensors(self) -> list[Entry]:
        """What it holds, in the order of the file."""
        return self._run + sorted(self._others, key=lambda tensor: -_width(tensor[1]))

    def full(self, start: int, size: int) -> bool:
        """Whether ``size`` bytes at the address ``start`` would end a run that is worth a write of its own."""
        return self._large and start != self._end and _may_run(start, size)

    def add(self, key: str, dtype: str, shape: tuple[int, ...], raw: memoryview, start: int) -> None:
        """Take a tensor's bytes, which lie at the address ``start``; they must not change until the segment is written."""
        entry = (key, dtype, shape, raw)
        self.size += raw.nbytes
        if not _may_run(start, raw.nbytes):
            self._others.append(entry)
            return
        if start != self._end:
            self._others += self._run
            self._run, self._begin = [], start
        self._run.append(entry)
        self._end = start + raw.nbytes

    @property
    def _large(self) -> bool:
        return self._end - self._begin >= durable.LARGE

    def chunks(self) -> Iterator[Any]:
        """Yield the file's bytes: length and header, the run, then each other tensor."""
        ordered = self.tensors
        text = _header(ordered)
        text += b" " * (-len(text) % ALIGNMENT)
        run = None
        if self._large:
            run = _Memory(self._begin, self._end - self._begin).view()
            text += b" " * ((self._begin - 8 - len(text)) % durable.BLOCK)
        yield len(text).to_bytes(8, "little") + text
        if run is not None:
            yield run
        for _, _, _, raw in ordered if run is None else ordered[len(self._run) :]:
            yield raw


class _Memory:
    """A range of memory, for NumPy to look at; whoever looks keeps what lies there alive."""

    __slots__ = ("__array_interface__",)

    def __init__(self, start: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (start, True)}

    def view(self) -> memoryview:
        """Return its bytes, read only."""
        array: NDArray[np.uint8] = np.asarray(self)
        return array.data


def _may_run(start: int, size: int) -> bool:
    """Whether the next tensor could follow without a gap and be aligned."""
    return size > 0 and size % ALIGNMENT == 0 and start % ALIGNMENT == 0


def _header(ordered: list[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "trueup"}}
    begin = 0
    for key, dtype, shape, raw in ordered:
        end = begin + raw.nbytes
        stored = SAFETENSORS.get(dtype)
        if stored is None:
            header["__metadata__"][key] = json.dumps({"dtype": dtype, "shape": shape})
            shape = (raw.nbytes,)
        header[key] = {"dtype": stored or "U8", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return json.dumps(header, separators=(",", ":")).encode()


def _width(dtype: str) -> int:
    try:
        return int(numpy_dtype(dtype).itemsize)
    except TypeError:
        return 1
