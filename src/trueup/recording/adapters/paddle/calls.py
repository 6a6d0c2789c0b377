"""Level `api`: one operator, from the record of its inputs to that of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import paddle

from trueup.foundation.facts.operators import has, says
from trueup.recording.adapters.paddle.context import Context, ThreadState, enclosing, phase_of
from trueup.recording.adapters.paddle.gradients import Edges
from trueup.recording.adapters.paddle.invocations import Made
from trueup.recording.adapters.paddle.tensors import NamedTensors, describe_values, lists_of_tensors, named_tensors
from trueup.recording.recorder import Call
from trueup.recording.recorder.repeats import link

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

Function = Callable[..., Any]


def name_of(op: str) -> str:
    """Return ``batch_norm`` for ``paddle._C_ops.batch_norm``."""
    return op.rpartition(".")[2]


def execute(
    session: Session, state: ThreadState, op: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *,
    opaque: bool = True,
) -> Any:  # fmt: skip
    """Execute an operator and record it.

    Args:
        session: what records.
        state: of this thread.
        op: name of the operator, ``paddle._C_ops.matmul``.
        function: what executes it.
        args: its arguments.
        kwargs: likewise.
        opaque: whether what it executes is part of it.
    """
    context: Context | None = None
    inputs: NamedTensors = []
    versions: list[int] = []
    edges: Edges | None = None
    listed = not opaque
    made: Made | None = None
    with session.observing(state, op):
        given = {name: value for name, value in kwargs.items() if name != "out"} if kwargs else kwargs
        inputs = named_tensors("input", args, given)
        versions = [tensor._inplace_version() for _, tensor in inputs]
        if inputs and paddle.is_grad_enabled():
            edges = Edges(inputs)
            listed = listed or lists_of_tensors(args, kwargs)
        context = _begin(session, state, op, opaque=opaque)
        if context.call.recorded:
            session.slots.inputs(context.call, inputs)
            if session.invocations is not None:
                made = session.invocations.describe(args, kwargs)
            if inputs:
                _describe(session, context.call, args, kwargs, made)
    if context is None:  # the capture has just failed
        return function(*args, **kwargs)
    state.contexts.append(context)
    try:
        result = function(*args, **kwargs)
    finally:
        state.contexts.pop()
    if session.active:
        with session.observing(state, op):
            _end(session, context, edges, inputs, versions, result, args, kwargs, made, listed=listed)
    return result


def _describe(session: Session, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made | None) -> None:
    """Record what a call is given beside tensors, and at detail ``tensor`` how it is made."""
    values = describe_values(args, kwargs)
    if made is not None and session.invocations is not None:
        session.invocations.kept(made)
        session.recorder.value(call, (values, made.text))
    elif values is not None:
        session.recorder.value(call, values)


def _begin(session: Session, state: ThreadState, op: str, *, opaque: bool) -> Context:
    recorder = session.recorder
    operator, layer = enclosing(state)
    phase, scope, above = phase_of(state), "", None
    if operator is not None:
        phase, scope, above = operator.call.phase, operator.scope, operator.call
    elif layer is not None:
        scope, above = layer.scope, layer.call
    elif state.runs and state.runs[-1].within == len(state.passes) and state.passes:
        scope = state.runs[-1].scope
    call = recorder.begin(
        "api", phase, scope, op, parent=None if above is None else above.seq, site=session.site(state), forward_seq=None
    )
    if state.runs:
        link(state.runs, call)
    return Context(call, operator or layer, scope, opaque, depth=len(state.passes))


def _end(
    session: Session, context: Context, edges: Edges | None, inputs: NamedTensors, versions: list[int], result: Any,
    args: tuple[Any, ...], kwargs: dict[str, Any], made: Made | None, *, listed: bool,
) -> None:  # fmt: skip
    call, op = context.call, context.call.op
    outputs = named_tensors("output", result)
    if has(op, "allocates"):
        for _, tensor in outputs:
            session.buffers.allocated(tensor)
        return
    if isinstance(out := kwargs.get("out"), paddle.Tensor) and not any(out is tensor for _, tensor in outputs):
        outputs.append(("output.out", out))
    written = _written(session, op, inputs, versions, outputs)
    if (unwritten := says(op, "unwritten")) is not None:
        outputs = [(slot, tensor) for slot, tensor in outputs if not slot.startswith(tuple(unwritten))]
    if outputs and call.recorded and not inputs:  # a factory
        _describe(session, call, args, kwargs, made)
    session.slots.results(call, inputs, outputs, written)
    if edges is not None and outputs:
        session.graph.watch(context, edges, outputs, listed=listed, own=True)


def _written(session: Session, op: str, inputs: NamedTensors, versions: list[int], outputs: NamedTensors) -> set[int]:
    """Return which outputs lie in memory that the operator was given and wrote; inputs that it wrote become outputs."""
    given = {id(tensor) for _, tensor in inputs}
    results = {id(tensor) for _, tensor in outputs}
    for (slot, tensor), version in zip(inputs, versions, strict=True):
        if tensor._inplace_version() != version and id(tensor) not in results:
            outputs.append((slot.replace("input", "output.written", 1), tensor))
            results.add(id(tensor))
    written = {number for number in results if number in given}
    if has(op, "rewrites") or has(op, "in-place"):
        memory = session.buffers.memory
        before = {id(found) for _, tensor in inputs if (found := memory(tensor)) is not None}
        written |= {id(tensor) for _, tensor in outputs if id(memory(tensor)) in before}
    return written
