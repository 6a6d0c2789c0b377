"""Where execution stands, on one thread: the enclosing layers, their paths, the phase, and whether a graph is being built.

TensorFlow runs Python's part of the backward on the thread that asked for it, so all of this nests on one thread. Where a graph is
built, it stands for where the graph's operations will execute. A `Node` is a call that is seen: one that executes now, or one that
stands in a graph and executes whenever the graph does.

The scope of a call is the path of the innermost Keras layer that is running. Keras counts layers of a class for the whole process
(``dense``, ``dense_1``), so a model that was built second has other names. Here a path is made of attributes (``encoder.fc1``),
places in lists (``blocks.0``) and, in functional and sequential models, of the names that the user gave; a name that Keras made
up is counted anew inside its model.

From arguments and results to rows: which tensors a call has, how they are described and measured, and what made them. A tensor of
TensorFlow never changes, so each is read once in a step.
"""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import dtypes, ops
from tensorflow.python.framework import tensor as tensor_lib
from tensorflow.python.util import tf_stack

from trueup.foundation import kernels
from trueup.foundation.frameworks.dialect import device_name
from trueup.foundation.model import PHASES
from trueup.recording.engine.scopes import Scopes as BaseScopes
from trueup.recording.engine.scopes import walk
from trueup.recording.engine.session import RUN_MODULE, BaseSession, Threads
from trueup.recording.recorder import Call, Slot, Statistics, Tensor, rows
from trueup.recording.recorder.arguments import MAX_DEPTH, Arguments, key_text

NamedTensors = list[tuple[str, Any]]

HANDLES = frozenset({dtypes.resource, dtypes.variant, dtypes.string})
"""Dtypes of what holds no numbers."""


# ---------------------------------------------------------------------------------------------------------------- layer paths
def layer_class() -> Any:
    """Return the class of Keras's layers; None where Keras is not loaded yet."""
    module = sys.modules.get("keras.src.layers.layer")
    return getattr(module, "Layer", None)


class Scopes(BaseScopes):
    """Gives each layer, and each weight, its path."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[int, tuple[weakref.ref[Any], str]] = {}

    def below(self, root: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        return walk(root, prefix, children)

    def children(self, layer: Any) -> Iterable[tuple[str, Any]]:
        return children(layer)

    def is_model(self, root: Any) -> bool:
        return has_weights(root)

    def made_up(self, layer: Any) -> str:
        return snake(type(layer).__name__)

    def name_weight(self, variable: Any, name: str) -> None:
        """Record the path of a weight: that of its layer, and its name there."""
        self._weights[id(variable)] = weakref.ref(variable), name

    def weight(self, variable: Any) -> str:
        """Return the path of a weight; the name that TensorFlow knows it by where no layer has it."""
        known = self._weights.get(id(variable))
        if known is not None and known[0]() is variable:
            return known[1]
        return str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))


def has_weights(layer: Any) -> bool:
    """Tell whether a layer has weights, or may have them once it is built: a loss or a metric is no model."""
    return bool(layer.weights) or not layer.built


def snake(name: str) -> str:
    """Return ``multi_head_attention`` for ``MultiHeadAttention``, as Keras makes names up (``to_snake_case``)."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def children(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers that a layer holds, each with its name in it."""
    kind = layer_class()
    graph = hasattr(layer, "_operations") or type(layer).__name__ == "Sequential"
    if graph:
        yield from _of_model(layer)
    seen = set()
    for name, value in list(vars(layer).items()):
        if name.startswith("_") and not isinstance(value, kind):
            continue
        for path, child in _held(name.lstrip("_"), value, kind):
            if id(child) not in seen:
                seen.add(id(child))
                yield path, child


def _of_model(model: Any) -> Iterator[tuple[str, Any]]:
    counted: Counter[str] = Counter()
    for child in list(getattr(model, "layers", ())):
        made_up = snake(type(child).__name__)
        if re.fullmatch(rf"{re.escape(made_up)}(_\d+)?", child.name):
            n = counted[made_up]
            counted[made_up] += 1
            yield (made_up if n == 0 else f"{made_up}_{n}"), child
        else:
            yield child.name, child


