"""Level `module`: each call of a Layer, with its parameters, and its backward.

``Layer.__call__`` is replaced for the time of the capture: hooks on each Layer would stay in the user's model when it is pickled,
and miss keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import paddle
from paddle.base import framework

from trueup.recording.adapters.paddle.context import Context, ThreadState, enclosing, phase_of
from trueup.recording.adapters.paddle.gradients import Edges
from trueup.recording.adapters.paddle.tensors import NamedTensors, describe_values, holds, named_tensors
from trueup.recording.recorder.repeats import link
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

RUNNING = ("_mean", "_variance")
"""What batch norms keep among their parameters and write in their forward (Paddle 3.3)."""


def layer_calls(session: Session) -> Replacement:
    """Return the replacement of ``Layer.__call__`` that makes each call of a Layer one of the capture."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: paddle.nn.Layer, *args: Any, **kwargs: Any) -> Any:
            state = session.threads.state
            if state.busy or not framework.in_dygraph_mode():
                return original(layer, *args, **kwargs)
            if not state.modules:
                session.enter_model(layer, state)
            if not session.active:
                return original(layer, *args, **kwargs)
            return _run(session, state, original, layer, args, kwargs)

        return call

    return Replacement(paddle.nn.Layer, "__call__", make)


def _run(
    session: Session, state: ThreadState, original: Callable[..., Any], layer: paddle.nn.Layer,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    context: Context | None = None
    edges: Edges | None = None
    with session.observing(state, type(layer).__name__):
        context, edges = _before(session, state, layer, args, kwargs)
    if context is None:  # the capture has just failed
        return original(layer, *args, **kwargs)
    state.modules.append(context)
    state.running.append(layer)
    contexts, state.contexts = state.contexts, []  # what runs inside belongs to the Layer, not to an outer PyLayer
    try:
        result = _execute(original, layer, args, kwargs)
    finally:
        state.modules.pop()
        state.running.pop()
        state.contexts = contexts
    if session.active:
        with session.observing(state, type(layer).__name__):
            _after(session, layer, context, edges, result)
    return result


def _execute(original: Callable[..., Any], layer: paddle.nn.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(layer, *args, **kwargs)


RUN_LAYER = _execute.__code__
"""Code of the frame around the body of each Layer that runs: the call stack up to it is known."""


def _before(
    session: Session, state: ThreadState, layer: paddle.nn.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Context, Edges | None]:
    context = _begin(session, state, layer)
    call = context.call
    if isinstance(layer, paddle.DataParallel):
        session.reductions.meet(layer)
    if not session.records("module"):
        return context, None
    inputs = named_tensors("input", args, kwargs)
    if call.recorded:
        session.slots.inputs(call, inputs)
        session.slots.inputs(call, _own("param", layer._parameters.items()))
        if (values := describe_values(args, kwargs)) is not None:
            session.recorder.value(call, values)
    return context, Edges(inputs) if paddle.is_grad_enabled() else None


def _begin(session: Session, state: ThreadState, layer: paddle.nn.Layer) -> Context:
    _, parent = enclosing(state)
    scope = session.scopes.path(layer, state.running[-1] if parent is not None else None)
    session.notice_thread(state)
    call = session.recorder.begin(
        "module", phase_of(state), scope, type(layer).__name__,
        parent=None if parent is None else parent.call.seq, site=session.site(state),
    )  # fmt: skip
    if state.runs:
        link(state.runs, call)
    return Context(call, parent, scope, opaque=False, depth=len(state.passes))


def _after(session: Session, layer: paddle.nn.Layer, context: Context, edges: Edges | None, result: Any) -> None:
    outputs = named_tensors("output", result)
    session.slots.outputs(context.call, outputs)
    if context.call.recorded and (layer._buffers or isinstance(layer._parameters.get(RUNNING[0]), paddle.Tensor)):
        running = [(name, tensor) for name in RUNNING if (tensor := layer._parameters.get(name)) is not None]
        buffers = _own("output.buffer", [*running, *layer._buffers.items()])
        for _, tensor in buffers if not session.records("api") else ():
            session.buffers.written(tensor)  # a batch norm does not count it in the version, and its operator is not seen
        session.slots.outputs(context.call, buffers)
    if edges is not None:
        session.graph.watch(context, edges, outputs, listed=False, own=False)


def _own(prefix: str, tensors: Iterable[tuple[str, Any]]) -> NamedTensors:
    """Name the parameters or buffers of a Layer."""
    return [
        (f"{prefix}.{name}", tensor)
        for name, tensor in tensors
        if holds(tensor)
    ]
