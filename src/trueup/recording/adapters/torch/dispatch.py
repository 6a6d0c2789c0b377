"""Level `aten`: every dispatcher operator, in forward, recompute, backward, optimizer and collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.foundation.facts.operators import has, says
from trueup.recording.adapters.torch.context import ThreadState, enclosing, phase_of, running_owner
from trueup.recording.adapters.torch.functions import inputs_of, record_values
from trueup.recording.adapters.torch.tensors import NamedTensors, named_tensors
from trueup.recording.recorder import Call
from trueup.recording.recorder.repeats import link

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session

COMMUNICATION = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
"""Operators that are recorded by `trueup.recording.adapters.torch.collectives`, whichever levels are."""

@dataclass(frozen=True, slots=True)
class Operator:
    """What the schema of an operator says, read once."""

    name: str
    recorded: bool
    written: tuple[tuple[int, str], ...]
    """Arguments it writes: (position, name)."""
    view: bool
    """Whether its result is an alias of an input that it does not write."""
    opaque: bool = False
    """Whether it executes what this mode does not see, and may write any argument."""

    @classmethod
    def of(cls, func: Any) -> Operator:
        """Read a schema; a higher-order operator (``flex_attention``, ``cond``) has none."""
        schema = getattr(func, "_schema", None)
        if schema is None:
            return cls(f"higher_order::{func.name()}", recorded=True, written=(), view=False, opaque=True)
        name = schema.name
        unmarked = says(name, "writes") or ()
        written = tuple(
            (k, a.name)
            for k, a in enumerate(schema.arguments)
            if a.name in unmarked or (a.alias_info is not None and a.alias_info.is_write)
        )
        silent = has(name, "no-tensor") or has(name, "allocates") or name.startswith(("prim::", "profiler::", *COMMUNICATION))
        view = has(name, "shares") or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        return cls(name, not silent, written, view)


class DispatchMode(TorchDispatchMode):
    """Makes each dispatcher operator an `aten` call."""

    supports_higher_order_operators = True  # else they raise under this mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that Dynamo need not be kept off: it is not at work under this mode, and the wrapper costs 3 us an operator."""
        return False

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._operators: dict[Any, Operator] = {}
        self._simple: dict[int, tuple[Any, Operator | None]] = {}
        """By address: operators that the short way, in C, records by their schema alone, or passes by (None)."""
        short = None if session.forces("aten") else session.slots.short
        self._call: Callable[..., Any] = self._at_length if short is None else short.operator
        if short is not None:
            short.teach(operators=self._simple, operator_at_length=self._at_length, begin_operator=self.begin)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator and record it."""
        return self._call(func, args, kwargs or {})

    def _at_length(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        state = session.threads.state
        if state.busy or not session.sees():
            if session.active and not state.busy:  # a trace is under way: what it writes is announced by nobody
                session.buffers.forget()
            return _execute(func, args, kwargs)
        operator, call = None, None
        with session.observing(state, "an operator"):
            operator = self._operator(func)
            if operator.recorded:
                call = self.begin(operator, state)
                if session.forcing is not None and session.forces("aten"):
                    session.forcing.give(call, named_tensors("input", args, inputs_of(kwargs)))
                self._before(call, func, args, kwargs)
        result = _execute(func, args, kwargs)
        if operator is not None and session.active:
            with session.observing(state, operator.name):
                if call is not None:
                    self._after(operator, call, args, kwargs, result)
                elif has(operator.name, "allocates"):
                    session.buffers.allocated(result)
        return result

    def _operator(self, func: Any) -> Operator:
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = Operator.of(func)
            if not (operator.opaque or has(operator.name, "unwritten") or has(operator.name, "allocates")):
                self._simple[id(func)] = func, operator if operator.recorded else None
        return operator

    def _before(self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.recorded:
            self._session.slots.inputs(call, named_tensors("input", args, inputs_of(kwargs)))
            record_values(self._session, call, func, args, kwargs)
        elif self._session.buffers.in_flight:  # it may write what a collective has just computed
            self._session.collectives.settle()

    def _after(self, operator: Operator, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        session = self._session
        outputs, written = _outputs(operator, args, kwargs, result)
        if (unwritten := says(operator.name, "unwritten")) is not None:
            for slot, tensor in outputs:
                if slot in unwritten and has(operator.name, "workspace"):
                    session.buffers.allocated(tensor)
            outputs = [(slot, tensor) for slot, tensor in outputs if slot not in unwritten]
        if operator.opaque:
            written = [tensor for _, tensor in named_tensors("input", args, kwargs)]
        for tensor in written:
            session.buffers.written(tensor)
        if not operator.view:
            session.slots.produced(call, outputs)
        if call.recorded:
            session.slots.outputs(call, outputs, named_tensors("input", args) if operator.view else ())

    def begin(self, operator: Operator, state: ThreadState) -> Call:
        """Begin the call of an operator that executes now on this thread."""
        recorder = self._session.recorder
        task = torch._C._current_graph_task_id()
        above = enclosing(state)
        module = state.modules[-1] if state.modules else None
        call: Call | None
        if above is not None:
            phase, scope, call = above.call.kind.phase, above.scope, above.call
        elif module is not None and module.graph_task == task:
            phase, scope, call = phase_of(state), module.scope, module.call
        elif state.stepping is not None and phase_of(state) == "optimizer":  # whose functions may have passed by unmarked
            phase, scope, call = "optimizer", "", None
        elif (owner := running_owner()) is not None:  # no function of Python's is executing: it is autograd's own
            phase, scope, call = "backward", owner.scope, owner.backward_call(recorder)
        else:
            phase, scope, call = phase_of(state) if task == -1 else "backward", "", None
        begun = recorder.begin(
            "aten",
            phase,
            scope,
            operator.name,
            parent=None if call is None else call.seq,
            site=self._session.site(state) if call is None else call.site,
            forward_seq=None if call is None else call.forward_seq,
        )
        if state.runs:
            link(state.runs, begun)
        return begun


def _execute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute an operator past the function modes: they saw the function of the user's that it is part of, if there was one."""
    if torch._C._len_torch_function_stack():
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _outputs(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[NamedTensors, list[torch.Tensor]]:
    """Return the outputs (results, then written arguments that are no results) and the tensors that were written."""
    outputs = named_tensors("output", result)
    written: list[torch.Tensor] = []
    if operator.written:
        returned = {id(t) for _, t in outputs}
        for position, name in operator.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            found = [(f"output.{name}", value)] if isinstance(value, torch.Tensor) else named_tensors(f"output.{name}", value)
            for slot, tensor in found:
                written.append(tensor)
                if id(tensor) not in returned:
                    outputs.append((slot, tensor))
    return outputs, written
