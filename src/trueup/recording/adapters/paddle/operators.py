"""Level `api`: the places from which Python reaches Paddle's kernels, and what stands there during a capture.

Nearly every function of Paddle looks an operator up in ``paddle._C_ops`` (some in ``paddle._legacy_C_ops``) when it is called, or
holds it under a name of its own since it was imported; both are replaced, by identity, in all modules that are loaded. The
operators of `paddle.Tensor` (``+``, ``@``, ``[]``) and a few of its methods go straight to C++ and are replaced in the class.

What ``paddle.jit.to_static`` compiles: a program is one call; what is compiled by looking at bytecode runs as Python instead.
Without ``full_graph`` (Paddle's default) the code is compiled as it executes, through whatever it calls: it would compile the
functions that a capture puts in the operators' places, and fails at that (Paddle 3.3). So the Python code runs as long as there is
a capture, in steps that are not recorded, too.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import paddle
from paddle import _C_ops, _legacy_C_ops
from paddle.base import framework
from paddle.jit.dy2static import program_translator

from trueup.foundation.facts.operators import has, says
from trueup.recording.adapters.paddle.context import Context, SessionCore, ThreadState, enclosing, phase_of
from trueup.recording.adapters.paddle.gradients import Edges
from trueup.recording.adapters.paddle.invocations import Made
from trueup.recording.adapters.paddle.tensors import FACTS, NamedTensors, describe_values, lists_of_tensors, named_tensors
from trueup.recording.engine.checkpointing import followed, link
from trueup.recording.engine.replacing import Around, Replacement, Sweep
from trueup.recording.recorder import Call

Function = Callable[..., Any]

MODULES = (("paddle._C_ops", _C_ops), ("paddle._legacy_C_ops", _legacy_C_ops))


def special_methods() -> list[str]:
    """Return the names of the methods of `paddle.Tensor` that are operators."""
    names = [*(f"__{name}__" for name in FACTS["special"].split()), *FACTS["methods"].split()]
    return [name for name in names if hasattr(paddle.Tensor, name)]

LEFT_ALONE = ("paddle.base.libpaddle", "paddle._pir_ops", "paddle._typing")  # the originals, and what builds programs


class Entrances:
    """Everything through which operators are reached: ``wanted`` tells by the name which are replaced, ``make`` gives from a name
    and the operator what stands in its place, ``also`` are further replacements, which come and go with them."""

    def __init__(
        self, make: Callable[[str, Function], Function], wanted: Callable[[str], bool], also: Iterable[Replacement] = ()
    ) -> None:
        self._make, self._wanted = make, wanted
        self._sweep = Sweep(())
        methods = {name: f"paddle.Tensor.{name}" for name in special_methods() if wanted(f"paddle.Tensor.{name}")}
        self._others = [*(Replacement(paddle.Tensor, name, partial(make, op)) for name, op in methods.items()), *also]

    def install(self) -> None:
        """Stand in the way of every operator that stands in its place at present."""
        found: dict[int, tuple[Function, Function]] = {}
        for path, module in MODULES:
            for name in dir(module):
                function, op = getattr(module, name), f"{path}.{name}"
                if not name.startswith("_") and callable(function) and id(function) not in found and self._wanted(op):
                    found[id(function)] = function, self._make(op, function)
        self._sweep = Sweep(found.values(), LEFT_ALONE)
        self._sweep.install()
        for replacement in self._others:
            replacement.install()

    def remove(self) -> None:
        """Leave no trace."""
        for replacement in reversed(self._others):
            replacement.remove()
        self._sweep.remove()


def entrances(session: SessionCore) -> Entrances:
    """Return the replacements that make each operator a call of a capture."""
    names = [name for name in FACTS["silent"].split() if hasattr(paddle.Tensor, name)]
    silent = [Around(paddle.Tensor, name, partial(_handed_out, session)) for name in names]
    return Entrances(partial(_recorded, session), lambda _: True, [*silent, py_layers(partial(_py_layer, session))])


def _recorded(session: SessionCore, op: str, function: Function) -> Function:
    """Return a function that records what it executes, where that is for the capture to see."""
    threads, is_dynamic = session.threads, framework.in_dygraph_mode

    def call(*args: Any, **kwargs: Any) -> Any:
        if not session.active:
            return function(*args, **kwargs)
        state = threads.state
        if state.busy or not state.known or not is_dynamic():
            return function(*args, **kwargs)
        if state.contexts:
            outer = state.contexts[-1]
            if outer.opaque and outer.depth == len(state.passes):
                return function(*args, **kwargs)
        return execute(session, state, op, function, args, kwargs)

    return named_as(call, function)


def named_as(call: Function, function: Function) -> Function:
    """Give a function's replacement the function's name."""
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        try:
            setattr(call, name, getattr(function, name))
        except (AttributeError, TypeError):  # a builtin may have none
            continue
    return call


def _handed_out(session: SessionCore, original: Function, tensor: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = original(tensor, *args, **kwargs)
    state = session.threads.state
    if session.active and not state.busy:
        with session.observing(state, "memory handed out"):
            for one in (tensor, *args):
                if isinstance(one, paddle.Tensor):
                    session.buffers.written(one)
    return result


def py_layers(run: Callable[[str, Function, tuple[Any, ...], dict[str, Any]], Any]) -> Replacement:
    """Return what has ``PyLayer.apply`` executed as one call, by its name; that of recomputation is none."""

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        original = super(paddle.autograd.PyLayer, kind).apply
        if kind.__module__.startswith("paddle.distributed.fleet.recompute"):
            return original(*args, **kwargs)
        return run(f"{kind.__name__}.apply", original, args, kwargs)

    return Replacement(paddle.autograd.PyLayer, "apply", lambda _: classmethod(apply))


def _py_layer(session: SessionCore, op: str, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state = session.threads.state
    if not session.active or state.busy:
        return original(*args, **kwargs)
    return execute(session, state, op, original, args, kwargs, opaque=False)


# ----------------------------------------------------------------------------------------------------------- one call
def name_of(op: str) -> str:
    """Return ``batch_norm`` for ``paddle._C_ops.batch_norm``."""
    return op.rpartition(".")[2]


def execute(
    session: SessionCore, state: ThreadState, op: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *,
    opaque: bool = True,
) -> Any:  # fmt: skip
    """Execute an operator (``paddle._C_ops.matmul``) and record it; ``opaque``: whether what it executes is part of it."""
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


def _describe(session: SessionCore, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made | None) -> None:
    """Record what a call is given beside tensors, and at detail ``tensor`` how it is made."""
    values = describe_values(args, kwargs)
    if made is not None and session.invocations is not None:
        session.invocations.kept(made)
        session.recorder.value(call, (values, made.text))
    elif values is not None:
        session.recorder.value(call, values)


def _begin(session: SessionCore, state: ThreadState, op: str, *, opaque: bool) -> Context:
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
    session: SessionCore, context: Context, edges: Edges | None, inputs: NamedTensors, versions: list[int], result: Any,
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


def _written(session: SessionCore, op: str, inputs: NamedTensors, versions: list[int], outputs: NamedTensors) -> set[int]:
    """Return which outputs lie in memory that the operator was given and wrote; inputs that it wrote become outputs."""
    given = {id(tensor) for _, tensor in inputs}
    results = {id(tensor) for _, tensor in outputs}
    for (slot, tensor), version in zip(inputs, versions, strict=True):
        unversioned = slot == "input.0" and has(op, "unversioned")
        if (unversioned or tensor._inplace_version() != version) and id(tensor) not in results:
            outputs.append((slot.replace("input", "output.written", 1), tensor))
            results.add(id(tensor))
    written = {number for number in results if number in given}
    if has(op, "rewrites") or has(op, "in-place"):
        memory = session.buffers.memory
        before = {id(found) for _, tensor in inputs if (found := memory(tensor)) is not None}
        written |= {id(tensor) for _, tensor in outputs if id(memory(tensor)) in before}
    return written


# ----------------------------------------------------------------------------------------------------------- compiled functions
PROGRAM = (
    "{what} runs as a program that to_static made: what goes into and out of it is recorded, the operators and Layers inside are "
    "not; paddle.jit.enable_to_static(False) runs the Python code"
)

SYMBOLIC = (
    "{what} was given to to_static without full_graph: Paddle does not compile through what a capture stands in for, so the "
    "Python code ran, and the compiled program may round differently"
)


def programs(session: SessionCore) -> list[Replacement]:
    """Return the replacements that wrap calls of compiled functions."""
    names = {"ASTStaticFunction": _program, "SymbolicStaticFunction": _symbolic}
    return [
        Around(kind, "_perform_call", partial(call, session))
        for name, call in names.items() if (kind := getattr(program_translator, name, None)) is not None
    ]  # fmt: skip


def _program(session: SessionCore, original: Function, static: Any, *args: Any, **kwargs: Any) -> Any:
    if session.active and not session.threads.state.busy:
        session.recorder.note(PROGRAM.format(what=_what(session, static)))
    return original(static, *args, **kwargs)


def _symbolic(session: SessionCore, original: Function, static: Any, *args: Any, **kwargs: Any) -> Any:
    if session.over:
        return original(static, *args, **kwargs)
    if not session.threads.state.busy:
        session.recorder.note(SYMBOLIC.format(what=_what(session, static)))
    return static._call_dygraph_function(*args, **kwargs)


def _what(session: SessionCore, static: Any) -> str:
    """Name a Layer by its scope, a function by its name."""
    state = session.threads.state
    running = state.running[-1] if state.running else None
    if running is not None and static.class_instance is running:
        return f"Layer {state.modules[-1].scope or type(running).__name__}"
    return f"function {getattr(static._dygraph_function, '__qualname__', static)}"


# ------------------------------------------------------------------------------------------------- activation checkpointing
def recomputations(session: SessionCore) -> list[Replacement]:
    """Return the replacements by which a session follows recomputed functions (``paddle.distributed.fleet.utils.recompute``)."""
    threads = session.threads

    def follow(function: Function) -> Function:
        modules = threads.state.modules
        scope = modules[-1].scope if modules else ""
        return followed(function, defaultdict(list), scope, lambda: (threads.state.runs, len(threads.state.passes)), ran=False)

    return around_recomputed(follow)


def around_recomputed(follow: Callable[[Function], Function]) -> list[Replacement]:
    """Let ``follow`` wrap each function that is recomputed: in the reentrant form inside the PyLayer, else before it."""

    def reentrant(original: Function, context: Any, function: Function, *args: Any, **kwargs: Any) -> Any:
        return original(context, follow(function), *args, **kwargs)

    def plain(original: Function, function: Function, *args: Any, **kwargs: Any) -> Any:
        return original(follow(function), *args, **kwargs)

    module: Any = sys.modules.get("paddle.distributed.fleet.recompute.recompute")
    function = getattr(module, "RecomputeFunction", None)
    owners = ((function, "forward", reentrant), (module, "_recompute_without_reentrant", plain))
    return [Around(owner, name, call) for owner, name, call in owners if owner is not None]
