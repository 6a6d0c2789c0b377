"""Entrances of PyTorch that no hook reaches, replaced for the time of a capture."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from trueup.recording.adapters.torch.context import SessionCore
from trueup.recording.adapters.torch.functions import execute
from trueup.recording.engine.checkpointing import Key, Run, followed
from trueup.recording.engine.replacing import Around, Replacement

Apply = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
SINGLE = torch.autograd.function._SingleLevelFunction


def applying(run: Apply) -> list[Replacement]:
    """Return the replacements by which ``run(name, function, args, kwargs)`` runs each ``Function.apply``, which no mode sees. Many
    take that by name when they are imported (``gelu = OwnGelu.apply``), so what it calls is replaced; within `torch.func`, which
    calls something else there, it is replaced itself."""

    def within(original: Any) -> Any:
        plain = original.__func__

        def apply(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            transformed = torch._C._are_functorch_transforms_active()
            return run(_name(cls), functools.partial(plain, cls), args, kwargs) if transformed else plain(cls, *args, **kwargs)

        return classmethod(apply)

    def outside(original: Any) -> Any:
        replaced = original.__func__ if isinstance(original, classmethod) else None  # by another capture or policy

        def apply(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            plain = functools.partial(replaced, cls) if replaced is not None else super(SINGLE, cls).apply
            return run(_name(cls), plain, args, kwargs) if issubclass(cls, torch.autograd.Function) else plain(*args, **kwargs)

        return classmethod(apply)

    return [Replacement(torch.autograd.Function, "apply", within), Replacement(SINGLE, "apply", outside)]


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.apply"


def reentrant(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Replacement:
    """Return the replacement that wraps each function checkpointed by the reentrant autograd function."""

    def make(original: Any) -> Any:
        plain = original.__func__

        def forward(ctx: Any, run_function: Any, *rest: Any) -> Any:
            return plain(ctx, wrap(run_function), *rest)

        return staticmethod(forward)

    return Replacement(checkpoint.CheckpointFunction, "forward", make)


def entrances(session: SessionCore, *, functions: bool) -> list[Replacement]:
    """Return what a capture replaces besides `nn.Module.__call__`; without the function mode, only loss and backward passes are
    of interest."""
    always = [
        Around(torch.autograd, "_engine_run_backward", functools.partial(_run_backward, session)),
        Around(checkpoint, "_checkpoint_without_reentrant_generator", functools.partial(_checkpoint, session)),
        reentrant(lambda function: follow_reentrant(session, function) if session.active else function),
    ]
    if not functions:
        return [*always, Around(torch.Tensor, "backward", functools.partial(_backward, session))]
    resize = Around(torch.UntypedStorage, "resize_", functools.partial(_resize, session))
    return [*always, *applying(functools.partial(_apply, session)), resize]


def _backward(session: SessionCore, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the loss, which the function mode does where it is on."""
    state = session.threads.state
    if session.active and not state.busy:
        with session.observing(state, "the loss"):
            session.slots.loss(args, kwargs)
    return original(*args, **kwargs)


def _apply(session: SessionCore, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute a user-defined function as an api call."""
    state = session.threads.state
    seen = state.observed or torch._C._current_graph_task_id() != -1
    if state.busy or not seen or not session.sees():
        return function(*args, **kwargs)
    return execute(session, state, name, function, args, kwargs)


def _run_backward(session: SessionCore, original: Any, t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the function mode on in a backward pass: PyTorch switches it off in ``Tensor.backward`` and all that runs in it,
    functions that activation checkpointing runs again and the backward of user-defined ones."""
    if not session.active:
        try:
            return original(t_outputs, *args, **kwargs)
        finally:
            session.optimizers.backward(session.threads.state)  # steps are counted idle or not
    shared = session.threads.state.shared
    builds_graph = bool(args[2]) if len(args) > 2 else False  # grad_tensors, retain_graph, create_graph, inputs
    shared.second_order += builds_graph
    try:
        with session.function_mode_on():
            return original(t_outputs, *args, **kwargs)
    finally:
        shared.second_order -= builds_graph
        session.optimizers.backward(session.threads.state)
        if session.buffers.in_flight and torch._C._current_graph_task_id() == -1:
            with session.observing(session.threads.state, "collectives of the backward"):
                session.collectives.settle()


def _resize(session: SessionCore, original: Any, storage: torch.UntypedStorage, size: Any) -> Any:
    """Note that a storage was given other memory, which holds nothing yet: FSDP frees and allocates its parameters so."""
    grown = storage.nbytes() < size
    result = original(storage, size)
    if session.active:
        session.buffers.resized(storage, grown=grown)
    return result


def _checkpoint(session: SessionCore, original: Any, fn: Any, *rest: Any, **kwargs: Any) -> Any:
    """Follow a function that is checkpointed: a later run of it starts in the middle of the backward."""
    return follow(session, original, fn, *rest, **kwargs) if session.active else original(fn, *rest, **kwargs)


# ---------------------------------------------------------------- activation checkpointing (`engine.checkpointing`)
def follow_reentrant(session: SessionCore, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that PyTorch is about to run, and to run again in the backward."""
    return _followed(session, function, defaultdict(list), ran=False)


def follow(session: SessionCore, original: Callable[..., Any], function: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """Stand in for the generator around the first run of a function; it is handed the function for the later runs."""
    runs, task = _now(session)
    first: dict[Key, list[int]] = defaultdict(list)
    run = Run(first, _scope(session), repeats=False, within=task, frame=sys._getframe(1))
    runs.append(run)
    try:
        yield from original(_followed(session, function, first, ran=True), *rest, **kwargs)
    finally:
        run.frame = None
        if run in runs:
            runs.remove(run)


def _followed(
    session: SessionCore, function: Callable[..., Any], first: dict[Key, list[int]], *, ran: bool
) -> Callable[..., Any]:
    return followed(function, first, _scope(session), lambda: _now(session), ran=ran)


def _now(session: SessionCore) -> tuple[list[Run], int]:
    return session.threads.state.runs, torch._C._current_graph_task_id()


def _scope(session: SessionCore) -> str:
    modules = session.threads.state.modules
    return modules[-1].scope if modules else ""
