"""Entrances of PyTorch that no hook reaches, replaced for the time of a capture."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from trueup.recording.adapters.torch.functions import execute
from trueup.recording.adapters.torch.replays import follow, follow_reentrant
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


def entrances(session: Session, *, functions: bool) -> list[Replacement]:
    """Return the replacements that a capture needs besides `nn.Module.__call__`.

    Args:
        session: the capture.
        functions: whether the function mode is on; without it only the loss and the backward passes are of interest.
    """
    from torch.utils import checkpoint

    always = [
        Replacement(torch.autograd, "_engine_run_backward", functools.partial(_run_backward, session)),
        Replacement(checkpoint, "_checkpoint_without_reentrant_generator", functools.partial(_checkpoint, session)),
        Replacement(checkpoint.CheckpointFunction, "forward", functools.partial(_checkpoint_reentrant, session)),
    ]
    if not functions:
        return [*always, Replacement(torch.Tensor, "backward", functools.partial(_backward, session))]
    return [
        *always,
        Replacement(torch.autograd.Function, "apply", functools.partial(_apply, session)),
        Replacement(torch.UntypedStorage, "resize_", functools.partial(_resize, session)),
    ]


def _backward(session: Session, original: Any) -> Any:
    """Record the loss, which the function mode does where it is on."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        state = session.threads.state
        if session.active and not state.busy:
            with session.observing(state, "the loss"):
                session.slots.loss(args, kwargs)
        return original(*args, **kwargs)

    return backward


def _apply(session: Session, original: Any) -> Any:
    """Make each ``Function.apply`` an api call: user-defined functions are no overridable functions of PyTorch."""
    plain = original.__func__

    def apply(cls: type, /, *args: Any, **kwargs: Any) -> Any:
        state = session.threads.state
        seen = state.observed or torch._C._current_graph_task_id() != -1
        if state.busy or not seen or not session.sees():
            return plain(cls, *args, **kwargs)
        name = f"{cls.__module__}.{cls.__qualname__}.apply"
        return execute(session, state, name, functools.partial(plain, cls), args, kwargs)

    return classmethod(apply)


def _run_backward(session: Session, original: Any) -> Any:
    """Keep the function mode on in a backward pass.

    PyTorch switches a mode off while it handles ``Tensor.backward``, and with it for all that the pass executes: the
    functions that activation checkpointing runs again, and those in the backward of user-defined functions.
    """

    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not session.active:
            return original(t_outputs, *args, **kwargs)
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

    return run_backward


def _resize(session: Session, original: Any) -> Any:
    """Note that a storage was given other memory, which holds nothing yet: FSDP frees and allocates its parameters so."""

    def resize_(storage: torch.UntypedStorage, size: Any) -> Any:
        grown = storage.nbytes() < size
        result = original(storage, size)
        if session.active:
            session.buffers.resized(storage, grown=grown)
        return result

    return resize_


def _checkpoint(session: Session, original: Any) -> Any:
    """Follow a function that is checkpointed: a later run of it starts in the middle of the backward."""

    def generator(fn: Any, *rest: Any, **kwargs: Any) -> Any:
        return follow(session, original, fn, *rest, **kwargs) if session.active else original(fn, *rest, **kwargs)

    return generator


def _checkpoint_reentrant(session: Session, original: Any) -> Any:
    """Follow a function that is checkpointed by the reentrant autograd function."""
    plain = original.__func__

    def forward(ctx: Any, run_function: Any, *rest: Any) -> Any:
        return plain(ctx, follow_reentrant(session, run_function) if session.active else run_function, *rest)

    return staticmethod(forward)
