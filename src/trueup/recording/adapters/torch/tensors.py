"""From arguments and results to slots: which tensors a call has, how they are described, what else it was given.

Tensors that are not plain arrays: the arrays they are made of, and the tensors that they stand for.

Each array that a tensor is made of becomes a slot below the tensor's own. `input.0` of layout sparse_coo has `input.0.values` and
`input.0.indices`, and so on:

    sparse_coo                   values, indices (as they are: not coalesced)
    sparse_csr, sparse_bsr       values, crow_indices, col_indices
    sparse_csc, sparse_bsc       values, ccol_indices, row_indices
    jagged, nested               values, offsets, lengths; for a nested tensor that is no jagged one values and sizes
    quantised                    int_repr, scale, zero_point
    a class that wraps tensors   the attributes that its `__tensor_flatten__` names

A part that is itself not a plain array is taken apart too. A distributed tensor stands for its local shard, the result of an
unfinished collective for what that will be. Nothing here computes with the user's tensor, coalesces it, communicates, waits, or
enters a graph: attributes are read that hold what is there already.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trueup.foundation import kernels
from trueup.foundation.toml import packaged
from trueup.recording.recorder import Slot, Tensor, arguments
from trueup.recording.recorder.arguments import MAX_DEPTH, Arguments, key_text
from trueup.recording.recorder.rows import is_contiguous

Parts = Iterator[tuple[str, torch.Tensor]]

COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
MOST_WRAPPERS = 4
"""Wrappers in wrappers that are followed."""

STAND_INS = frozenset({"FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor"})
"""Classes of tensors that hold no numbers of their own, or not yet, by name: importing them costs more than it is worth."""

_WRAPS: dict[type, bool] = {torch.Tensor: False, torch.nn.Parameter: False}


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is one array, with strides."""
    wraps = _WRAPS.get(type(tensor))
    if wraps is None:
        wraps = _WRAPS[type(tensor)] = _holds_others(type(tensor))
    return tensor.layout is torch.strided and not (wraps or tensor.is_nested or tensor.is_quantized)


def parts(slot: str, tensor: torch.Tensor, depth: int = 0) -> Parts:
    """Yield ``(slot.part, array)`` for what a tensor is made of; nothing for one that cannot be taken apart."""
    if depth >= MOST_WRAPPERS or tensor.device.type == "meta" or type(tensor).__name__ in STAND_INS:
        return
    with torch.no_grad():
        inside = list(_inside(tensor))
    for name, part in inside:
        if is_plain(part):
            yield f"{slot}.{name}", part
        else:
            yield from parts(f"{slot}.{name}", part, depth + 1)


def _holds_others(kind: type) -> bool:
    """Tell whether tensors of a class wrap others; those of the simulated accelerator are that device's plain tensors."""
    return hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith("trueup.simdev")


def _inside(tensor: torch.Tensor) -> Parts:
    if tensor.layout is torch.sparse_coo:
        yield "values", tensor._values()
        yield "indices", tensor._indices()
    elif tensor.layout in COMPRESSED:
        yield "values", tensor.values().detach()
        for name in COMPRESSED[tensor.layout]:
            yield name, getattr(tensor, name)()
    elif tensor.is_nested and tensor.layout is torch.strided:
        yield "values", tensor.detach().values()
        yield "sizes", tensor._nested_tensor_size()
    elif tensor.is_nested:
        yield from _jagged(tensor)
    elif tensor.is_quantized:
        yield from _quantised(tensor)
    elif _holds_others(type(tensor)):
        yield from _wrapped(tensor)


def _jagged(tensor: torch.Tensor) -> Parts:
    """Yield the arrays of a jagged tensor; its cached minimum and maximum of lengths are no data."""
    for name in ("values", "offsets", "lengths"):
        part = getattr(tensor, f"_{name}", None)
        if isinstance(part, torch.Tensor):
            yield name, part.detach()


def _quantised(tensor: torch.Tensor) -> Parts:
    tensor = tensor.detach()
    yield "int_repr", tensor.int_repr()
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield "scale", torch.tensor(tensor.q_scale(), dtype=torch.float64)
        yield "zero_point", torch.tensor(tensor.q_zero_point())
    else:
        yield "scale", tensor.q_per_channel_scales()
        yield "zero_point", tensor.q_per_channel_zero_points()


def _wrapped(tensor: torch.Tensor) -> Parts:
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield name, part.detach()


# ---------------------------------------------------------------- tensors that stand for others
WRAPPERS: dict[str, str] = {
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "elem",
}
"""Classes of tensors without numbers of their own, and where each holds the tensor that has them."""

