"""From arguments and results to slots: which tensors a call has, how they are described, what else it was given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from trueup.foundation import kernels
from trueup.recording.adapters.torch.compiled import quick_module
from trueup.recording.recorder import Slot, Tensor
from trueup.recording.recorder.arguments import MAX_DEPTH, Arguments, key_text

UNKNOWN = -1
"""A size or stride that cannot be told without changing the computation."""

NamedTensors = list[tuple[str, torch.Tensor]]


def _named_tensors(prefix: str, args: Any, kwargs: dict[str, Any] | None = None) -> NamedTensors:
    """Return ``(slot, tensor)`` for every tensor in nested lists, tuples and dicts: ``input.0``, ``input.2.1``, ``input.weight``.

    A result that is one tensor is ``output.0``. Written as plain loops: pytree costs 30 times as much per call.
    """
    found: NamedTensors = []
    if isinstance(args, torch.Tensor):
        found.append((f"{prefix}.0", args))
    else:
        _walk(prefix, args, found, 0)
    if kwargs:
        _walk(prefix, kwargs, found, 0)
    return found


def _walk(prefix: str, value: Any, found: NamedTensors, depth: int) -> None:
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
        if item is None or type(item) in _LEAVES:
            continue
        if isinstance(item, torch.Tensor):
            found.append((f"{prefix}.{key_text(key)}", item))
        elif depth < MAX_DEPTH and (isinstance(item, (tuple, list, dict)) or _is_dataclass(item)):
            _walk(f"{prefix}.{key_text(key)}", item, found, depth + 1)


_LEAVES = frozenset({int, float, bool, str, slice, type(Ellipsis), torch.dtype, torch.device})
"""Types of arguments that hold no tensor (or, a slice, none that is more than a number)."""


def _is_dataclass(value: Any) -> bool:
    """Ask the class, not the object: an attribute look-up on it could run the user's code."""
    return hasattr(type(value), "__dataclass_fields__")


def _fastest() -> Callable[..., NamedTensors]:
    compiled = quick_module()
    if compiled is None:
        return _named_tensors
    compiled.set_types(torch.Tensor, _LEAVES, _walk)
    return compiled.named_tensors  # type: ignore[no-any-return]


named_tensors = _fastest()
"""`_named_tensors`, compiled where that was built."""


class Layout:
    """How a dense tensor lies in memory and what its rows say of it: one object for all tensors that look alike."""

    __slots__ = ("complex", "contiguous", "described", "device_name", "host_kind", "readable", "slots", "view")

    def __init__(self, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], device: torch.device) -> None:
        names = str(dtype).removeprefix("torch."), str(device)
        self.device_name = names[1]
        numel = math.prod(shape)
        self.complex = dtype.is_complex
        self.described = Tensor(names[0], tuple(shape), strides, names[1], numel)
        self.contiguous = _is_contiguous(shape, strides)
        self.view = _number((dtype, numel) if self.contiguous else (dtype, *_joined(shape, strides)))
        """Number of what is shown: equal for layouts that show the same elements in the same order."""
        self.readable = device.type != "meta" and dtype not in QUANTISED
        self.host_kind = kernels.KINDS.get(names[0]) if device.type == "cpu" and self.readable else None
        """Number by which the compiled kernel knows the dtype; None where that kernel cannot read the tensor."""
        self.slots: dict[str, Slot] = {}

    def slot(self, name: str) -> Slot:
        """Return the one `Slot` of this name and layout."""
        found = self.slots.get(name)
        if found is None:
            found = self.slots[name] = Slot(name, self.described)
        return found


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes that add nothing to a tensor."""

QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
MAX_LAYOUTS = 1 << 16
LAYOUTS: dict[tuple[Any, ...], Layout] = {}
"""By dtype, shape, strides and device."""
_NUMBERS: dict[tuple[Any, ...], int] = {}
_numbers = itertools.count()


def _number(view: tuple[Any, ...]) -> int:
    """Return a number for what a layout shows: what is known by numbers needs no look by the garbage collector."""
    found = _NUMBERS.get(view)
    if found is None:
        if len(_NUMBERS) >= MAX_LAYOUTS:
            _NUMBERS.clear()  # no number is given twice: storages may be known by the old ones
        found = _NUMBERS[view] = next(_numbers)
    return found



def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a plain dense tensor whose memory holds its elements as they are.

    None for any other: sparse, nested, of a subclass, inside a `torch.func` transform, to be negated or conjugated when read.
    """
    if type(tensor) not in PLAIN or torch._C._functorch.maybe_current_level() is not None or tensor.is_neg():
        return None
    if (layout := dense_layout(tensor)) is None or (layout.complex and tensor.is_conj()):
        return None
    return layout


def dense_layout(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a tensor of any class that has sizes, strides and bytes of its own; None where it has not."""
    try:
        key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        found = LAYOUTS.get(key)
    except (RuntimeError, TypeError):  # sparse and nested tensors have no strides or no shape, symbols no hash
        return None
    if found is None:
        if tensor.layout is not torch.strided or not all(type(size) is int for size in (*key[1], *key[2])):
            return None
        if len(LAYOUTS) >= MAX_LAYOUTS:  # sizes that change from step to step
            LAYOUTS.clear()
        found = LAYOUTS[key] = Layout(*key)
    return found


def _joined(shape: torch.Size, strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides with dimensions joined where memory has them as one: the heads of a projection are its rows."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if steps and steps[-1] == step * size:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    return tuple(sizes), tuple(steps)


def _is_contiguous(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def describe(tensor: torch.Tensor) -> Tensor:
    """Describe any tensor without reading it."""
    dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    if tensor.is_nested:  # the sizes differ from row to row
        shape = [tensor.size(0), *[UNKNOWN] * (tensor.dim() - 1)]
        return Tensor(dtype, shape, None, device, _known(tensor.numel()))
    shape = [_known(size) for size in tensor.shape]
    strides = [_known(stride) for stride in tensor.stride()] if tensor.layout is torch.strided else None
    return Tensor(dtype, shape, strides, device, UNKNOWN if UNKNOWN in shape else math.prod(shape))


def _known(size: Any) -> int:
    """Leave symbolic sizes (torch.export, nested tensors) alone: asking for their value would fix it."""
    return size if type(size) is int else UNKNOWN


_ARGUMENTS = Arguments(
    torch.Tensor, (torch.device, torch.Generator), torch.Size, exact=(torch.dtype, torch.device),
    is_named=lambda value: isinstance(value, (torch.dtype, torch.layout, torch.memory_format, complex)),
)  # fmt: skip
describe_values, encode_values = _ARGUMENTS.describe, _ARGUMENTS.encode
