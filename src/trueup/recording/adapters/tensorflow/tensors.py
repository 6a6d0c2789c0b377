"""From arguments and results to rows: which tensors a call has, how they are described and measured, and what made them.

A tensor of TensorFlow never changes, so each is read once in a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import dtypes
from tensorflow.python.framework import tensor as tensor_lib

from trueup.foundation import kernels
from trueup.foundation.frameworks.dialect import device_name
from trueup.recording.adapters.tensorflow.context import Node, SessionCore, number_of
from trueup.recording.engine import measuring
from trueup.recording.recorder import Call, Slot, Statistics, Tensor
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
    """Return ``(slot, tensor)`` for every tensor in nested lists, tuples and dicts: ``input.0``, ``input.2.1``, ``input.x``;
    ``output.0`` of a single result. `tf.IndexedSlices` (the gradient of an embedding) has two, ``.values`` and ``.indices``."""
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

LEFT_OUT = frozenset(
    """
    container shared_name debug_name allowed_devices T Tidx Tshape Tperm Tpaddings Tmultiples Tblock_shape Tindices Tparams
    Taxis SrcT DstT dtype Index N Tdim Tlen DataType f config config_proto executor_type
    output_shapes _output_shapes Tin Tout out_type index_type token is_async
    """.split()
)
"""Attributes of operations that follow from their tensors, or that name objects of the process."""


def attributes(attrs: Any, constants: Mapping[str, Any] | None = None) -> str | None:
    """Encode the attributes (names and values by turns) and scalar constants that say how an operation computes
    (``transpose_a``), or None."""
    found: dict[str, Any] = dict(constants or {})
    for name, value in zip(attrs[::2], attrs[1::2], strict=False):
        if name not in LEFT_OUT and not str(name).startswith("_") and (value := _plain(value)) is not None:
            found[name] = value
    return describe_values((), found) if found else None


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


# ------------------------------------------------------------------------------------------------------------------- rows
def measure(array: NDArray[Any], detail: str) -> Statistics:
    """Measure an array, in C order; see `measuring.measure`."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # which makes an array of no dimensions one of one
    start, strides = array.__array_interface__["data"][0], tuple(stride // array.itemsize for stride in array.strides)
    return measuring.measure(start, kernels.KINDS.get(array.dtype.name), array.shape, strides, lambda: array, detail)


class Slots:
    """Records the tensors of calls, and which call produced which tensor."""

    def __init__(self, session: SessionCore) -> None:
        self._session, self._recorder = session, session.recorder
        self._producing = "api" if "api" in session.options.levels else "module"
        """Level whose calls are the producers of inputs: the finest there is."""
        self._known: dict[int, Statistics | None] = {}
        self._producers: dict[int, tuple[int, str]] = {}
        self.devices: dict[str, None] = {}

    def forget(self) -> None:
        """Forget the tensors of a step at its end."""
        self._known.clear()
        self._producers.clear()

    def record(self, node: Node, tensors: NamedTensors) -> None:
        """Record what a call that executes now is given, or what it made, and note that as its product."""
        call = node.call()
        if not node.live or call is None or not call.recorded:
            return
        for name, tensor in tensors:
            number = number_of(tensor)
            slot = slot_of(name, tensor.dtype.base_dtype.name, tuple(tensor.shape), device_name(tensor.backing_device))
            if number not in self._known:
                self._known[number] = self.measured(tensor)
            self.add(node, call, slot, number, self._known[number])

    def unseen(self, node: Node, names: list[str]) -> None:
        """Record that a call was given what is not known: then its results are nothing to blame it for."""
        if not node.live:
            node.unseen += names
        elif (call := node.call()) is not None and call.recorded:
            self.add_unseen(call, names)

    def add_unseen(self, call: Call, names: list[str]) -> None:
        """Add rows of which nothing is known."""
        for name in names:
            self._recorder.add(call, slot_of(name, "variant", (), "cpu"), None, None, None)

    def value(self, node: Node, text: str) -> None:
        """Record the arguments that are no tensors."""
        if not node.live:
            node.value = text
        elif (call := node.call()) is not None and call.recorded:
            self._recorder.value(call, text)

    def add(self, node: Node, call: Call, slot: Slot, number: int, stats: Statistics | None) -> None:
        """Add a row."""
        if slot.tensor is not None:
            self.devices[slot.tensor.device] = None
        made = slot.name.startswith(("output", "grad_input"))
        producer = None if made else self._producers.get(number)
        self._recorder.add(call, slot, None, producer, stats)
        if made and node.level == self._producing:
            self._producers.setdefault(number, (call.seq, slot.name))

    def measured(self, value: Any) -> Statistics | None:
        """Return the statistics of an eager tensor or an array, None and a note where it has no numbers to show. A tensor on the
        CPU is read without a copy; bfloat16 and the like come as ml_dtypes has them."""
        try:
            array = value if isinstance(value, np.ndarray) else np.asarray(value._numpy_internal())
            stats = measure(array, self._session.options.detail)
        except (TypeError, ValueError, RuntimeError) as error:
            self._recorder.note(f"no statistics for {value.dtype.name}: {str(error).splitlines()[0]}")
            return None
        if stats.data is not None:
            self._recorder.keep(stats)
        return stats
