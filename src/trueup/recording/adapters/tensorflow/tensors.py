"""From arguments and results to slots: which tensors a call has, how they are described, what else it was given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import dtypes
from tensorflow.python.framework import tensor as tensor_lib

from trueup.recording.recorder import Slot, Tensor
from trueup.recording.recorder.arguments import MAX_DEPTH, Arguments, key_text

NamedTensors = list[tuple[str, Any]]

HANDLES = frozenset({dtypes.resource, dtypes.variant, dtypes.string})
"""Dtypes of what holds no numbers."""


def holds_numbers(value: Any) -> bool:
    """Tell whether a value is a tensor, eager or of a graph, of numbers."""
    return isinstance(value, tensor_lib.Tensor) and value.dtype.base_dtype not in HANDLES


def is_handle(value: Any) -> bool:
    """Tell whether a value stands for what lies elsewhere: a variable, a list of tensors, a loop's state."""
    return isinstance(value, tensor_lib.Tensor) and value.dtype.base_dtype in (dtypes.resource, dtypes.variant)


def named_tensors(prefix: str, args: Any, kwargs: dict[str, Any] | None = None) -> NamedTensors:
    """Return ``(slot, tensor)`` for every tensor in nested lists, tuples and dicts: ``input.0``, ``input.2.1``, ``input.x``.

    A result that is one tensor is ``output.0``. `tf.IndexedSlices` (the gradient of an embedding) has two, ``.values`` and
    ``.indices``.
    """
    found: NamedTensors = []
    _walk(prefix, args if isinstance(args, (tuple, list, dict)) else [args], found, 0)
    if kwargs:
        _walk(prefix, kwargs, found, 0)
    return found


def _walk(prefix: str, value: Any, found: NamedTensors, depth: int) -> None:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        name = f"{prefix}.{key_text(key)}"
        if isinstance(item, tensor_lib.Tensor):
            if holds_numbers(item):
                found.append((name, item))
        elif isinstance(item, tf.IndexedSlices):
            found += [(f"{name}.values", item.values), (f"{name}.indices", item.indices)]
        elif isinstance(item, tf.RaggedTensor):
            found.append((f"{name}.values", item.flat_values))
        elif depth < MAX_DEPTH and isinstance(item, (tuple, list, dict)):
            _walk(name, item, found, depth + 1)


# ------------------------------------------------------------------------------------------------------------ description

MAX_LAYOUTS = 1 << 15
_SLOTS: dict[tuple[Any, ...], Slot] = {}


def slot_of(name: str, dtype: str, shape: tuple[int, ...], device: str) -> Slot:
    """Return the one `Slot` of this name and look; TensorFlow's tensors always lie in C order."""
    key = (name, dtype, shape, device)
    found = _SLOTS.get(key)
    if found is None:
        if len(_SLOTS) >= MAX_LAYOUTS:  # sizes that change from step to step
            _SLOTS.clear()
        strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        found = _SLOTS[key] = Slot(name, Tensor(dtype, shape, strides, device, math.prod(shape)))
    return found


# ------------------------------------------------------------------------------------------------------- other arguments

_ARGUMENTS = Arguments(
    (tensor_lib.Tensor, tf.IndexedSlices, tf.RaggedTensor, tf.Variable),  # type: ignore[arg-type]
    (), tf.TensorShape, is_named=lambda value: isinstance(value, (complex, tf.DType, tf.TensorShape)),
)  # fmt: skip
describe_values = _ARGUMENTS.describe

UNTOLD = frozenset(
    """
    container shared_name debug_name allowed_devices T Tidx Tshape Tperm Tpaddings Tmultiples Tblock_shape Tindices Tparams
    Taxis SrcT DstT dtype Index N Tdim Tlen DataType f config config_proto executor_type
    output_shapes _output_shapes Tin Tout out_type index_type token is_async
    """.split()
)
"""Attributes of operations that their tensors tell, or that name objects of the process."""


def attributes(attrs: Any, constants: Mapping[str, Any] | None = None) -> str | None:
    """Encode the attributes of an operation that say how it computes (``transpose_a``, ``padding``), or None.

    Args:
        attrs: names and values by turns.
        constants: numbers that it was given, by the names of the slots that they stand for.
    """
    told: dict[str, Any] = dict(constants or {})
    for name, value in zip(attrs[::2], attrs[1::2], strict=False):
        if name not in UNTOLD and not str(name).startswith("_") and (value := _plain(value)) is not None:
            told[name] = value
    return describe_values((), told) if told else None


def _plain(value: Any) -> Any:
    """Return an attribute as Python has it; in a graph they come as protocol buffers."""
    kind = getattr(value, "WhichOneof", None)
    if kind is None:
        return value.decode(errors="replace") if isinstance(value, bytes) else value
    field = kind("value")
    if field in ("b", "i", "f"):
        return getattr(value, field)
    if field == "s":
        return value.s.decode(errors="replace")
    if field == "list":
        return list(value.list.i) or list(value.list.f) or [item.decode(errors="replace") for item in value.list.s] or None
    return None
