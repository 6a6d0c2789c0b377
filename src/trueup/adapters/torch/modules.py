"""Level `module`: each call of an `nn.Module`, with its parameters, and its backward.

`nn.Module.__call__` is wrapped for the time of the capture. Global module hooks would not see keyword arguments before the
call, hooks on each module would stay in the user's model when it is pickled, and full backward hooks change the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trueup.adapters.torch.context import Context, phase_of
from trueup.adapters.torch.gradients import input_edges, watch
from trueup.adapters.torch.tensors import describe_values, named_tensors

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Session


class ModuleCalls:
    """Wraps `nn.Module.__call__` between `install` and `remove`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._original: Callable[..., Any] | None = None

    def install(self) -> None:
        """Start to see module calls."""
        original = self._original = torch.nn.Module.__call__
        session = self._session

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            state = session.threads.state
            if state.busy or not session.active:
                return original(module, *args, **kwargs)
            return self._run(original, module, args, kwargs)

        torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put the original back."""
        if self._original is not None:
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
            self._original = None

    def _run(
        self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        session = self._session
        state = session.threads.state
        context = self._begin(module)
        call = context.call
        inputs = list(named_tensors("input", args, kwargs))
        with session.quietly(state):
            edges = input_edges(inputs)
            if call.recorded:
                session.record_tensors(call, inputs)
                session.record_tensors(call, [(f"param.{k}", p) for k, p in module.named_parameters(recurse=False)])
                if (values := describe_values(args, kwargs)) is not None:
                    session.recorder.value(call, values)
        state.modules.append(context)
        state.running.append(module)
        contexts, state.contexts = state.contexts, []  # what runs inside belongs to the module, not to an outer function
        try:
            result = original(module, *args, **kwargs)
        finally:
            state.modules.pop()
            state.running.pop()
            state.contexts = contexts
        with session.quietly(state):
            outputs = list(named_tensors("output", result))
            if call.recorded:
                buffers = [(f"output.buffer.{k}", b) for k, b in module.named_buffers(recurse=False)]
                session.record_outputs(call, outputs + buffers)
                watch(context, edges, outputs, session.record_gradients, own=False)
        return result

    def _begin(self, module: torch.nn.Module) -> Context:
        session = self._session
        state = session.threads.state
        parent = state.modules[-1] if state.modules else None
        scope = session.scopes.path(module, state.running[-1] if state.running else None)
        session.notice_module(module, state)
        task = torch._C._current_graph_task_id()
        if state.contexts:
            phase = state.contexts[-1].call.phase
        else:
            phase = "forward" if task == -1 else phase_of(state)
        call = session.recorder.begin(
            "module", phase, scope, type(module).__name__,
            parent=None if parent is None else parent.call.seq,
            site=session.recorder.sites.here() if session.records("module") else None,
        )  # fmt: skip
        return Context(call, parent, scope, session.threads, graph_task=task)
