"""A compiled function as one call: what goes in, what comes out, and which autograd nodes it made."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from trueup.recording.adapters.torch import functions
from trueup.recording.adapters.torch.context import Context
from trueup.recording.adapters.torch.gradients import Edges, watch
from trueup.recording.adapters.torch.tensors import named_tensors

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


class Region:
    """One execution of a compiled function, from the moment Dynamo is asked how to run it until `leave`.

    A compiled module is a call already, made by ``nn.Module.__call__``; the parameters of the modules inside it are added, for
    those do not run on their own. Any other function becomes an `api` call ``torch.compile:<name>``.

    Args:
        session: the capture.
        frame: of Dynamo's wrapper around the function: holds ``fn``, ``args``, ``kwargs`` and, at the end, ``result``.
    """

    def __init__(self, session: Session, frame: FrameType) -> None:
        self._session, self._state = session, session.threads.state
        self._context: Context | None = None
        self._edges: Edges | None = None
        self._is_module = False
        function, args, kwargs = (frame.f_locals[name] for name in ("fn", "args", "kwargs"))
        owner = getattr(function, "__self__", None)
        self._optimizer = owner if isinstance(owner, torch.optim.Optimizer) else None
        if self._optimizer is not None:  # the hooks that would tell are out of Dynamo's sight
            session.optimizers.begin(self._optimizer, frame.f_code)
        elif not self._state.modules and (module := _module(function)) is not None:
            session.enter_model(module)
        if session.sees() and not self._state.busy:
            with session.observing(self._state, "a compiled function"):
                self._begin(function, args, kwargs)

    def leave(self, frame: FrameType) -> None:
        """End the call; without a result in ``frame`` it raised."""
        session, values, context = self._session, frame.f_locals, self._context
        if context is not None and not self._is_module:
            self._state.contexts.pop()
        if "result" not in values:
            return
        if context is not None and session.active:
            with session.observing(self._state, "a compiled function"):
                self._end(context, values["args"], values["kwargs"], values["result"])
        if self._optimizer is not None:
            session.optimizers.end(self._optimizer)

    def _begin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session, state = self._session, self._state
        inputs = named_tensors("input", args, kwargs)
        module = _module(function)
        self._is_module = module is not None and bool(state.running) and state.running[-1] is module
        if module is not None and self._is_module:
            self._context = state.modules[-1]
            if self._context.call.recorded:
                inside = [(f"param.{name}", p) for name, p in module.named_parameters() if "." in name]
                session.slots.inputs(self._context.call, inside)
        else:
            name = getattr(function, "__qualname__", type(function).__name__)
            self._context = functions.begin(session, state, f"torch.compile:{name}", inputs, function, args, kwargs)
            state.contexts.append(self._context)
        self._edges = Edges(inputs) if torch.is_grad_enabled() else None

    def _end(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = named_tensors("output", result)
        if not self._is_module:
            inputs = named_tensors("input", args, kwargs)
            functions.end(self._session, context, self._edges, inputs, outputs, torch.compile, args, kwargs)
        elif self._edges is not None:  # so that what the compiled backward executes finds its module
            watch(context, self._edges, outputs, None, own=True)


def _module(function: Any) -> torch.nn.Module | None:
    """Return the module whose call is compiled: a bound method of it, or Dynamo's wrapper around it."""
    for found in (getattr(function, "__self__", None), getattr(function, "__wrapped__", None)):
        if isinstance(found, torch.nn.Module):
            return found
    return None
