"""Level `module`: each call of a Keras layer, with its weights.

``Layer.__call__`` is replaced for the time of the capture. A call with symbolic tensors builds a model and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager import record

from trueup.recording.adapters.tensorflow.context import ThreadState, phase_of
from trueup.recording.adapters.tensorflow.nodes import Node, number_of
from trueup.recording.adapters.tensorflow.tensors import NamedTensors, describe_values, holds_numbers, named_tensors
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.session import Session


def layer_calls(session: Session, kind: Any) -> Replacement:
    """Return the replacement of ``Layer.__call__`` that makes each call of a layer one of the capture."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            state = session.threads.state
            if state.busy or not (session.counts and state.known) or _symbolic(args, kwargs):
                return original(layer, *args, **kwargs)
            graph = session.graph_here()
            if graph is None and not state.modules:
                session.enter_model(layer, state)
            if not session.active or (graph is not None and not session.programs.follows(graph)):
                return original(layer, *args, **kwargs)
            return _run(session, state, original, layer, args, kwargs, graph)

        return call

    return Replacement(kind, "__call__", make)


def _symbolic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an argument is a symbol of which Keras builds a model."""
    return any(type(value).__name__ == "KerasTensor" for value in tf.nest.flatten((args, kwargs)))


def _run(
    session: Session, state: ThreadState, original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    graph: Any,
) -> Any:  # fmt: skip
    node: Node | None = None
    with session.observing(state, type(layer).__name__):
        node = _begin(session, state, layer, args, kwargs, graph)
    if node is None:  # the capture has just failed
        return original(layer, *args, **kwargs)
    state.modules.append(node)
    state.running.append(layer)
    brackets, state.brackets = state.brackets, []  # a layer that is recomputed in a gradient function is a call
    try:
        result = _execute(original, layer, args, kwargs)
    finally:
        state.modules.pop()
        state.running.pop()
        state.brackets = brackets
    if session.active and session.records("module"):
        with session.observing(state, type(layer).__name__):
            _end(session, node, layer, result, graph)
    return result


def _execute(original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(layer, *args, **kwargs)


RUN_LAYER = _execute.__code__
"""Code of the frame around the body of each layer that runs: the call stack up to it is known."""


def _begin(
    session: Session, state: ThreadState, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], graph: Any
) -> Node:
    parent = state.modules[-1] if state.modules else None
    scope = session.scopes.path(layer, state.running[-1] if parent is not None else None)
    phase = "recompute" if state.passes and not state.stepping else phase_of(state, graph)
    node = session.begin(
        "module", phase, scope, type(layer).__name__, parent=parent, forward=None, site=session.site(state, graph), graph=graph
    )
    if not session.records("module"):
        return node
    inputs = named_tensors("input", args, kwargs)
    weights = _weights(layer, "param")
    for variable in getattr(layer, "_trainable_variables", ()):
        session.scopes.name_weight(variable, f"{scope}.{variable.name}" if scope else variable.name)
    node.inputs = {number_of(tensor): name for name, tensor in inputs}
    session.slots.inputs(node, inputs)
    session.slots.inputs(node, weights)
    given = {k: v for k, v in kwargs.items() if v is not None}
    if (values := describe_values(args, given)) is not None:
        session.slots.value(node, values)
    if graph is not None:
        session.programs.tap(graph, node, [*inputs, *weights], [])
    return node


def _end(session: Session, node: Node, layer: Any, result: Any, graph: Any) -> None:
    outputs = named_tensors("output", result)
    node.outputs = {number_of(tensor): name for name, tensor in outputs}
    session.slots.outputs(node, outputs)
    session.gradients.layer(node)
    written = _weights(layer, "output.buffer", trained=False)
    session.slots.outputs(node, written)
    if graph is not None:
        session.programs.tap(graph, node, [], [*outputs, *written])


def _weights(layer: Any, prefix: str, *, trained: bool | None = None) -> NamedTensors:
    """Return the values of a layer's own weights; no tape sees that they were read.

    Args:
        layer: whose.
        prefix: of the slots.
        trained: False: only those that a forward writes (running means).
    """
    found: NamedTensors = []
    own = [] if trained is False else list(getattr(layer, "_trainable_variables", ()))
    own += list(getattr(layer, "_non_trainable_variables", ()))
    with record.stop_recording():
        for variable in own:
            value = getattr(variable, "_value", None)
            if not isinstance(value, tf.Variable) or value.dtype.base_dtype in (tf.string,):
                continue
            name = str(getattr(variable, "name", "weight"))
            if name.startswith("seed_generator"):
                continue
            tensor = value.read_value()
            if holds_numbers(tensor):
                found.append((f"{prefix}.{name}", tensor))
    return found
