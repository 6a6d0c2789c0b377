"""Level `api`: each operation, as it executes or as it is put into a graph, seen by TensorFlow's op callbacks.

``tensorflow.python.framework.op_callbacks`` is private (TensorFlow 2.21); the debugger of TensorFlow stands on it. It tells an
operation when it has executed, with its inputs and results, and one that is put into a graph as soon as it stands there. It hears
of operations on the thread that asked for it alone.
"""

from __future__ import annotations

import re
from typing import Any

from tensorflow.python.framework import op_callbacks, tensor_util

from trueup.foundation.facts.operators import has
from trueup.foundation.frameworks.dialect import PASSED_OVER, READS
from trueup.recording.adapters.tensorflow.context import Node, SessionCore, ThreadState, is_backward, number_of, phase_of
from trueup.recording.adapters.tensorflow.tensors import NamedTensors, attributes, holds_numbers, is_handle

PREFIX = "tf.raw_ops."

CALLED = re.compile(r"__(?:inference|forward|backward)_+(?:inference_+|backward_+)*(.*?)(?:_\d+)+$")
"""Name of a function's graph when it executes: ``__inference_train_step_123``."""

OUTSIDE = ("Rng", "StatefulRandom", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")
"""How operations begin that bring in what no call made, besides those that give data: a difference in it starts there."""


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
        given = [pair for pair in _numbered("input", inputs) if pair[0] not in written]
        made = _numbered("output", outputs)
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


def _numbered(prefix: str, tensors: Any) -> NamedTensors:
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
