"""From arguments and results to slots: which tensors a call has, how they are described, what else it was given."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import paddle
import xxhash
from paddle.base import core

from trueup import kernels
from trueup.recorder import Slot, Tensor

MAX_DEPTH = 8
"""Nesting that is followed; a structure may contain itself."""
MAX_VALUE_LENGTH = 4000

NamedTensors = list[tuple[str, paddle.Tensor]]


def named_tensors(prefix: str, args: Any, kwargs: dict[str, Any] | None = None) -> NamedTensors:
    """Return ``(slot, tensor)`` for every tensor in nested lists, tuples and dicts: ``input.0``, ``input.2.1``, ``input.x``.

    A result that is one tensor is ``output.0``. Tensors that hold nothing stand for an argument that was not given.
    """
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
    """Tell whether a value is a tensor that holds something: asking an undefined one for its dtype crashes Paddle 3.3.

    One without elements is told by its shape; of shape ``[0]`` it stands for an argument that was not given.
    """
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
                found.append((f"{prefix}.{_key(key)}", item))
        elif depth < MAX_DEPTH and (isinstance(item, (tuple, list, dict)) or hasattr(type(item), "__dataclass_fields__")):
            _walk(f"{prefix}.{_key(key)}", item, found, depth + 1)


def _key(key: Any) -> str:
    """Name a key of a dict; the text of any other object may hold an address."""
    return str(key) if isinstance(key, (str, int, float)) else type(key).__name__


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
        self.contiguous = _is_contiguous(shape, strides)
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


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


# ------------------------------------------------------------------------------------------------------- other arguments

_PLACES = tuple(
    kind for name in ("Place", "CPUPlace", "CUDAPlace", "CUDAPinnedPlace", "XPUPlace", "CustomPlace", "IPUPlace")
    if isinstance(kind := getattr(core, name, None), type)
)  # fmt: skip
_NAMED = ("DataType", "VarType", "dtype")
"""Classes of Paddle's whose text is their name."""
MAX_VALUES = 1 << 12
_VALUES: dict[tuple[Any, ...], str | None] = {}
_EXACT = frozenset({int, bool, str, type(None)})


def describe_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Encode the non-tensor arguments of a call as JSON, or None if there is none.

    Places are left out: they are expected to differ between two runs.
    """
    key: list[Any] = []
    try:
        for k, value in enumerate(args):
            if not isinstance(value, paddle.Tensor):
                key += (k, _frozen(value))
        for name, value in kwargs.items():
            key += (name, None if isinstance(value, paddle.Tensor) else _frozen(value))
    except TypeError:
        return _encode_all(args, kwargs)
    if not key:
        return None
    known = tuple(key)
    try:
        return _VALUES[known]
    except KeyError:
        if len(_VALUES) >= MAX_VALUES:
            _VALUES.clear()
        text = _VALUES[known] = _encode_all(args, kwargs)
        return text


def _frozen(value: Any) -> Any:
    """Return something hashable that is equal for values that are encoded alike.

    Raises:
        TypeError: there is nothing so simple.
    """
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if kind is float:
        return value.hex()  # tells -0.0 from 0.0, and NaN equals itself
    if kind in (tuple, list, paddle.Size):
        return tuple([_frozen(v) for v in value])
    raise TypeError(kind)


def _encode_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    values = {str(k): v for k, v in enumerate(args) if _is_value(v)} | {k: v for k, v in kwargs.items() if _is_value(v)}
    if not values:
        return None
    text = json.dumps({k: _encode(v) for k, v in values.items()}, sort_keys=True)
    if len(text) <= MAX_VALUE_LENGTH:
        return text
    return json.dumps({"length": len(text), "xxh3": xxhash.xxh3_64_hexdigest(text.encode())})


def _is_value(value: Any) -> bool:
    if value is None or isinstance(value, (paddle.Tensor, *_PLACES)):
        return False
    return not (isinstance(value, (tuple, list)) and bool(value) and all(isinstance(v, paddle.Tensor) for v in value))


def _encode(value: Any, depth: int = 0) -> Any:
    if isinstance(value, paddle.Tensor):
        return "tensor"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, str)):
        return int(value) if isinstance(value, int) else str.__str__(value)
    if isinstance(value, _PLACES):
        return None
    if isinstance(value, (tuple, list)) and depth < MAX_DEPTH:
        return [_encode(v, depth + 1) for v in value[:64]]
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return {_key(k): _encode(v, depth + 1) for k, v in list(value.items())[:64]}
    if isinstance(value, (complex, paddle.dtype)) or type(value).__name__ in _NAMED:
        return str(value)
    if isinstance(value, slice):
        plain = all(v is None or isinstance(v, int) for v in (value.start, value.stop, value.step))
        return f"{value.start}:{value.stop}:{value.step}" if plain else "slice of tensors"
    return type(value).__name__  # never repr(): it may be long, hold addresses, or run the user's code
