"""A compiled function as one call: what goes in, what comes out, and which autograd nodes it made."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from trueup.adapters.torch.context import Context
from trueup.adapters.torch.functions import Execution
from trueup.adapters.torch.gradients import Edges, input_edges, watch
from trueup.adapters.torch.tensors import named_tensors

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Session


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
        self._execution: Execution | None = None
        self._edges: Edges = {}
        function = frame.f_locals["fn"]
        self._steps = isinstance(getattr(function, "__self__", None), torch.optim.Optimizer)
        if self._steps:  # the hooks that would tell are out of Dynamo's sight
            self._state.stepping = frame.f_code
        elif not self._state.modules:
            session.enter_model()
        if session.sees() and not self._state.busy:
            with session.observing(self._state, "a compiled function"):
                self._begin(function, frame.f_locals["args"], frame.f_locals["kwargs"])

    def leave(self, frame: FrameType) -> None:
        """End the call; without a result in ``frame`` it raised."""
        session, values = self._session, frame.f_locals
        if self._execution is not None and self._context is not None:
            self._state.contexts.pop()
        if "result" not in values:
            return
        if self._context is not None and session.active:
            with session.observing(self._state, "a compiled function"):
                self._end(self._context, values["result"])
        if self._steps:
            session._after_optimizer()

    def _begin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session, state = self._session, self._state
        module = _module(function)
        if module is not None and state.running and state.running[-1] is module:
            self._context = state.modules[-1]
            self._edges = input_edges(named_tensors("input", args, kwargs))
            if self._context.call.recorded:
                inside = ((f"param.{name}", p) for name, p in module.named_parameters() if "." in name)
                session.slots.inputs(self._context.call, inside)
            return
        name = getattr(function, "__qualname__", type(function).__name__)
        execution = Execution(session, f"torch.compile:{name}", function, args, kwargs)
        context = execution._begin()
        execution._before(context)
        self._execution, self._context = execution, context
        state.contexts.append(context)

    def _end(self, context: Context, result: Any) -> None:
        if self._execution is not None:
            self._execution._after(context, result)
        else:  # so that what the compiled backward executes finds its module
            watch(context, self._edges, list(named_tensors("output", result)), None, own=True)


def _module(function: Any) -> torch.nn.Module | None:
    """Return the module whose call is compiled: a bound method of it, or Dynamo's wrapper around it."""
    for found in (getattr(function, "__self__", None), getattr(function, "__wrapped__", None)):
        if isinstance(found, torch.nn.Module):
            return found
    return None
