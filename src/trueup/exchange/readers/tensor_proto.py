"""A TensorProto as an array, believing no size: bytes as they are, or a list of values whose last one fills the rest."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from trueup.exchange.readers.arrays import believable
from trueup.exchange.readers.dump import Array, UnreadableError

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
    """Return the shape.

    Raises:
        UnreadableError: it is none.
    """
    sizes = tuple(int(dim.size) for dim in tensor.tensor_shape.dim[: MAX_DIMENSIONS + 1])
    if tensor.tensor_shape.unknown_rank or len(sizes) > MAX_DIMENSIONS or any(size < 0 for size in sizes):
        raise UnreadableError("its shape is unknown or impossible")
    return sizes


def array_of(tensor: Any) -> Array:
    """Return the elements of a TensorProto.

    Raises:
        UnreadableError: it holds no numbers, or others than it claims.
    """
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
