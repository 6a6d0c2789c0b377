"""From arguments and results to slots: which tensors a call has, how they are described and measured, what else it was given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base import core

from trueup.foundation import kernels
from trueup.foundation.toml import packaged
from trueup.recording.recorder import Slot, Statistics, Tensor, rows
from trueup.recording.recorder.arguments import MAX_DEPTH, Arguments, key_text
from trueup.recording.recorder.rows import is_contiguous

FACTS: dict[str, Any] = packaged("trueup.recording.adapters.paddle", "facts.toml")
NamedTensors = list[tuple[str, paddle.Tensor]]


def named_tensors(prefix: str, args: Any, kwargs: dict[str, Any] | None = None) -> NamedTensors:
    """Return ``(slot, tensor)`` for every tensor in nested lists, tuples and dicts: ``input.0``, ``input.2.1``, ``input.x``. A
    result that is one tensor is ``output.0``. Tensors that hold nothing stand for an argument that was not given."""
    found: NamedTensors = []
    if isinstance(args, paddle.Tensor):
        if holds(args):
            found.append((f"{prefix}.0", args))
    else:
        _walk(prefix, args, found, 0)
    if kwargs:
        _walk(prefix, kwargs, found, 0)
    return found


def holds(value: Any) -> bool:
    """Tell whether a value is a tensor that holds something: asking an undefined one for its dtype crashes Paddle 3.3. A tensor
    without elements still has a shape; one of shape ``[0]`` it stands for an argument that was not given."""
    if not isinstance(value, paddle.Tensor):
        return False
    if value._is_initialized():
        return True
    return bool(value.is_dense()) and len(shape := value.shape) > 1 and 0 in shape


def _walk(prefix: str, value: Any, found: NamedTensors, depth: int) -> None:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    elif hasattr(type(value), "__dataclass_fields__"):
        items = ((name, getattr(value, name, None)) for name in value.__dataclass_fields__)
    else:
        return
    for key, item in items:
        if isinstance(item, paddle.Tensor):
            if holds(item):
                found.append((f"{prefix}.{key_text(key)}", item))
        elif depth < MAX_DEPTH and (isinstance(item, (tuple, list, dict)) or hasattr(type(item), "__dataclass_fields__")):
            _walk(f"{prefix}.{key_text(key)}", item, found, depth + 1)


def lists_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an argument is a list of several tensors: it has one slot with several gradients (see `gradients`)."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (tuple, list)) and len(value) > 1 and any(isinstance(v, paddle.Tensor) for v in value):
            return True
    return False


# ------------------------------------------------------------------------------------------------------------ description
class Layout:
    """How a dense tensor lies in memory and what its rows say of it: one object for all tensors that look alike."""

    __slots__ = ("contiguous", "described", "host_kind", "numel", "shape", "slots", "strides", "view")

    def __init__(self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], device: str) -> None:
        self.shape, self.strides = shape, strides
        self.numel = math.prod(shape)
        self.described = Tensor(dtype, shape, strides, device, self.numel)
        self.contiguous = is_contiguous(shape, strides)
        self.view = (dtype, self.numel) if self.contiguous else (dtype, shape, strides)
        """What is shown: equal for layouts that show the same elements in the same order."""
        self.host_kind = kernels.KINDS.get(dtype) if device == "cpu" else None
        """Number by which the compiled kernel knows the dtype; None where that kernel cannot read the tensor."""
        self.slots: dict[str, Slot] = {}

    def slot(self, name: str) -> Slot:
        """Return the one `Slot` of this name and layout."""
        found = self.slots.get(name)
        if found is None:
            found = self.slots[name] = Slot(name, self.described)
        return found


MAX_LAYOUTS = 1 << 15
_LAYOUTS: dict[tuple[Any, ...], Layout] = {}
_DTYPES: dict[Any, str] = {}


def dtype_name(dtype: Any) -> str:
    """Return ``float32`` for ``paddle.float32``."""
    name = _DTYPES.get(dtype)
    if name is None:
        name = _DTYPES[dtype] = str(dtype).rpartition(".")[2]
    return name


def device_name(tensor: paddle.Tensor) -> str:
    """Return ``cpu``, ``gpu:0``, ``npu:1`` ...: what stands in ``Place(...)``."""
    place = tensor.place
    if place.is_cpu_place():
        return "cpu"
    text = str(place)
    return text[text.find("(") + 1 : text.rfind(")")] if "(" in text else text


def layout_of(tensor: paddle.Tensor) -> Layout | None:
    """Return the layout of a dense tensor in the memory of one device; None of any other (sparse, distributed, selected rows)."""
    if not tensor.is_dense() or tensor.is_dist():
        return None
    key = (dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.get_strides()), device_name(tensor))
    found = _LAYOUTS.get(key)
    if found is None:
        if len(_LAYOUTS) >= MAX_LAYOUTS:  # sizes that change from step to step
            _LAYOUTS.clear()
        found = _LAYOUTS[key] = Layout(*key)
    return found


def describe(tensor: paddle.Tensor) -> Tensor:
    """Describe any tensor without reading it."""
    shape = [int(size) for size in tensor.shape]
    return Tensor(dtype_name(tensor.dtype), shape, None, device_name(tensor), math.prod(shape))


# ------------------------------------------------------------------------------------------------------- other arguments
PLACES = tuple(
    kind for name in ("Place", "CPUPlace", "CUDAPlace", "CUDAPinnedPlace", "XPUPlace", "CustomPlace", "IPUPlace")
    if isinstance(kind := getattr(core, name, None), type)
)  # fmt: skip
_NAMED = ("DataType", "VarType", "dtype")
"""Classes of Paddle's whose text is their name."""


def is_dtype(value: Any) -> bool:
    """Tell whether a value is a dtype of tensors or of programs."""
    return isinstance(value, paddle.dtype) or type(value).__name__ in _NAMED


_ARGUMENTS = Arguments(paddle.Tensor, PLACES, paddle.Size, is_named=lambda value: isinstance(value, complex) or is_dtype(value))
describe_values = _ARGUMENTS.describe


# ----------------------------------------------------------------------------------------------------------- measurement
_OURS = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


def to_numpy(tensor: paddle.Tensor, layout: Layout) -> NDArray[Any]:
    """View a CPU tensor as NumPy, read only (`Tensor.numpy` copies, and gives bfloat16 as integers); raise `TypeError` for a
    dtype NumPy lacks."""
    dtype = _dtype(layout.described.dtype)
    if not layout.numel:
        return np.empty(layout.shape, dtype)
    raw = np.dtype(f"u{dtype.itemsize}") if layout.described.dtype in _OURS else dtype
    return rows.view(tensor, tensor.data_ptr(), layout.shape, layout.strides, raw).view(dtype)


def in_host_memory(value: Any) -> NDArray[Any] | None:
    """View a dense tensor in host memory as `to_numpy` does; None for anything else."""
    layout = layout_of(value) if holds(value) and value.place.is_cpu_place() else None
    return None if layout is None else to_numpy(value, layout)


@lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    return _OURS.get(name) or np.dtype(name)


def measure(tensor: paddle.Tensor, layout: Layout, detail: str) -> Statistics:
    """Measure a tensor; see `measuring.measure`. One on another place than the CPU is copied there first: the training waits."""
    if layout.described.device != "cpu":
        tensor = tensor.detach().cpu()
        layout = Layout(layout.described.dtype, tuple(tensor.shape), tuple(tensor.get_strides()), "cpu")
    return rows.measure(
        tensor.data_ptr(), layout.host_kind, layout.shape, layout.strides, lambda: to_numpy(tensor, layout), detail
    )
