"""Level `api`: each operation and its backward, as it executes or as it is put into a graph.

``tensorflow.python.framework.op_callbacks`` is private (TensorFlow 2.21); the debugger of TensorFlow stands on it. It tells an
operation when it has executed, with its inputs and results, and one that is put into a graph as soon as it stands there. It hears
of operations on the thread that asked for it alone.

The backward of operations and layers is seen where TensorFlow asks Python for a gradient.
A tape asks one function for the gradient of any operation (`backprop._gradient_function`), eagerly and while a graph is built;
`tf.gradients`, and whatever makes the backward of a function, a loop or a branch, asks `ops.get_gradient_function`. What goes into
such a gradient function and comes out of it is the backward call of the operation; what it executes is part of it.

The gradient of a layer's output is what comes to the operation that made it. That of a layer's input is what the one operation
inside that read it makes; where several did, and nobody outside, what comes to the operation that made the input: a sum which
only TensorFlow makes. Where others read it too, the layer's own part is known to nobody, and is not recorded.

`tf.custom_gradient`: what a gradient function of the user's gets and makes is a call, and what it executes is inside.
TensorFlow's own functions have such gradients too (`tf.nn.silu`, `tf.recompute_grad`). A tape is given the Python function itself
(`record.record_operation`) and never asks for it by name. Whatever makes the backward of a function's graph asks for the gradient
of an ``IdentityN`` through which arguments and results pass (`custom_gradient._graph_mode_decorator` of TensorFlow 2.21). There
the arguments stand behind the results, and so do their gradients.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, execute, record
from tensorflow.python.framework import op_callbacks, ops, tensor_util
from tensorflow.python.framework import tensor as tensor_lib
from tensorflow.python.ops import custom_gradient

from trueup.foundation.facts.operators import has
from trueup.foundation.frameworks.dialect import PASSED_OVER, READS
from trueup.recording.adapters.tensorflow.context import (
    NamedTensors,
    Node,
    SessionCore,
    ThreadState,
    attributes,
    holds_numbers,
    is_backward,
    is_handle,
    named_tensors,
    number_of,
    phase_of,
)
from trueup.recording.engine.replacing import Around, Replacement

PREFIX = "tf.raw_ops."

CALLED = re.compile(r"__(?:inference|forward|backward)_+(?:inference_+|backward_+)*(.*?)(?:_\d+)+$")
"""Name of a function's graph when it executes: ``__inference_train_step_123``."""

