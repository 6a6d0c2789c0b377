"""Elements and memory: tensors on a place, of any strides, made of recorded elements, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from trueup.recording.adapters.paddle.host import to_numpy as host_view
from trueup.recording.adapters.paddle.tensors import dtype_name, layout_of
from trueup.recording.execution.cases import contiguous
from trueup.recording.execution.decoding import damaged
from trueup.recording.execution.places import NotReplayable

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""Names that a capture may give a dtype."""


def dtype_of(name: Any) -> Any:
    """Return a dtype of Paddle's by its name."""
    return getattr(paddle, name) if name in DTYPES and hasattr(paddle, name) else damaged()


def from_numpy(array: NDArray[Any], place: str) -> paddle.Tensor:
    """Return an array of any dtype of NumPy or ml_dtypes as a tensor on a place; a copy."""
    name = array.dtype.name
    plain = np.array(array, order="C", copy=True)
    if name == "bfloat16":  # Paddle takes its bits as uint16
        return paddle.to_tensor(plain.view(np.uint16), place=place_of(place))
    if name.startswith("float8"):
        return paddle.to_tensor(plain.view(np.uint8), place=place_of(place)).view(name)
    return paddle.to_tensor(plain, dtype=name, place=place_of(place))


def to_numpy(tensor: paddle.Tensor) -> NDArray[Any]:
    """Return the elements of a dense tensor on any place, C order, in the dtype of NumPy or ml_dtypes that captures use; a copy.

    Raises:
        NotReplayable: it is no plain array.
    """
    if not tensor.is_dense() or tensor.is_dist():
        raise NotReplayable("its result is no plain array")
    if not tensor._is_initialized():
        return np.empty(tuple(tensor.shape), np.dtype(dtype_name(tensor.dtype)))
    host = tensor.detach()
    host = host if host.place.is_cpu_place() else host.cpu()
    layout = layout_of(host)
    assert layout is not None
    return np.array(host_view(host, layout), order="C", copy=True)


def place_of(device: str) -> Any:
    """Return a place of Paddle's by the name that captures and `paddle.set_device` give it."""
    kind, _, number = device.partition(":")
    index = int(number) if number.isdigit() else 0
    if kind == "cpu":
        return paddle.CPUPlace()
    if kind in ("gpu", "cuda"):
        return paddle.CUDAPlace(index)
    if kind == "xpu":
        return paddle.XPUPlace(index)
    return paddle.CustomPlace(kind, index)


def buffer(
    parts: Sequence[tuple[NDArray[Any], Sequence[int], int]], size: int, dtype: np.dtype[Any]
) -> NDArray[Any]:  # fmt: skip
    """Return memory of some elements in which arrays lie: ``(array, strides, offset)`` each, strides and offset in elements."""
    memory = np.zeros(size, dtype)
    for array, strides, offset in parts:
        if not array.size:
            continue
        steps = [stride * dtype.itemsize for stride in strides]
        window = np.lib.stride_tricks.as_strided(memory[offset:], array.shape, steps)
        window[...] = array
    return memory


def view_of(memory: paddle.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> paddle.Tensor:
    """Return a tensor that shows a part of flat memory; strides and offset in elements."""
    if not offset and tuple(memory.shape) == tuple(shape) and tuple(strides) == contiguous(tuple(shape)):
        return memory
    with paddle.no_grad():
        return paddle.as_strided(memory, list(shape), list(strides), offset * memory.element_size())
