"""Dumps of single kernels, as CANN's ``acl.json`` and ``torch.npu.set_dump`` write them, read without CANN.

    Pooling.pool1.1147.1589195081588018    8 bytes: length of the header; the header, a protobuf; bytes of inputs, outputs, buffers

The header's message is ``toolkit.dump.DumpData`` of CANN (`messages`). In files of version 1 the whole file is that
message, with the bytes inside. Only sizes that the file has are believed.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trueup.exchange.readers.dump import Array, UnreadableError
from trueup.exchange.readers.messages import MAX_DIMENSIONS, parse, require

MOST = 1 << 26
"""Bytes of a header: it describes tensors of one kernel and holds none."""
DTYPES: dict[int, Any] = {
    1: np.float32, 2: np.float16, 3: np.int8, 4: np.uint8, 5: np.int16, 6: np.uint16, 7: np.int32, 8: np.int64, 9: np.uint32,
    10: np.uint64, 11: np.bool_, 12: np.float64, 16: np.complex64, 17: np.complex128, 18: np.int8, 19: np.int16, 20: np.int32,
    21: np.uint8, 22: np.uint16, 27: ml_dtypes.bfloat16,
}  # fmt: skip
"""OutputDataType of that message."""
FORMATS = {
    0: "NCHW", 1: "NHWC", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 9: "C1HWNC0", 12: "NC1HWC0_C04", 14: "CHWN", 16: "HWCN",
    27: "NDHWC", 29: "FRACTAL_NZ", 30: "NCDHW", 31: "DHWCN", 32: "NDC1HWC0", 33: "FRACTAL_Z_3D", 34: "CN", 35: "NC", 36: "DHWNC",
    47: "NCL",
}  # fmt: skip
"""OutputFormat of that message, those that CANN's manual of dumps converts and their like."""
PLAIN = {"NCHW", "NHWC", "ND", "CHWN", "HWCN", "NDHWC", "NCDHW", "DHWCN", "DHWNC", "CN", "NC", "NCL"}
"""Formats whose elements lie in the order of the shape; in others the device put them into blocks."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a kernel: ``input.0`` or ``output.0``, its values in the shape that the device has."""

    slot: str
    values: Array
    format: str
    """How the device lays it out, ``NC1HWC0``; a number where this table has no name for it."""
    original: tuple[int, ...] = ()
    """The shape in the framework's layout; empty where the dump does not say it."""
    groups: int = 1

    @property
    def private(self) -> bool:
        """Whether its elements lie in blocks."""
        return self.format not in PLAIN


def read(file: Path, *, whole: bool = False) -> list[Tensor]:
    """Read the tensors of a dump; ``whole``: the file is one message (version 1). Raises UnreadableError if it is none, TrueupError
    where ``protobuf`` is missing."""
    require("protobuf", "a dump of kernels")
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
    message = parse("KernelDump", header)
    if not message.input and not message.output:
        raise UnreadableError("its header names no tensor")
    for kind, tensors in (("input", message.input), ("output", message.output)):  # inputs first: so their bytes follow
        for at, one in enumerate(tensors):
            slot, left = f"{kind}.{at}", len(one.data) if stream is None else os.fstat(stream.fileno()).st_size - stream.tell()
            if stream is not None and left < one.size:
                raise UnreadableError(f"{slot} has {left:,} bytes of {one.size:,}: the file is cut off")
            data = one.data if stream is None else stream.read(one.size)
            named = FORMATS.get(one.format, str(one.format))
            yield Tensor(slot, _array(one, data, slot), named, tuple(one.original_shape.dim), max(1, one.sub_format))


def _array(one: Any, data: bytes, slot: str) -> Array:
    dtype, shape = DTYPES.get(one.data_type), list(one.shape.dim)
    if dtype is None:
        raise UnreadableError(f"{slot} has the dtype {one.data_type}, which is no number")
    if len(shape) > MAX_DIMENSIONS or math.prod(shape) * np.dtype(dtype).itemsize > len(data):
        raise UnreadableError(f"{slot} has the shape {shape[:8]} and {len(data):,} bytes")
    return np.frombuffer(data, dtype, math.prod(shape)).reshape(shape)  # a device pads what follows