OUTSIDE = ("Rng", "StatefulRandom", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")
"""How operations begin that bring in what no call made, besides those that give data: a difference in it starts there."""

OP = "tf.custom_gradient"


class Operations:
    """Hears of operations and records them."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._installed = False
        self._newest = 0
        """Largest number of a tensor that an operation made: tensors are numbered in the order in which they come to be."""

    def install(self) -> None:
        """Begin to hear, on this thread."""
        op_callbacks.add_op_callback(self.heard)
        self._installed = True

    def remove(self) -> None:
        """Stop observing; on a thread other than the one it began on, the callback cannot be removed and stays idle."""
        if self._installed:
            self._installed = False
            try:
                op_callbacks.remove_op_callback(self.heard)
            except KeyError:
                return

    def heard(
        self, op_type: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None  # noqa: ARG002
    ) -> None:
        """Record an operation, without any effect on what TensorFlow does."""
        session = self._session
        state = session.threads.state
        newest = self._newest
        if graph is None and not state.busy:
            self._newest = max([newest, *(number_of(tensor) for tensor in outputs if holds_numbers(tensor))])
        if state.busy or not session.active:
            return
        if graph is not None and not (state.tracing and not state.untapped and session.programs.follows(graph)):
            return
        kind = op_type.decode() if isinstance(op_type, bytes) else str(op_type)
        if kind in PASSED_OVER:
            return
        if state.contexts and state.contexts[-1][1] is graph:  # part of a gradient that is a call itself
            return
        with session.observing(state, kind):
            self._record(state, kind, inputs, attrs, outputs, graph, constants(inputs if len(outputs) else (), graph, newest))

    def _record(
        self, state: ThreadState, kind: str, inputs: Any, attrs: Any, outputs: Any, graph: Any, written: dict[str, Any]
    ) -> None:
        session = self._session
        if graph is None and kind.startswith("__"):
            if session.flush() or (state.tracing and not state.untapped):
                return  # its operations were seen
            called = CALLED.match(kind)
            op = f"tf.function.{called[1] if called else kind}"
            session.unseen_inside(op)
        else:
            op = f"{PREFIX}{kind}"
        given = [pair for pair in _as_slots("input", inputs) if pair[0] not in written]
        made = _as_slots("output", outputs)
        if not given and not made:
            return
        node = begin(session, state, op, graph, phase="data" if gives_data(kind, graph) else None)
        _remember(session, state, node, given, made, attrs, kind)
        if kind in READS:
            given = [("input.0", tensor) for _, tensor in made]
        if made:
            session.slots.unseen(node, unseen(kind, inputs, graph))
        session.slots.record(node, given)
        if (values := attributes(attrs, written)) is not None and not kind.startswith("__"):
            session.slots.value(node, values)
        session.slots.record(node, made)
        if graph is not None:
            session.programs.tap(graph, node, given, made)


def begin(session: SessionCore, state: ThreadState, op: str, graph: Any, *, phase: str | None = None) -> Node:
    """Begin an operation where execution stands."""
    layer = state.modules[-1] if state.modules else None
    parent = state.by_hand[-1] if state.by_hand and layer is None else None if is_backward(graph) else layer
    scope = "" if parent is None else parent.scope
    return session.begin(
        "api", phase or phase_of(state, graph), scope, op, parent=parent, site=session.site(state, graph), graph=graph
    )


def gives_data(kind: str, graph: Any) -> bool:
    """Tell whether an operation gives the data; Keras (3.15) returns a step's results, too, as an optional, and asks it at once."""
    return kind.startswith("Iterator") or (graph is not None and kind.startswith("OptionalGet"))


def unseen(kind: str, inputs: Any, graph: Any) -> list[str]:
    """Return the slots of what an operation is given and nobody sees: variables, lists of tensors."""
    if kind in READS or kind.startswith(OUTSIDE) or gives_data(kind, graph):
        return []
    return [f"input.{k}" for k, one in enumerate(inputs) if is_handle(one)]


def constants(inputs: Any, graph: Any, newest: int = 0) -> dict[str, Any]:
    """Return the numbers in scalars which the code wrote down (``x * 0.5``), by slot: each came to be after ``newest``, the last
    that operations made, and is an argument, of which it is not asked where it came from."""
    found = {f"input.{k}": _number(tensor, graph, newest) for k, tensor in enumerate(inputs)}
    return {slot: value for slot, value in found.items() if value is not None}


def _number(tensor: Any, graph: Any, newest: int) -> Any:
    if not holds_numbers(tensor) or tensor.shape.rank != 0:
        return None
    if graph is None:
        return tensor.numpy().item() if number_of(tensor) > newest else None
    value = tensor_util.constant_value(tensor) if tensor.op.type == "Const" else None
    return None if value is None else value.item()


def _as_slots(prefix: str, tensors: Any) -> NamedTensors:
    return [(f"{prefix}.{k}", tensor) for k, tensor in enumerate(tensors) if holds_numbers(tensor)]


def _remember(
    session: SessionCore, state: ThreadState, node: Node, given: NamedTensors, made: NamedTensors, attrs: Any, kind: str
) -> None:
    """Note what the backward will ask for: which operation made a tensor, and which layers read their inputs how often."""
    if node.phase not in ("forward", "recompute"):
        return
    gradients = session.gradients
    node.inputs = {number_of(tensor): name for name, tensor in given}
    node.outputs = {number_of(tensor): name for name, tensor in made}
    gradients.made(node, attrs)
    if has(f"{PREFIX}{kind}", "shape"):
        return
    for number in node.inputs:
        gradients.uses[number] += 1
        for layer in state.modules:
            if number in layer.inputs:
                layer.uses[number] = layer.uses.get(number, 0) + 1


@dataclass(frozen=True)
class Custom:
    """A function with a gradient of its own, as it was called."""

    forward: Node  # the operation that its results came through
    results: int  # how many it has
    shifted: bool  # whether arguments and their gradients stand behind the results
    inputs: dict[int, str]
    outputs: dict[int, str]  # tensors, by their numbers


class CustomGradients:
    """Knows the gradient functions that users wrote."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._by_output: dict[int, Custom] = {}

    def forget(self) -> None:
        """Forget the executed operations at the end of a step."""
        self._by_output = {k: v for k, v in self._by_output.items() if not v.forward.live}

    def replacements(self) -> list[Replacement]:
        """Return the replacements that wrap recording on a tape."""
        return [Around(record, "record_operation", self._recorded)]

    def of(self, gradient: Any, made: Any) -> Custom | None:
        """Return the record of a gradient function that a graph asks for, by the first tensor that came through it."""
        return self._by_output.get(number_of(made)) if made is not None and _is_custom(gradient) else None

    def _recorded(
        self, original: Callable[..., Any], op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any,
        forward_function: Any = None,
    ) -> Any:  # fmt: skip
        gradient = backward_function
        session = self._session
        state = session.threads.state
        if session.active and not state.busy and _is_custom(backward_function):
            with session.observing(state, OP):
                gradient = self._followed(output_tensors, input_tensors, backward_function)
        return original(op_type, output_tensors, input_tensors, gradient, forward_function)

    def _followed(self, outputs: Sequence[Any], inputs: Sequence[Any], backward: Callable[..., Any]) -> Callable[..., Any]:
        custom = self._seen(outputs, inputs, backward)
        if custom is None:
            return backward

        @wraps(backward)
        def gradient(*out_grads: Any) -> Any:
            return self._session.gradients.differentiated_by_hand(custom, out_grads, lambda: backward(*out_grads))

        return gradient

    def _seen(self, outputs: Sequence[Any], inputs: Sequence[Any], backward: Any) -> Custom | None:
        """Record a call; None where the operation that its results came through was not recorded."""
        first = next((tensor for tensor in outputs if holds_numbers(tensor)), None)
        forward = None if first is None else self._session.gradients.maker(first)
        if forward is None:
            return None
        ahead = inspect.getclosurevars(backward).nonlocals.get("flat_result_len", 0)
        results = list(outputs[:ahead] if ahead else outputs)
        custom = Custom(forward, len(results), bool(ahead), _numbered("input", inputs[ahead:]), _numbered("output", results))
        for number in custom.outputs:
            self._by_output[number] = custom
        return custom


def _is_custom(gradient: Any) -> bool:
    return bool(getattr(gradient, "__module__", None) == custom_gradient.__name__)


def _numbered(prefix: str, tensors: Sequence[Any]) -> dict[int, str]:
    return {number_of(tensor): f"{prefix}.{k}" for k, tensor in enumerate(tensors) if holds_numbers(tensor)}


LOSS = "tf.GradientTape.gradient"


class Gradients:
    """Follows calls into the backward."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._by_attributes: dict[int, tuple[Any, Node]] = {}
        """Attributes of an operation on a tape, by their address, which they keep: the one thing that a tape is sure to pass on."""
        self._by_output: dict[int, Node] = {}
        self._layers_of_output: defaultdict[int, list[tuple[Node, str]]] = defaultdict(list)
        self._layers_of_input: defaultdict[int, list[Node]] = defaultdict(list)
        self.uses: Counter[int] = Counter()  # how many operations read a tensor
        self._original = backprop._gradient_function
        self._custom = CustomGradients(session)

    def forget(self) -> None:
        """Forget the calls of a step at its end; calls in graphs stay as long as the graphs do."""
        self._by_attributes = {k: v for k, v in self._by_attributes.items() if not v[1].live}
        self._by_output = {k: v for k, v in self._by_output.items() if not v.live}
        kept = {k: [pair for pair in v if not pair[0].live] for k, v in self._layers_of_output.items()}
        self._layers_of_output = defaultdict(list, {k: v for k, v in kept.items() if v})
        inputs = {k: [layer for layer in v if not layer.live] for k, v in self._layers_of_input.items()}
        self._layers_of_input = defaultdict(list, {k: v for k, v in inputs.items() if v})
        self.uses.clear()
        self._custom.forget()

    # ------------------------------------------------------------------------------------------------------ in the forward
    def made(self, node: Node, attrs: Any) -> None:
        """Note which operation made tensors."""
        if node.live:
            self._by_attributes[id(attrs)] = attrs, node
        for number in node.outputs:
            self._by_output[number] = node

    def maker(self, tensor: Any) -> Node | None:
        """Return the operation that made a tensor, where it was seen."""
        return self._by_output.get(number_of(tensor))

    def layer(self, node: Node) -> None:
        """Note which tensors a layer was given and returned."""
        for number, name in node.outputs.items():
            self._layers_of_output[number].append((node, name))
        for number in node.inputs:
            self._layers_of_input[number].append(node)

    # ----------------------------------------------------------------------------------------------------- in the backward
    def install(self) -> None:
        """Stand around gradient functions."""
        self._original = backprop._gradient_function
        pywrap_tfe.TFE_Py_RegisterGradientFunction(self._of_tape)

    def remove(self) -> None:
        """Leave no trace."""
        pywrap_tfe.TFE_Py_RegisterGradientFunction(self._original)

    def replacements(self) -> list[Replacement]:
        """Return the replacements that wrap the passes of tapes and the look-up of gradient functions by graphs."""
        return [
            Around(tf.GradientTape, "gradient", self._pass),
            Around(ops, "get_gradient_function", self._looked_up),
            Around(execute, "record_gradient", self._put_on_tape),
            *self._custom.replacements(),
        ]

    def _put_on_tape(self, original: Callable[..., Any], op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        """Learn under which attributes a tape keeps an operation that was put into a graph."""
        session = self._session
        if session.active and session.threads.state.tracing and outputs:
            first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
            node = self._by_output.get(getattr(first, "_id", -1))
            if node is not None and not node.live:
                self._by_attributes[id(attrs)] = attrs, node
        return original(op_name, inputs, attrs, outputs)

    def _of_tape(
        self, op_name: str, attr_tuple: Any, num_inputs: int, inputs: Any, outputs: Any, out_grads: Any, *rest: Any
    ) -> Any:
        def run() -> Any:
            return self._original(op_name, attr_tuple, num_inputs, inputs, outputs, out_grads, *rest)

        known = self._by_attributes.get(id(attr_tuple))
        node = None if known is None else known[1]
        if node is None:
            made = next((t for t in outputs or () if isinstance(t, tensor_lib.Tensor)), None)
            node = None if made is None else self.maker(made)
        return self._differentiated(op_name, node, out_grads, run)

    def _looked_up(self, original: Callable[..., Any], op: Any) -> Any:
        found = original(op)
        session = self._session
        if found is None or not session.active or not session.threads.state.tracing:
            return found

        @wraps(found)
        def gradient(op: Any, *out_grads: Any) -> Any:
            made = op.outputs[0] if op.outputs else None
            custom = self._custom.of(found, made)
            if custom is not None:
                return self.differentiated_by_hand(custom, out_grads, lambda: found(op, *out_grads))
            node = None if made is None else self.maker(made)
            return self._differentiated(op.type, node, out_grads, lambda: found(op, *out_grads))

        return gradient

    def _differentiated(self, kind: str, forward: Node | None, out_grads: Any, run: Callable[[], Any]) -> Any:
        """Run a gradient function as the backward call of an operation."""
        if kind in PASSED_OVER:
            return run()
        return self._called(f"{PREFIX}{kind}" if forward is None else forward.op, forward, None, out_grads, run)

    def differentiated_by_hand(self, custom: Custom, out_grads: Any, run: Callable[[], Any]) -> Any:
        """Run a gradient function that a user wrote as a backward call; what it executes is inside."""
        return self._called(OP, custom.forward, custom, out_grads, run)

    def _called(self, op: str, forward: Node | None, custom: Custom | None, out_grads: Any, run: Callable[[], Any]) -> Any:
        """Run a gradient function as a backward call of ``op``: of the operation ``forward`` where that is known, of a user's
        function ``custom`` where he wrote it. In ``out_grads`` the gradients of arguments that pass through a graph with the
        results come last."""
        session = self._session
        state, graph = session.threads.state, session.graph_here()
        if state.busy or not session.active or (graph is not None and not session.programs.follows(graph)):
            return run()
        node: Node | None = None
        received: NamedTensors = []
        with session.observing(state, f"the gradient of {op}"):
            node = self._begin(state, op, forward, graph)
            given = out_grads if custom is None else out_grads[: custom.results]
            received = _flat("grad_output", given)
            session.slots.unseen(node, [f"grad_output.{k}" for k, gradient in enumerate(given) if is_handle(gradient)])
            session.slots.record(node, received)
        if node is None:  # the capture has just failed
            return run()
        with _under_way(state, node, graph, by_hand=custom is not None):
            result = run()
        if session.active:
            with session.observing(state, f"the gradient of {op}"):
                made = _flat("grad_input", result[custom.results :] if custom is not None and custom.shifted else result)
                session.slots.record(node, made)
                if graph is not None:
                    session.programs.tap(graph, node, received, made)
                if forward is not None:
                    self._of_layers(custom or forward, forward.parent, received, made, graph)
        return result

    def _begin(self, state: ThreadState, op: str, forward: Node | None, graph: Any) -> Node:
        session = self._session
        if forward is None:
            return session.begin("api", "backward", "", op, graph=graph)
        parent = None if forward.parent is None else self._backward_of(forward.parent, graph)
        phase = "optimizer" if state.stepping else "backward"
        return session.begin("api", phase, forward.scope, op, parent=parent, forward=forward, site=forward.site, graph=graph)

    def _backward_of(self, layer: Node, graph: Any) -> Node:
        """Return the backward call of a layer, begun once in a pass."""
        session = self._session
        number = session.pass_number(graph)
        if layer.backward is None or layer.passed != number:
            parent = None if layer.parent is None else self._backward_of(layer.parent, graph)
            layer.passed = number
            layer.backward = session.begin(
                "module", "backward", layer.scope, layer.op, parent=parent, forward=layer, site=layer.site, graph=graph
            )
        return layer.backward

    def _of_layers(
        self, forward: Node | Custom, inside: Node | None, received: NamedTensors, made: NamedTensors, graph: Any
    ) -> None:
        """Record what a gradient is to the layers around the tensor that it belongs to."""
        outputs = {name: number for number, name in forward.outputs.items()}
        for name, gradient in received:
            number = outputs.get(_slot(name))
            if number is None:
                continue
            suffix = _suffix(name)
            for layer, slot in self._layers_of_output.get(number, ()):
                self._add(layer, f"grad_{slot}{suffix}", gradient, graph)
            for layer in self._layers_of_input.get(number, ()):
                if layer.uses.get(number, 0) > 1 and layer.uses[number] == self.uses[number]:
                    self._add(layer, f"grad_{layer.inputs[number]}{suffix}", gradient, graph)
        inputs = {name: number for number, name in forward.inputs.items()}
        for name, gradient in made:
            number = inputs.get(_slot(name))
            around = inside
            while number is not None and around is not None:
                if around.uses.get(number) == 1:
                    self._add(around, f"grad_{around.inputs[number]}{_suffix(name)}", gradient, graph)
                around = around.parent

    def _add(self, layer: Node, name: str, gradient: Any, graph: Any) -> None:
        session = self._session
        if not session.records("module"):
            return
        backward = self._backward_of(layer, graph)
        pair = [(name, gradient)]
        session.slots.record(backward, pair)
        if graph is not None:
            session.programs.tap(graph, backward, pair)

    # ------------------------------------------------------------------------------------------------------ passes of tapes
    def _pass(self, original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        state, graph = session.threads.state, session.graph_here()
        follows = session.active and not state.busy and (graph is None or session.programs.follows(graph))
        if follows and not state.by_hand:  # a tape inside a gradient function differentiates no loss
            with session.observing(state, LOSS):
                self._loss(state, target, graph)
        state.passes.append(session.next_pass())
        try:
            return original(tape, target, sources, *args, **kwargs)
        finally:
            state.passes.pop()
            if graph is None:
                session.flush()

    def _loss(self, state: ThreadState, target: Any, graph: Any) -> None:
        """Record what is differentiated: the loss curve."""
        tensors = named_tensors("input", tf.nest.flatten(target))[:1]
        if not tensors:
            return
        session = self._session
        node = session.begin("api", "forward", "", LOSS, site=session.site(state, graph), graph=graph)
        session.slots.record(node, tensors)
        if graph is not None:
            session.programs.tap(graph, node, tensors)


@contextmanager
def _under_way(state: ThreadState, node: Node, graph: Any, *, by_hand: bool) -> Iterator[None]:
    """Count what executes in a block as part of a gradient function; of one ``by_hand``, as inside it."""
    contexts = state.contexts
    state.contexts = [] if by_hand else [*contexts, (node, graph)]
    if by_hand:
        state.by_hand.append(node)
    try:
        yield
    finally:
        state.contexts = contexts
        if by_hand:
            state.by_hand.pop()


def _flat(prefix: str, value: Any) -> NamedTensors:
    """Name gradients; what a gradient function returns is one, or a list with None where there is none."""
    values = value if isinstance(value, (list, tuple)) else [value]
    found: NamedTensors = []
    for k, item in enumerate(values):
        if holds_numbers(item):
            found.append((f"{prefix}.{k}", item))
        elif isinstance(item, tf.IndexedSlices):
            found += [(f"{prefix}.{k}.values", item.values), (f"{prefix}.{k}.indices", item.indices)]
    return found


def _slot(name: str) -> str:
    """Return ``input.0`` for ``grad_input.0.values``."""
    return ".".join(name.removeprefix("grad_").split(".")[:2])


def _suffix(name: str) -> str:
    return "".join(f".{part}" for part in name.split(".")[2:])
