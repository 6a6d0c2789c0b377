"""Level `api`: every user-facing function, seen by a TorchFunctionMode, with its backward.

The mode is on whichever levels are recorded: it gives `aten` calls their api call, and marks autograd nodes so that backward
operators find their scope.

Level `aten`: every dispatcher operator, in forward, recompute, backward, optimizer and collectives.
"""

from __future__ import annotations
import __future__

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.foundation.facts.operators import has, says
from trueup.recording.adapters.torch.context import (
    Context,
    SessionCore,
    ThreadState,
    enclosing,
    in_optimizer,
    phase_of,
    running_owner,
)
from trueup.recording.adapters.torch.gradients import Edges, watch
from trueup.recording.adapters.torch.tensors import FACTS, NamedTensors, describe_values, named_tensors
from trueup.recording.engine.checkpointing import link, repeated_scope
from trueup.recording.recorder import Call
from trueup.recording.recorder.sites import CALLED, from_line

COMMUNICATION = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
"""Operators that are recorded by `trueup.recording.adapters.torch.collectives`, whichever levels are."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What the schema of an operator says, read once."""

    name: str
    recorded: bool
    written: tuple[tuple[int, str], ...]  # arguments it writes: (position, name)
    view: bool  # whether its result is an alias of an input that it does not write
    opaque: bool = False  # whether it executes what this mode does not see, and may write any argument

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
        silent = has(name, "no-tensor") or has(name, "allocates") or has(name, "memory")
        silent = silent or name.startswith(("prim::", "profiler::", *COMMUNICATION))
        view = has(name, "shares") or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        return cls(name, not silent, written, view)


class DispatchMode(TorchDispatchMode):
    """Makes each dispatcher operator an `aten` call."""

    supports_higher_order_operators = True  # else they raise under this mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that Dynamo need not be kept off: it is not at work under this mode, and the wrapper costs 3 us an operator."""
        return False

    def __init__(self, session: SessionCore) -> None:
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
        operator, call, noted = None, None, None
        with session.observing(state, "an operator"):
            operator = self._operator(func)
            if operator.recorded:
                call = self.begin(operator, state)
                if session.forcing is not None and session.forces("aten"):
                    session.forcing.give(call, named_tensors("input", args, inputs_of(kwargs)))
                noted = self._before(operator, call, func, args, kwargs)
        result = _execute(func, args, kwargs)
        if operator is not None and session.active:
            with session.observing(state, operator.name):
                if call is not None:
                    self._after(operator, call, noted, args, kwargs, result)
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

    def _before(
        self, operator: Operator, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]  # noqa: ARG002
    ) -> Any:
        """Record the inputs of a call; return what `_after` is to know of it."""
        if call.recorded:
            self._session.slots.inputs(call, named_tensors("input", args, inputs_of(kwargs)))
            record_values(self._session, call, func, args, kwargs)
        elif self._session.buffers.in_flight:  # it may write what a collective has just computed
            self._session.collectives.settle()

    def _after(
        self, operator: Operator, call: Call, noted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any  # noqa: ARG002
    ) -> None:
        """Record what a call computed."""
        outputs = self._account(operator, call, args, kwargs, result)
        if call.recorded:
            self._session.slots.outputs(call, outputs, named_tensors("input", args) if operator.view else ())

    def _account(self, operator: Operator, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> NamedTensors:
        """Keep account of the buffers that a call wrote; return its outputs, but those that it leaves unwritten."""
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
        return outputs

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
            "aten", phase, scope, operator.name, parent=None if call is None else call.seq,
            site=self._session.site(state) if call is None else call.site,
            forward_seq=None if call is None else call.forward_seq,
        )  # fmt: skip
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


QUERIES, EXPOSES, PROPERTIES = (frozenset(FACTS[name].split()) for name in ("queries", "exposes", "properties"))
NOT_COMPUTING = tuple(FACTS["not_computing"].split())
BUFFERS_WRITTEN: dict[str, dict[str, tuple[int, str]]] = {
    name: {"running_mean": (first, "running_mean"), "running_var": (first + 1, "running_var")}
    for name, first in FACTS["running_statistics"].items()
}
"""Functions that write arguments which their schema does not mark as written: output name -> (position, keyword)."""

UNVERSIONED = "torch._fused_", "torch._amp_"
"""Start of the names of functions that write their arguments without counting it in the version (PyTorch 2.13)."""


