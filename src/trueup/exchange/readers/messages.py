"""Protocol buffers of TensorFlow's debuggers and CANN's dumps, read without either: a table of their fields, made into classes by
``protobuf``. A message takes memory in proportion to its file, for fields that the table lacks stay bytes; beyond `MOST` it is
refused. A TensorProto becomes an array without believing a size: bytes as they are, or a list of values whose last one fills the
rest."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from trueup.exchange.readers.arrays import believable
from trueup.exchange.readers.dump import Array, UnreadableError
from trueup.foundation import toml
from trueup.foundation.model import TrueupError

MOST = 1 << 30  # bytes of a message; protobuf itself ends at 2 GiB
PACKAGE = "trueup.messages"


def parse(message: str, data: bytes) -> Any:
    """Read a message of ``messages.toml``; raises UnreadableError if it is none or too large."""
    if len(data) > MOST:
        raise UnreadableError(f"a message of {len(data):,} bytes is larger than {MOST:,}")
    found = _classes()[message]()
    try:
        found.ParseFromString(data)
    except Exception as error:  # noqa: BLE001 - DecodeError is another class in each implementation of protobuf
        raise UnreadableError(f"it is no {message}: {str(error)[:80]}") from None
    return found


def text(value: bytes) -> str:
    """Return text as protobuf holds it."""
    return value.decode("utf-8", "replace")


def require(extra: str, what: str, *modules: str) -> None:
    """Say what is to be installed, where it is not; raises TrueupError."""
    if any(importlib.util.find_spec(name) is None for name in ("google", "google.protobuf", *modules)):
        raise TrueupError(f"{what} cannot be read without protobuf.\n  next:     pip install '{extra}'")


@cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="trueup_messages.proto", package=PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    table = toml.packaged(__package__, "messages.toml")
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.removesuffix("[]")
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if kind.endswith("[]") else kinds.LABEL_OPTIONAL
            if plain[0].isupper():
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{plain}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    # before 4.22 a factory makes the classes: CANN's own compiler keeps protobuf 3.20
    make = getattr(message_factory, "GetMessageClass", None) or message_factory.MessageFactory(pool).GetPrototype
    return {name: make(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in table}


DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64", 10: "bool", 11: "int8",
    12: "uint8", 13: "int32", 14: "bfloat16", 15: "int16", 16: "uint16", 17: "uint16", 18: "complex128", 19: "float16",
    22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip
"""DataType of tensorflow/core/framework/types.proto; quantised ones by the integers that they hold. A reference adds 100."""
NO_NUMBERS = {7: "text", 20: "a handle", 21: "a variant"}
_VALUES = {
    "float32": "float_val", "float64": "double_val", "int32": "int_val", "uint8": "int_val", "int16": "int_val", "int8": "int_val",
    "uint16": "int_val", "int64": "int64_val", "bool": "bool_val", "bfloat16": "half_val", "float16": "half_val",
    "uint32": "uint32_val", "uint64": "uint64_val", "complex64": "scomplex_val", "complex128": "dcomplex_val",
}  # fmt: skip
_HALVES = ("bfloat16", "float16")
MAX_DIMENSIONS = 64


def dtype_of(number: int) -> str | None:
    """Return the name of a DataType, None of one that holds no numbers."""
    return DTYPES.get(number % 100)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape; raises UnreadableError if it is none."""
    sizes = tuple(int(dim.size) for dim in tensor.tensor_shape.dim[: MAX_DIMENSIONS + 1])
    if tensor.tensor_shape.unknown_rank or len(sizes) > MAX_DIMENSIONS or any(size < 0 for size in sizes):
        raise UnreadableError("its shape is unknown or impossible")
    return sizes


def array_of(tensor: Any) -> Array:
    """Return the elements of a TensorProto; raises UnreadableError if it holds no numbers, or others than it claims."""
    name = dtype_of(tensor.dtype)
    if name is None:
        raise UnreadableError(f"it holds {NO_NUMBERS.get(tensor.dtype % 100, f'dtype {tensor.dtype}')}, no numbers")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    shape = shape_of(tensor)
    count = math.prod(shape)
    raw = tensor.tensor_content or (tensor.float8_val if name.startswith("float8") else b"")
    if raw:
        if len(raw) != count * dtype.itemsize:
            raise UnreadableError(f"its shape claims {count * dtype.itemsize:,} bytes, {len(raw):,} are there")
        return np.frombuffer(raw, dtype.newbyteorder("<") if dtype.isbuiltin else dtype).reshape(shape)
    values = _values(tensor, name, dtype)
    if not count:
        return np.empty(shape, dtype)
    if not len(values) or len(values) > count:
        raise UnreadableError(f"its shape claims {count:,} elements, {len(values):,} are there")
    believable(count * dtype.itemsize, len(values) * dtype.itemsize)
    found = np.empty(count, dtype)
    found[: len(values)], found[len(values) :] = values, values[-1]
    return found.reshape(shape)


def _values(tensor: Any, name: str, dtype: np.dtype[Any]) -> Array:
    held = getattr(tensor, _VALUES.get(name, ""), ())
    if name.startswith("complex"):
        pairs = np.array(held, np.float32 if name == "complex64" else np.float64)
        return pairs[: len(pairs) // 2 * 2].view(dtype)
    if name in _HALVES:
        return np.array(held, np.int64).astype(np.uint16).view(dtype)
    return np.array(held, np.int64 if name.startswith("int") else None).astype(dtype)
