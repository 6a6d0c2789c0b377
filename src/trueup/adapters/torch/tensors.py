"""From arguments and results to slots: which tensors a call has, how they are described, what else it was given."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import torch

from trueup.recorder.recorder import Tensor

MAX_VALUE_LENGTH = 4000
_DTYPES: dict[torch.dtype, str] = {}
_DEVICES: dict[torch.device, str] = {}


def named_tensors(prefix: str, args: Any, kwargs: dict[str, Any] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(slot, tensor)`` for every tensor in nested lists, tuples and dicts: ``input.0``, ``input.2.1``, ``input.weight``.

    A result that is one tensor is ``output.0``. Written as plain loops: pytree costs 30 times as much per call.
    """
    if isinstance(args, torch.Tensor):
        yield f"{prefix}.0", args
    else:
        yield from _walk(prefix, args)
    if kwargs:
        yield from _walk(prefix, kwargs)


def _walk(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    items: Any
    if isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        items = ((name, getattr(value, name, None)) for name in value.__dataclass_fields__)
    else:
        return
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield f"{prefix}.{key}", item
        elif isinstance(item, (tuple, list, dict)) or hasattr(item, "__dataclass_fields__"):
            yield from _walk(f"{prefix}.{key}", item)


def describe(tensor: torch.Tensor) -> Tensor:
    """Describe a tensor without reading it."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        dtype = _DTYPES[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
    device = _DEVICES.get(tensor.device)
    if device is None:
        device = _DEVICES[tensor.device] = str(tensor.device)
    shape = list(tensor.shape)
    strides = list(tensor.stride()) if tensor.layout is torch.strided and not tensor.is_nested else None
    return Tensor(dtype, shape, strides, device, math.prod(shape))


def describe_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Encode the non-tensor arguments of a call as JSON, or None if there is none.

    Devices and generators are left out: they are expected to differ between two runs.
    """
    values = {str(k): v for k, v in enumerate(args) if _is_value(v)}
    values |= {k: v for k, v in kwargs.items() if _is_value(v)}
    if not values:
        return None
    return json.dumps({k: _encode(v) for k, v in values.items()}, sort_keys=True)[:MAX_VALUE_LENGTH]


def _is_value(value: Any) -> bool:
    if value is None or isinstance(value, (torch.Tensor, torch.device, torch.Generator)):
        return False
    return not (isinstance(value, (tuple, list)) and bool(value) and all(isinstance(v, torch.Tensor) for v in value))


def _encode(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (torch.device, torch.Generator)):
        return None
    if isinstance(value, (tuple, list)) and depth < 4:
        return [_encode(v, depth + 1) for v in value[:64]]
    if isinstance(value, dict) and depth < 4:
        return {str(k): _encode(v, depth + 1) for k, v in list(value.items())[:64]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, slice):
        return f"{value.start}:{value.stop}:{value.step}" if not _has_tensor(value) else "slice of tensors"
    return type(value).__name__  # never repr(): it may be long, hold addresses, or run the user's code


def _has_tensor(value: slice) -> bool:
    return any(isinstance(v, torch.Tensor) for v in (value.start, value.stop, value.step))
