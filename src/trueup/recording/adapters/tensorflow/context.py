"""Where execution stands, on one thread: the enclosing layers, their paths, the phase, and whether a graph is being built.

TensorFlow runs Python's part of the backward on the thread that asked for it, so all of this nests on one thread. Where a graph is
built, it stands for where the graph's operations will execute. A `Node` is a call that is seen: one that executes now, or one that
stands in a graph and executes whenever the graph does.

The scope of a call is the path of the innermost Keras layer that is running. Keras counts layers of a class for the whole process
(``dense``, ``dense_1``), so a model that was built second has other names. Here a path is made of attributes (``encoder.fc1``),
places in lists (``blocks.0``) and, in functional and sequential models, of the names that the user gave; a name that Keras made
up is counted anew inside its model.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.util import tf_stack

from trueup.foundation.model import PHASES
from trueup.recording.engine.context import Scopes as BaseScopes
from trueup.recording.engine.context import walk
from trueup.recording.engine.session import RUN_MODULE, BaseSession, Threads

if TYPE_CHECKING:
    from trueup.recording.recorder import Call


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
