"""Dumps of single kernels, as CANN's ``acl.json`` and ``torch.npu.set_dump`` write them, read without CANN.

    Pooling.pool1.1147.1589195081588018    8 bytes: length of the header; the header, a protobuf; bytes of inputs, outputs, buffers

The header's message is ``toolkit.dump.DumpData`` of CANN (`contents`). In files of version 1 the whole file is that
message, with the bytes inside. Only sizes that the file has are believed.

Tensors of a device's private formats in the order of a framework, and back; one rule for all formats.

A format is a list of axes. An axis in two parts, ``C1`` and ``C0``, is a size in blocks: ``C0`` elements, ``C1`` blocks, the last
one padded. Parts that share a dimension are joined by a star. Origin: the drawings of CANN's manual, "Format" of Ascend C.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trueup.exchange.readers.contents import MAX_DIMENSIONS, parse, require
from trueup.exchange.readers.dump import Array, UnreadableError

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


BLOCK = 16
"""Elements of a block that is written: the edge of the device's matrix unit."""
AXES = {
    "NCHW": "N C H W", "NHWC": "N H W C", "CHWN": "C H W N", "HWCN": "H W C N", "NCDHW": "N C D H W", "NDHWC": "N D H W C",
    "DHWCN": "D H W C N", "DHWNC": "D H W N C", "NC1HWC0": "N C1 H W C0", "NC1HWC0_C04": "N C1 H W C0",
    "NDC1HWC0": "N D C1 H W C0", "C1HWNC0": "C1 H W N C0", "FRACTAL_Z": "C1*H*W N1 N0 C0", "FRACTAL_Z_3D": "D*C1*H*W N1 N0 C0",
}  # fmt: skip
NATURAL = "NCDHW"
"""The order in which ND reads axes that have names."""
TARGETS = ("ND", *(name for name in AXES if name in PLAIN), "FRACTAL_Z")


def convert(values: Array, source: str, target: str, shape: tuple[int, ...] = (), groups: int = 1) -> Array:
    """Lay a tensor out as ``target`` has it.

    Args:
        values: any dtype, in the shape that ``source`` gives it.
        shape: sizes in the target's order without the padding of blocks; empty where nobody knows them, and then it stays.
        groups: of a grouped convolution, whose weights share blocks.

    Raises:
        UnreadableError: the formats have different axes, or the shape is not one of these elements.
    """
    if source == target:
        return values
    if source == "FRACTAL_NZ":
        return _matrices(values, shape)
    if source in PLAIN and values.ndim != len(AXES.get(source, "").split()):  # a format of four axes that has none
        source = "ND"
    if source == "ND" and (target == "ND" or (target in PLAIN and values.ndim == len(AXES[target].split()))):
        return values
    if source not in AXES or groups > 1:
        raise UnreadableError(f"{source} of {groups} groups" if groups > 1 else f"no way leads from {source} to {target}")
    found = set(re.findall("[A-Z]", AXES[source]))
    wanted = AXES[target] if target != "ND" else " ".join(axis for axis in NATURAL if axis in found)
    if set(re.findall("[A-Z]", wanted)) != found:
        raise UnreadableError(f"{source} and {target} have different axes")
    order = re.findall("[A-Z](?!0)", wanted)
    named = dict(zip(order, shape, strict=True)) if len(shape) == len(order) else {}
    if shape and not named:
        raise UnreadableError(f"the shape {list(shape)} is not one of {target}")
    return _write(_read(values, AXES[source], order, named), order, wanted)


def _read(values: Array, axes: str, order: list[str], named: Mapping[str, int]) -> Array:
    """Return a tensor in the order of letters, cut to the sizes that they have."""
    parts, sizes = _split(values.shape, axes, named)
    wanted = [part for letter in order for part in (letter, letter + "1", letter + "0") if part in parts]
    apart = values.reshape(sizes).transpose([parts.index(part) for part in wanted])
    whole = {letter: math.prod(size for part, size in zip(parts, sizes, strict=True) if part[0] == letter) for letter in order}
    for letter, size in named.items():
        block = dict(zip(parts, sizes, strict=True)).get(letter + "0", 1)
        if not 0 <= whole[letter] - size < block:
            raise UnreadableError(f"{letter} has {whole[letter]} elements, in blocks of {block}, and the shape says {size}")
    return apart.reshape(list(whole.values()))[tuple(slice(named.get(letter)) for letter in order)]


def _split(shape: tuple[int, ...], axes: str, named: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """Return the parts of a format and their sizes; what shares a dimension needs the sizes that the shape says."""
    dimensions = axes.split()
    if len(dimensions) != len(shape):
        raise UnreadableError(f"its shape {list(shape)} has {len(shape)} dimensions, the format {len(dimensions)}")
    parts: list[str] = []
    sizes: list[int] = []
    for dimension, size in zip(dimensions, shape, strict=True):
        inside = dimension.split("*")
        known = {part: named[part] for part in inside if part in named}
        blocks, left = divmod(size, math.prod(known.values()) or 1)
        if len(known) < len(inside) - 1 or (len(inside) > 1 and left):
            raise UnreadableError(f"the shape of its {', '.join(part for part in inside if len(part) == 1)} is to be named (-s)")
        parts += inside
        sizes += [known.get(part, blocks) for part in inside] if len(inside) > 1 else [size]
    return parts, sizes


def _write(plain: Array, order: list[str], wanted: str) -> Array:
    """Return a tensor in the parts of a format, what fills a block padded with zeros."""
    dimensions = [dimension.split("*") for dimension in wanted.split()]
    flat = [part for inside in dimensions for part in inside]
    sizes, padding = {}, []
    for letter, size in zip(order, plain.shape, strict=True):
        blocked = letter + "0" in flat
        padding.append((0, -size % BLOCK if blocked else 0))
        sizes.update({letter + "1": -(-size // BLOCK), letter + "0": BLOCK} if blocked else {letter: size})
    apart = np.pad(plain, padding).reshape(list(sizes.values())).transpose([list(sizes).index(part) for part in flat])
    return apart.reshape([math.prod(sizes[part] for part in inside) for inside in dimensions])


def _matrices(values: Array, shape: tuple[int, ...]) -> Array:
    """Put matrices of FRACTAL_NZ, (..., columns / C0, rows / N0, N0, C0), together and cut them to the last two sizes."""
    if values.ndim < 4 or not shape:
        raise UnreadableError("FRACTAL_NZ needs four dimensions and the shape that it had (-s)")
    across, down, rows, columns = values.shape[-4:]
    whole = values.reshape(-1, across, down, rows, columns).transpose(0, 2, 3, 1, 4).reshape(-1, down * rows, across * columns)
    height, width = (1, *shape)[-2:]
    fits = 0 <= whole.shape[1] - height < rows and 0 <= whole.shape[2] - width < columns
    if not fits or math.prod(shape[:-2]) != len(whole):
        raise UnreadableError(f"{list(values.shape)} in blocks does not hold the shape {list(shape)}")
    return whole[:, :height, :width].reshape(shape)
