"""Level `module`: each call of an `nn.Module`, with its parameters, and its backward.

`nn.Module.__call__` is wrapped for the time of the capture. Global module hooks would not see keyword arguments before the
call, hooks on each module would stay in the user's model when it is pickled, and full backward hooks change the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from trueup.recording.adapters.torch.context import Context, ThreadState, phase_of
from trueup.recording.adapters.torch.gradients import Edges, watch
from trueup.recording.adapters.torch.tensors import NamedTensors, describe_values, named_tensors
from trueup.recording.recorder.repeats import link
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


def module_calls(session: Session) -> Replacement:
    """Return the replacement of `nn.Module.__call__` that makes each call of a module one of the capture."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            state = session.threads.state
            if not state.modules and not state.busy:
                session.enter_model(module)
                if session.around_model is not None and session.sees():
                    return session.around_model(partial(run, state, original), module, args, kwargs)
            if not session.active or state.busy or not session.sees():
                return original(module, *args, **kwargs)
            return run(state, original, module, args, kwargs)

        return call

    short = session.slots.short
    run: Callable[..., Any] = partial(_run, session) if short is None else short.module
    if short is not None:
        short.teach(
            run_module=RUN_MODULE, execute_module=_execute, module_at_length=partial(_run, session),
            begin_module=partial(_begin, session), parameters_of=lambda module: _own("param", _parameters(module)),
            buffers_of=lambda module: _own("output.buffer", _buffers(module)),
        )  # fmt: skip

    return Replacement(torch.nn.Module, "__call__", make)


def _run(
    session: Session, state: ThreadState, original: Callable[..., Any], module: torch.nn.Module,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    context: Context | None = None
    edges: Edges | None = None
    called = module._orig_mod if type(module).__name__ == "OptimizedModule" else module  # torch.compile's wrapper is no module
    with session.observing(state, type(called).__name__):
        context, edges = _before(session, state, called, args, kwargs)
    if context is None:  # the capture has just failed
        return original(module, *args, **kwargs)
    state.modules.append(context)
    state.running.append(called)
    contexts, state.contexts = state.contexts, []  # what runs inside belongs to the module, not to an outer function
    try:
        result = _execute(original, module, args, kwargs)
    finally:
        state.modules.pop()
        state.running.pop()
        state.contexts = contexts
    if session.active:
        with session.observing(state, type(called).__name__):
            _after(session, called, context, edges, result)
    return result


def _execute(original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(module, *args, **kwargs)


RUN_MODULE = _execute.__code__
"""Code of the frame around the body of each module that runs: the call stack up to it is known."""


def _before(
    session: Session, state: ThreadState, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Context, Edges | None]:
    context = _begin(session, state, module)
    call = context.call
    if not session.records("module"):
        return context, None
    inputs = named_tensors("input", args, kwargs)
    if call.recorded:
        session.slots.inputs(call, inputs)
        session.slots.inputs(call, _own("param", _parameters(module)))
        if (values := describe_values(args, kwargs)) is not None:
            session.recorder.value(call, values)
    return context, Edges(inputs) if torch.is_grad_enabled() else None


def _after(session: Session, module: torch.nn.Module, context: Context, edges: Edges | None, result: Any) -> None:
    outputs = named_tensors("output", result)
    session.slots.module_outputs(context.call, outputs)
    if context.call.recorded:
        session.slots.outputs(context.call, outputs)
        session.slots.outputs(context.call, _own("output.buffer", _buffers(module)))
    if edges is not None:
        watch(context, edges, outputs, session.slots, own=False)


def _own(prefix: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    """Name the parameters or buffers of a module, those left out that have no shape before its first call (lazy modules)."""
    return [(f"{prefix}.{name}", tensor) for name, tensor in tensors if not is_lazy(tensor)]


def _parameters(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return what ``named_parameters(recurse=False)`` gives, which looks for submodules and duplicates first."""
    held = module._parameters
    if type(module).named_parameters is not torch.nn.Module.named_parameters or len(held) > len({*map(id, held.values())}):
        return module.named_parameters(recurse=False)  # type: ignore[no-any-return]
    return [(name, tensor) for name, tensor in held.items() if tensor is not None]


def _buffers(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return what ``named_buffers(recurse=False)`` gives; most modules have none."""
    if type(module).named_buffers is torch.nn.Module.named_buffers and not module._buffers:
        return ()
    return module.named_buffers(recurse=False)  # type: ignore[no-any-return]


def _begin(session: Session, state: ThreadState, module: torch.nn.Module) -> Context:
    parent = state.modules[-1] if state.modules else None
    scope = session.scopes.path(module, state.running[-1] if state.running else None)
    session.notice_thread(state)
    task = torch._C._current_graph_task_id()
    if state.contexts:
        phase = state.contexts[-1].call.phase
    elif task == -1:
        phase = "forward"
    else:  # with gradients on, a module that runs inside a backward pass is re-run by activation checkpointing
        phase = "recompute" if torch.is_grad_enabled() else phase_of(state)
    call = session.recorder.begin(
        "module", phase, scope, type(module).__name__,
        parent=None if parent is None else parent.call.seq,
        site=session.site(state),
    )  # fmt: skip
    if state.runs:
        link(state.runs, call)
    return Context(call, parent, scope, session.threads, graph_task=task)
