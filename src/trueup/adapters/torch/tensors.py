"""From arguments and results to slots: which tensors a call has, how they are described, what else it was given."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from trueup.recorder.recorder import Tensor

MAX_VALUE_LENGTH = 4000
MAX_DEPTH = 8
"""Nesting that is followed; a structure may contain itself."""

UNKNOWN = -1
"""A size or stride that cannot be told without changing the computation."""

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


def _walk(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    items: Any
    if isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    elif _is_dataclass(value):
        items = ((name, getattr(value, name, None)) for name in value.__dataclass_fields__)
    else:
        return
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield f"{prefix}.{_key(key)}", item
        elif depth < MAX_DEPTH and (isinstance(item, (tuple, list, dict)) or _is_dataclass(item)):
            yield from _walk(f"{prefix}.{_key(key)}", item, depth + 1)


def _is_dataclass(value: Any) -> bool:
    """Ask the class, not the object: an attribute look-up on it could run the user's code."""
    return hasattr(type(value), "__dataclass_fields__")


def _key(key: Any) -> str:
    """Name a key of a dict; the text of any other object may hold an address."""
    return str(key) if isinstance(key, (str, int, float)) else type(key).__name__


def describe(tensor: torch.Tensor) -> Tensor:
    """Describe a tensor without reading it."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        dtype = _DTYPES[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
    device = _DEVICES.get(tensor.device)
    if device is None:
        device = _DEVICES[tensor.device] = str(tensor.device)
    if tensor.is_nested:  # the sizes differ from row to row
        shape = [tensor.size(0), *[UNKNOWN] * (tensor.dim() - 1)]
        return Tensor(dtype, shape, None, device, _known(tensor.numel()))
    shape = [_known(size) for size in tensor.shape]
    strides = [_known(stride) for stride in tensor.stride()] if tensor.layout is torch.strided else None
    return Tensor(dtype, shape, strides, device, UNKNOWN if UNKNOWN in shape else math.prod(shape))


def _known(size: Any) -> int:
    """Leave symbolic sizes (torch.export, nested tensors) alone: asking for their value would fix it."""
    return size if type(size) is int else UNKNOWN


def describe_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Encode the non-tensor arguments of a call as JSON, or None if there is none.

    Devices and generators are left out: they are expected to differ between two runs. What would be too long is told by its
    length and digest, which two runs can still compare.
    """
    values = {str(k): v for k, v in enumerate(args) if _is_value(v)}
    values |= {k: v for k, v in kwargs.items() if _is_value(v)}
    if not values:
        return None
    text = json.dumps({k: _encode(v) for k, v in values.items()}, sort_keys=True)
    if len(text) <= MAX_VALUE_LENGTH:
        return text
    return json.dumps({"length": len(text), "xxh3": xxhash.xxh3_64_hexdigest(text.encode())})


def _is_value(value: Any) -> bool:
    if value is None or isinstance(value, (torch.Tensor, torch.device, torch.Generator)):
        return False
    return not (isinstance(value, (tuple, list)) and bool(value) and all(isinstance(v, torch.Tensor) for v in value))


def _encode(value: Any, depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, str)):
        return int(value) if isinstance(value, int) else str.__str__(value)
    if isinstance(value, (torch.device, torch.Generator)):
        return None
    if isinstance(value, (tuple, list)) and depth < MAX_DEPTH:
        return [_encode(v, depth + 1) for v in value[:64]]
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return {_key(k): _encode(v, depth + 1) for k, v in list(value.items())[:64]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, complex)):
        return str(value)
    if isinstance(value, slice):
        return f"{value.start}:{value.stop}:{value.step}" if _is_plain(value) else "slice of tensors"
    return type(value).__name__  # never repr(): it may be long, hold addresses, or run the user's code


def _is_plain(value: slice) -> bool:
    return all(v is None or isinstance(v, int) for v in (value.start, value.stop, value.step))
