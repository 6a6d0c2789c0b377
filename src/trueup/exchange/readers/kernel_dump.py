"""Dumps of single kernels, as CANN's ``acl.json`` and ``torch.npu.set_dump`` write them, read without CANN.

    Pooling.pool1.1147.1589195081588018    8 bytes: length of the header; the header, a protobuf; bytes of inputs, outputs, buffers

The header's message is ``toolkit.dump.DumpData`` of CANN (msprobe's AclDumpMsg.proto): outputs in field 3, inputs in 4. In files of
version 1 the whole file is that message, with the bytes inside. Only sizes that the file has are believed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trueup.exchange.readers.dump import Array, UnreadableError

MOST = 1 << 26
"""Bytes of a header: it describes tensors of one kernel and holds none."""
DTYPES: dict[int, Any] = {
    1: np.float32, 2: np.float16, 3: np.int8, 4: np.uint8, 5: np.int16, 6: np.uint16, 7: np.int32, 8: np.int64, 9: np.uint32,
    10: np.uint64, 11: np.bool_, 12: np.float64, 16: np.complex64, 17: np.complex128, 18: np.int8, 19: np.int16, 20: np.int32,
    21: np.uint8, 22: np.uint16, 27: ml_dtypes.bfloat16,
}  # fmt: skip
"""OutputDataType of that message."""
PLAIN = {0, 1, 2, 14, 16, 27, 30, 31, 34, 35, 47}  # NCHW, NHWC, ND, CHWN, HWCN, NDHWC, NCDHW, DHWCN, CN, NC, NCL
"""Formats whose elements lie in the order of the shape; in others the device put them into blocks."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a kernel: ``input.0`` or ``output.0``, its values in the shape that the device has, and whether that is a private
    format (blocks)."""

    slot: str
    values: Array
    private: bool


def read(file: Path, *, whole: bool = False) -> list[Tensor]:
    """Read the tensors of a dump; ``whole``: the file is one message (version 1). Raises UnreadableError if it is none."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if whole:
                if size > MOST:
                    raise UnreadableError(f"a message of {size:,} bytes is larger than {MOST:,}")
                return list(_tensors(stream.read(), None))
            first = stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 0 < length <= min(size - 8, MOST):
                raise UnreadableError("it does not begin with the length of a header")
            return list(_tensors(stream.read(length), stream))
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from None


def _tensors(header: bytes, stream: Any) -> Iterator[Tensor]:
    kinds: dict[str, list[dict[int, Any]]] = {"input": [], "output": []}
    for number, value in _fields(header):
        if number in (3, 4) and isinstance(value, bytes):
            kinds["output" if number == 3 else "input"].append(_message(value))
    if not any(kinds.values()):
        raise UnreadableError("its header names no tensor")
    for kind, tensors in kinds.items():  # inputs first: so their bytes follow
        for at, one in enumerate(tensors):
            inside, sized = (5, 6) if kind == "output" else (4, 5)
            data = one.get(inside, b"") if stream is None else stream.read(one.get(sized, 0))
            if stream is not None and len(data) != one.get(sized, 0):
                raise UnreadableError(f"{kind}.{at} has {len(data):,} bytes of {one.get(sized, 0):,}: the file is cut off")
            yield Tensor(f"{kind}.{at}", _array(one, data, f"{kind}.{at}"), one.get(2, 2) not in PLAIN)


def _array(one: dict[int, Any], data: bytes, slot: str) -> Array:
    dtype = DTYPES.get(one.get(1, 0))
    if dtype is None:
        raise UnreadableError(f"{slot} has the dtype {one.get(1, 0)}, which is no number")
    shape = [value for number, value in _fields(one.get(3, b"")) for value in _numbers(value) if number == 1]
    width = np.dtype(dtype).itemsize
    if math.prod(shape) * width > len(data):
        raise UnreadableError(f"{slot} has the shape {shape} and {len(data):,} bytes")
    return np.frombuffer(data, dtype, math.prod(shape)).reshape(shape)  # a device pads what follows


def _message(data: bytes) -> dict[int, Any]:
    return dict(_fields(data))


def _numbers(value: Any) -> list[int]:
    """Return numbers that are packed, or one."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: their numbers, and integers or bytes. Raises UnreadableError where it is none."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        width = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            width, at = _varint(data, at)
        if width is None or at + width > len(data):
            raise UnreadableError("it is no protobuf")
        yield key >> 3, data[at : at + width]
        at += width


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise UnreadableError("it is no protobuf")