def inputs_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without ``out``: what a function only writes to is no input, and may hold anything."""
    return {name: value for name, value in kwargs.items() if name != "out"} if "out" in kwargs else kwargs


class FunctionMode(TorchFunctionMode):
    """Makes each outermost call of an overridable function an `api` call."""

    def __init__(self, session: SessionCore) -> None:
        super().__init__()
        self._session = session
        _public()  # 3 ms that the first recorded step would pay otherwise
        self._names: dict[Any, str | None] = {}
        self._simple: dict[Any, str | None] = {}
        """Those of `_names` of which nothing more is to be known: what the short way, in C, works with."""
        short = None if session.forces("api") else session.slots.short
        self._call: Callable[..., Any] = self._at_length if short is None else short.function
        if short is not None:
            short.teach(
                names=self._simple, function_at_length=self._at_length, begin_function=partial(_begin, session),
                buffers_written=BUFFERS_WRITTEN, add_buffers=_add_buffers,
            )  # fmt: skip

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a function and record it."""
        kwargs = kwargs or {}
        frame: FrameType | None = sys._getframe().f_back
        line = line_of(func, kwargs) if frame is None or frame.f_code is _HANDLED else from_line(frame)
        return line(self._call, func, args, kwargs)

    def _at_length(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        state = session.threads.state
        if state.busy or not session.sees():
            return line_of(func, kwargs)(func, *args, **kwargs)
        try:
            name = self._names[func]
        except (KeyError, TypeError):  # TypeError: a callable that has no hash
            name = self._name(func)
        if name is None:
            if getattr(func, "__name__", "") in EXPOSES:
                with session.observing(state, "memory handed out"):
                    session.buffers.exposed(args[0], filled="storage" not in func.__name__)
            return line_of(func, kwargs)(func, *args, **kwargs)
        if state.stepping is not None and session.passes_optimizer and not state.modules and in_optimizer(state):
            return line_of(func, kwargs)(func, *args, **kwargs)
        if name == "torch.Tensor.backward":
            with session.observing(state, "the loss"):
                session.slots.loss(args, kwargs)
            return line_of(func, kwargs)(func, *args, **kwargs)
        if has(name, "allocates"):
            result = line_of(func, kwargs)(func, *args, **kwargs)
            with session.observing(state, name):
                session.buffers.allocated(result)
            return result
        return execute(session, state, name, func, args, kwargs)

    def _name(self, func: Callable[..., Any]) -> str | None:
        name = name_of(func)
        with suppress(TypeError):
            self._names[func] = name
            if _is_simple(func, name):
                self._simple[func] = name
        return name


def _is_simple(func: Callable[..., Any], name: str | None) -> bool:
    """Tell whether all calls of a function are recorded alike, or none."""
    if name is None:
        return getattr(func, "__name__", "") not in EXPOSES
    special = name == "torch.Tensor.backward" or has(name, "allocates") or has(name, "unwritten")
    return not (special or name.startswith(UNVERSIONED))


@cache
def _public() -> dict[Any, str]:
    """Return the names under which functions can be overridden, as PyTorch's own `resolve_name` (2.13) knows them: a method of a
    property has that property's. To ask it makes the list of what is tested besides, which took a fifth of the first step of a
    small training, and its wrapper changes the filters of warnings, after which Python shows each warning of the program again."""
    names: dict[Any, str] = {}
    lists = {
        "torch": (torch, torch.__all__), "torch.functional": (torch.functional, torch.functional.__all__),
        **{name: (owner, dir(owner)) for name, owner in (
            ("torch.nn.functional", torch.nn.functional), ("torch.nn.init", torch.nn.init), ("torch.Tensor", torch.Tensor),
            ("torch.linalg", torch.linalg), ("torch.fft", torch.fft), ("torch.special", torch.special),
        )},
    }  # fmt: skip
    for where, (owner, listed) in lists.items():
        for name in listed:
            if name == "__weakref__" if owner is torch.Tensor else name.startswith("__") or name == "unique_dim":
                continue
            func = getattr(owner, name)
            if isinstance(func, ModuleType | __future__._Feature):
                continue
            if callable(func):
                if owner is not torch.Tensor or getattr(object, name, None) != func:
                    names[func] = f"{where}.{name}"
            elif hasattr(func, "__get__"):
                names[func.__get__], names[func.__set__] = f"{where}.{name}.__get__", f"{where}.{name}.__set__"
    return names


def full_name(func: Callable[..., Any]) -> str | None:
    """Return the name under which a function can be overridden, None where it cannot."""
    return str(func) if isinstance(func, OpOverload | OpOverloadPacket) else _public().get(func)


def name_of(func: Callable[..., Any]) -> str | None:
    """Return the public name of a function, or None when it computes nothing."""
    name = full_name(func) or f"{getattr(func, '__module__', '')}.{getattr(func, '__name__', type(func).__name__)}"
    head, _, last = name.rpartition(".")
    if last in ("__get__", "__set__", "__delete__"):
        attribute = head.rpartition(".")[2]
        return head if last == "__get__" and attribute in PROPERTIES else None
    if last in QUERIES or name.startswith(NOT_COMPUTING):
        return None
    return name


class Names(dict[Any, str | None]):
    """The names of functions, each found once."""

    def __missing__(self, func: Callable[..., Any]) -> str | None:
        found = self[func] = name_of(func)
        return found

    def of(self, func: Callable[..., Any]) -> str | None:
        """Return the public name of a function, or None when it computes nothing."""
        try:
            return self[func]
        except TypeError:  # a callable that has no hash
            return name_of(func)


_HANDLED: CodeType = handle_torch_function.__code__
_OURS = str(Path(__file__).parents[3]) + os.sep


def line_of(func: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return what calls, ``(function, *args, **kwargs)``, from the line that called ``func``, which a mode was given: a warning
    names that line (`callers`).

    A function that is written in Python hands itself to the mode, from a frame of its own. `nn.Softmax` says how many frames above
    the function stands the one to name.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename.startswith(_OURS) or frame.f_code.co_name == CALLED):
        frame = frame.f_back
    if frame is not None and frame.f_code is _HANDLED and (frame := frame.f_back) is not None:
        frame = frame.f_back if frame.f_code is getattr(func, "__code__", None) else frame
    if frame is None:  # a thread of autograd's
        return _directly
    line = from_line(frame)
    for _ in range(kwargs.get("_stacklevel", 0) - 3 if kwargs else 0):
        if (frame := frame.f_back) is not None:
            line = partial(from_line(frame), line)
    return line


def _directly(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def execute(
    session: SessionCore, state: ThreadState, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Execute a function between the record of its inputs and that of its outputs."""
    context: Context | None = None
    inputs: NamedTensors = []
    edges: Edges | None = None
    with session.observing(state, name):
        inputs = named_tensors("input", args, inputs_of(kwargs))
        context = begin(session, state, name, inputs, func, args, kwargs)
        if torch.is_grad_enabled():
            edges = Edges(inputs)
        if session.buffers.in_flight and not context.call.kind.recorded:  # it may write what a collective has just computed
            session.collectives.settle()
        versions = _versions(inputs)
    if context is None:  # the capture has just failed
        return line_of(func, kwargs)(func, *args, **kwargs)
    state.contexts.append(context)
    try:
        result = line_of(func, kwargs)(func, *args, **kwargs)
    finally:
        state.contexts.pop()
    if session.active:
        with session.observing(state, name):
            outputs = named_tensors("output", result)
            _add_written(outputs, inputs, versions, _written_uncounted(name))
            if "out" in kwargs:
                _add_out(session, outputs, kwargs["out"])
            if (unwritten := says(name, "unwritten")) is not None:
                outputs = [(slot, tensor) for slot, tensor in outputs if slot not in unwritten]
            if name in BUFFERS_WRITTEN:
                _add_buffers(outputs, name, args, kwargs)
            end(session, context, edges, inputs, outputs, func, args, kwargs)
    return result


def _versions(inputs: NamedTensors) -> list[int | None]:
    try:
        return [t._version for _, t in inputs]
    except RuntimeError:  # an inference tensor tracks none
        return [None if t.is_inference() else t._version for _, t in inputs]


def begin(
    session: SessionCore, state: ThreadState, name: str, inputs: NamedTensors, func: Callable[..., Any],
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Context:  # fmt: skip
    """Begin an api call and record its inputs."""
    context = _begin(session, state, name)
    if session.forcing is not None and session.forces("api"):
        session.forcing.give(context.call, inputs)
    if context.call.kind.recorded:
        session.slots.inputs(context.call, inputs)
        if inputs:
            record_values(session, context.call, func, args, kwargs)
        elif session.invocations is not None:
            session.invocations.waits(context.call, func)
    return context


def end(
    session: SessionCore, context: Context, edges: Edges | None, inputs: NamedTensors, outputs: NamedTensors,
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Record the outputs of an api call, and watch for its gradients."""
    call, slots = context.call, session.slots
    if call.kind.recorded and outputs and not inputs:  # a factory; without any tensor it is no computation and leaves no row
        record_values(session, call, func, args, kwargs)
    elif not inputs and session.invocations is not None:
        session.invocations.left_out(call)
    slots.results(call, inputs, outputs)
    if session.forcing is not None and session.forces("api"):
        session.forcing.watch(call, outputs)
    if edges is not None:
        watch(context, edges, outputs, slots if call.kind.recorded or session.records("api") else None, own=True)


def _begin(session: SessionCore, state: ThreadState, name: str) -> Context:
    recorder = session.recorder
    task = torch._C._current_graph_task_id()
    outer, module = state.contexts[-1] if state.contexts else None, state.modules[-1] if state.modules else None
    if outer is not None and outer.graph_task != task:  # from before the running backward pass began
        outer = None
    above: Call | None = None
    forward_seq = None
    if outer is not None:
        phase, scope, above = outer.call.kind.phase, outer.scope, outer.call
    elif module is not None and module.graph_task == task:
        phase, scope, above = phase_of(state), module.scope, module.call
    elif task == -1:
        phase, scope = phase_of(state), ""
    else:
        phase, owner = phase_of(state), running_owner()
        repeated = repeated_scope(state.runs, task)
        scope = repeated if repeated is not None else "" if owner is None or phase == "optimizer" else owner.scope
        if owner is not None and phase == "backward":
            above, forward_seq = owner.backward_call(recorder), owner.call.seq
    call = recorder.begin(
        "api", phase, scope, name, parent=None if above is None else above.seq, site=session.site(state), forward_seq=forward_seq
    )
    if state.runs:
        link(state.runs, call)
    return Context(call, outer or module, scope, session.threads, graph_task=task)


def record_values(
    session: SessionCore, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:  # fmt: skip
    """Record what a call was given beside tensors and, at detail tensor, how exactly."""
    if session.invocations is not None:
        session.recorder.value(call, session.invocations.row(call, func, args, kwargs))
    elif (values := describe_values(args, kwargs)) is not None:
        session.recorder.value(call, values)


@cache
def _written_uncounted(name: str) -> frozenset[str]:
    """Return the arguments, by place and by name, that a function writes without counting it, as its operator's schema has them."""
    if not name.startswith(UNVERSIONED):
        return frozenset()
    packet = getattr(torch.ops.aten, name.removeprefix("torch."))
    operators = (Operator.of(getattr(packet, overload)) for overload in packet.overloads())
    return frozenset(str(key) for operator in operators for keys in operator.written for key in keys)


def _add_written(
    outputs: NamedTensors, inputs: NamedTensors, versions: list[int | None], uncounted: frozenset[str]
) -> None:  # fmt: skip
    """Add the inputs that the call wrote to and that are not among its results. Of those of arguments that it writes
    ``uncounted`` the version does not tell."""
    results = len(outputs)
    for (slot, tensor), before in zip(inputs, versions, strict=True):
        written = before is not None and (tensor._version != before or (bool(uncounted) and slot.split(".")[1] in uncounted))
        if written and not any(tensor is t for _, t in outputs[:results]):
            outputs.append((slot.replace("input", "output.written", 1), tensor))


def _add_out(session: SessionCore, outputs: NamedTensors, out: Any) -> None:
    """Add what the call was given to write to, where it is not among the results."""
    results = len(outputs)
    for slot, tensor in named_tensors("output", (), {"out": out}):
        session.buffers.written(tensor)
        if not any(tensor is t for _, t in outputs[:results]):
            outputs.append((slot, tensor))


def _add_buffers(outputs: NamedTensors, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for slot, (position, keyword) in BUFFERS_WRITTEN[name].items():
        tensor = kwargs.get(keyword, args[position] if len(args) > position else None)
        if isinstance(tensor, torch.Tensor):
            outputs.append((f"output.{slot}", tensor))