def _held(name: str, value: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, kind):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            if isinstance(item, kind):
                yield f"{name}.{k}", item
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, kind):
                yield f"{name}.{key}", item


def layers_of(model: Any) -> list[tuple[str, Any]]:
    """Return the layers of a model with their paths, the model first: its path is empty."""
    return list(walk(model, "", children))


# ---------------------------------------------------------------------------------------------------------------- calls
class Node:
    """Where a call stands and, once it has executed, its number."""

    __slots__ = (
        "backward", "calls", "forward", "index", "inputs", "level", "op", "outputs", "parent", "passed", "phase", "scope", "site",
        "slots", "unseen", "uses", "value",
    )  # fmt: skip

    def __init__(
        self, level: str, phase: str, scope: str, op: str, *, parent: Node | None, forward: Node | None, site: int | None
    ) -> None:
        self.level, self.phase, self.scope, self.op = level, phase, scope, op
        self.parent, self.forward, self.site = parent, forward, site
        self.calls: list[Call] = []  # its executions in the present step: of what stands in the body of a loop there are several
        self.index: int | None = None  # its place in the order in which graphs were built; None for a call that executes now
        self.slots: list[tuple[str, int]] = []  # of a graph: slots and the numbers of their tensors
        self.unseen: list[str] = []  # of a graph: slots of which nothing is known
        self.value: str | None = None  # of a graph: the arguments that are no tensors
        self.inputs: dict[int, str] = {}  # tensors it was given, by their numbers; of a layer and of an operation
        self.outputs: dict[int, str] = {}
        self.uses: dict[int, int] = {}  # of a layer: how many operations inside read each of its inputs
        self.backward: Node | None = None
        self.passed = -1  # backward pass in which ``backward`` was begun; a second pass is another call

    @property
    def live(self) -> bool:
        """Whether it executes now."""
        return self.index is None

    def call(self, k: int = -1) -> Call | None:
        """Return its k-th execution in this step, where there is one; else the last."""
        if not self.calls:
            return None
        return self.calls[k] if -len(self.calls) <= k < len(self.calls) else self.calls[-1]


def number_of(tensor: Any) -> int:
    """Return the number of a tensor, eager or of a graph, which no other tensor of the process ever gets."""
    number: int = tensor._id
    return number


@dataclass(slots=True)
class ThreadState:
    """What nests on one thread."""

    modules: list[Node] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)
    """The layers of `modules`."""
    passes: list[int] = field(default_factory=list)
    """Numbers of the backward passes under way."""
    contexts: list[tuple[Node | None, Any]] = field(default_factory=list)
    """Gradient functions under way, each with the graph that it builds in (None: it executes)."""
    by_hand: list[Node] = field(default_factory=list)
    """Gradient functions under way that users wrote: what they execute is inside them."""
    stepping: int = 0
    """How many optimizers' steps are under way, one inside another."""
    scaling: bool = False
    """Whether a scaler of the loss steps."""
    tracing: int = 0
    """How many twins of functions are under way: what is put into a graph meanwhile gets taps."""
    functions: list[Any] = field(default_factory=list)
    """The functions (`tf.function`) that were called, the outermost first."""
    untapped: int = 0
    """How many things are under way whose graphs must get none: pipelines of data, XLA, saving."""
    busy: bool = False
    """True while nothing that executes is a call: Trueup itself works, or a Python function that is one call."""
    known: bool = False
    """Whether this thread began the capture, or was noted."""


def phase_of(state: ThreadState, graph: Any) -> str:
    """Name the phase of a call that starts now, or that is put into a graph."""
    if state.stepping:
        return "optimizer"
    if state.passes or is_backward(graph):
        return "recompute" if len(state.modules) > 0 and state.modules[-1].phase == "recompute" else "backward"
    return "forward"