_ATTRIBUTES: dict[type, str | None] = {}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of this process that holds the numbers of one; itself, unless it is a wrapper."""
    while tensor.__class__ not in PLAIN and (attribute := _attribute(tensor.__class__)) is not None:
        tensor = getattr(tensor, attribute)
    return tensor


def _attribute(kind: type) -> str | None:
    try:
        return _ATTRIBUTES[kind]
    except KeyError:
        names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
        found = _ATTRIBUTES[kind] = next((WRAPPERS[name] for name in names if name in WRAPPERS), None)
        return found


def part_of(tensor: torch.Tensor) -> str | None:
    """Describe how a DTensor's local shard is part of the whole, as JSON; None for any other tensor."""
    if tensor.__class__ in PLAIN or _attribute(tensor.__class__) != "_local_tensor":
        return None
    spec: Any = tensor._spec
    mesh = spec.mesh
    names = mesh.mesh_dim_names
    return json.dumps({
        "placements": [_placement(p) for p in spec.placements],
        "global_shape": [int(size) for size in spec.shape],
        "mesh": {"shape": list(mesh.shape), "dims": None if names is None else list(names)},
        "coordinate": mesh.get_coordinate(),
    }, sort_keys=True)  # fmt: skip


def _placement(placement: Any) -> str:
    """Write a placement as PyTorch's own constructor: ``Shard(0)``, ``Replicate()``, ``Partial(sum)``."""
    kind = type(placement).__name__.lstrip("_")
    what = [getattr(placement, name) for name in ("dim", "split_factor", "reduce_op", "norm_type") if hasattr(placement, name)]
    return f"{kind}({', '.join(map(str, what))})"


def quick_module() -> Any | None:
    """Return the extension module; None where the compiled parts are missing or switched off (`kernels.native`)."""
    if kernels.native() is None:
        return None
    try:
        return importlib.import_module("trueup.recording.adapters.torch._quick")
    except ImportError:
        return None


FACTS: dict[str, Any] = packaged("trueup.recording.adapters.torch", "facts.toml")
"""Names of functions and arguments by what they do."""

UNKNOWN = -1
"""A size or stride that nobody may ask for without changing the computation."""

NamedTensors = list[tuple[str, torch.Tensor]]


def _named_tensors(prefix: str, args: Any, kwargs: dict[str, Any] | None = None) -> NamedTensors:
    """Return ``(slot, tensor)`` for every tensor in nested lists, tuples and dicts: ``input.0``, ``input.2.1``, ``input.weight``.
    A result that is one tensor is ``output.0``. Written as plain loops: pytree costs 30 times as much per call."""
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


def mapped(value: Any, change: Callable[[Any], Any], *, kind: type | None = None) -> Any:
    """Return a value with every tensor in it (or object of another kind) changed; what holds none changed is returned as it is."""
    wanted = torch.Tensor if kind is None else kind
    return arguments.mapped(value, change, lambda item: isinstance(item, wanted), _packed)


def _packed(value: Any, inner: Callable[[Any], Any]) -> Any:
    if not isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return NotImplemented
    names = ("data", "sorted_indices", "unsorted_indices")  # the batch sizes stay on the host
    old = [getattr(value, name) for name in names]
    new = [inner(item) for item in old]
    return arguments.same_or(value, new, old, lambda new: value._replace(**dict(zip(names, new, strict=True))))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor of a nested value, in order."""
    return arguments.leaves(value, lambda item: isinstance(item, torch.Tensor), _packed)


class Layout:
    """How a dense tensor lies in memory and what its rows say of it: one object for all tensors that look alike."""

    __slots__ = ("complex", "contiguous", "described", "device_name", "host_kind", "readable", "slots", "view")

    def __init__(self, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], device: torch.device) -> None:
        names = str(dtype).removeprefix("torch."), str(device)
        self.device_name = names[1]
        numel = math.prod(shape)
        self.complex = dtype.is_complex
        self.described = Tensor(names[0], tuple(shape), strides, names[1], numel)
        self.contiguous = is_contiguous(shape, strides)
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
    """Return a number for what a layout shows: the garbage collector does not look at numbers."""
    found = _NUMBERS.get(view)
    if found is None:
        if len(_NUMBERS) >= MAX_LAYOUTS:
            _NUMBERS.clear()  # no number is given twice: storages may be known by the old ones
        found = _NUMBERS[view] = next(_numbers)
    return found


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a plain dense tensor whose memory holds its elements as they are. None for any other: sparse, nested,
    of a subclass, inside a `torch.func` transform, to be negated or conjugated when read."""
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