def is_backward(graph: Any) -> bool:
    """Tell whether a graph is the backward of a function, a branch or a loop (TensorFlow 2.21 names them so)."""
    name = getattr(graph, "name", None)
    return isinstance(name, str) and (name.startswith("__backward_") or "_grad_" in name)


# -------------------------------------------------------------------------------------------------------------- the session
class SessionCore(BaseSession):
    """What the parts of this adapter know of the session that holds them together and stands above them all."""

    threads: Threads[ThreadState]
    scopes: Scopes
    slots: Any
    gradients: Any
    programs: Any
    functions: Any
    operations: Any
    optimizers: Any
    enter_model: Callable[[Any, ThreadState], None]
    flush: Callable[[], bool]
    updates: Callable[[Any], None]
    _passes = 0

    @property
    def counts(self) -> bool:
        """Whether steps are counted: also those that are not recorded."""
        return not self.over

    def execute(self, node: Node, parent: Node | None, k: int) -> None:
        """Number one execution of a call; its k-th, where it stands in the body of a loop."""
        above = None if parent is None else parent.call(k)
        before = None if node.forward is None else node.forward.call(-1 - k)  # a loop is gone through backwards
        call = self.recorder.begin(
            node.level, node.phase, node.scope, node.op, parent=None if above is None else above.seq, site=node.site,
            forward_seq=None if before is None else before.seq,
        )  # fmt: skip
        if k == 0:
            node.calls = []
        node.calls.append(call)

    def enclosing_now(self) -> Node | None:
        """Return the layer that is executing."""
        state = self.threads.state
        return next((layer for layer in reversed(state.modules) if layer.live), None)

    def graph_here(self) -> Any:
        """Return the graph that is being built; None where what runs is executed."""
        return None if tf.executing_eagerly() else ops.get_default_graph()

    def next_pass(self) -> int:
        """Number a backward pass."""
        self._passes += 1
        return self._passes

    def pass_number(self, graph: Any) -> int:
        """Return the number of the backward pass under way, or what stands for it: a graph is one."""
        passes = self.threads.state.passes
        return passes[-1] if passes and graph is None else -2 - id(graph)

    def site(self, state: ThreadState, graph: Any = None) -> int | None:
        """Return the number of the present call stack, walked up to the layer that is running on this thread. Where a graph is
        built, TensorFlow tells the lines of the user's code: what runs is what AutoGraph made of them."""
        if graph is not None:
            stack = [(one.filename, one.lineno, one.name) for one in reversed(tf_stack.extract_stack())]
            return self.recorder.sites.named(stack)
        above = state.modules[-1].site if state.modules else None
        return self.recorder.sites.here(above, RUN_MODULE)

    @property
    def records_all(self) -> bool:
        """Whether no option leaves calls out but by their level."""
        return not (self.options.include or self.options.exclude) and len(self.options.phases) == len(PHASES)

    def recorder_wants(self, node: Node) -> bool:
        """Tell whether the options keep calls of this kind."""
        return self.recorder.selects(node.level, node.phase, node.scope, node.op)

    def unseen_inside(self, op: str) -> None:
        """Note that a function ran whose operations are not seen."""
        why = "XLA compiled it, or another thread built its graph"
        self.recorder.note(f"{op} ran, but nothing inside it could be observed ({why}): its operations are not recorded")

    def begin(
        self, level: str, phase: str, scope: str, op: str, *, graph: Any, parent: Node | None = None, forward: Node | None = None,
        site: int | None = None,
    ) -> Node:  # fmt: skip
        """Begin a call that executes now, or take up one that stands in a graph that is being built."""
        node = Node(level, phase, scope, op, parent=parent, forward=forward, site=site)
        if graph is None:
            self.execute(node, parent, 0)
        else:
            self.programs.add(node, graph)
        return node


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
    return rows.measure(start, kernels.KINDS.get(array.dtype.name), array.shape, strides, lambda: array, detail)


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
