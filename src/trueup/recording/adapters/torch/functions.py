"""Level `api`: every user-facing function, seen by a TorchFunctionMode, with its backward.

The mode is on whichever levels are recorded: it gives `aten` calls their api call, and marks autograd nodes so that backward
operators find their scope.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from trueup.foundation.facts.operators import has, says
from trueup.recording.adapters.torch.context import Context, ThreadState, in_optimizer, phase_of, running_owner
from trueup.recording.adapters.torch.gradients import Edges, watch
from trueup.recording.adapters.torch.replays import scope_of_replay
from trueup.recording.adapters.torch.tensors import NamedTensors, describe_values, named_tensors
from trueup.recording.recorder import Call
from trueup.recording.recorder.repeats import link

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session

QUERIES = frozenset(
    """
    size dim ndimension stride numel nelement storage_offset is_contiguous is_floating_point is_complex is_signed
    is_same_size is_set_to is_inference is_nonzero element_size data_ptr get_device has_names tolist item numpy
    __len__ __bool__ __int__ __float__ __index__ __repr__ __str__ __format__ __hash__ __contains__ __iter__ __dir__
    __reduce_ex__ __reduce__ __setstate__ __deepcopy__ __array__ __dlpack__ __dlpack_device__ storage untyped_storage
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook is_pinned is_shared result_type share_memory_
    can_cast promote_types get_default_dtype is_tensor is_storage set_default_device _is_view _version dim_order
    has_torch_function _has_compatible_shallow_copy_type _profiler_enter _record_function_enter_new
    _record_function_exit is_conj is_neg is_sparse __cuda_array_interface__
    """.split()
)
"""Functions that compute no tensor; leaving them out of the walk is a matter of speed only (no tensor result, no record)."""

EXPOSES = frozenset(
    ("data_ptr", "numpy", "storage", "untyped_storage", "__array__", "__dlpack__", "__cuda_array_interface__", "share_memory_")
)
"""Functions that hand out the memory itself, to kernels that no dispatcher sees: what was known of it holds no longer."""

NOT_COMPUTING = (
    "torch.autograd.", "torch._C._set", "profiler.", "torch.ops.profiler", "torch.distributed.distributed_c10d.",
    "torch.distributed._functional_collectives.", "torch.ops.c10d", "torch.ops._c10d", "c10d.", "_c10d_functional",
)  # fmt: skip
"""Names of functions that are no api call; collectives are seen by their operators (`adapters.torch.collectives`)."""

PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes whose read is a computation."""

BUFFERS_WRITTEN: dict[str, dict[str, tuple[int, str]]] = {
    "torch.nn.functional.batch_norm": {"running_mean": (1, "running_mean"), "running_var": (2, "running_var")},
    "torch.batch_norm": {"running_mean": (3, "running_mean"), "running_var": (4, "running_var")},
    "torch.nn.functional.instance_norm": {"running_mean": (1, "running_mean"), "running_var": (2, "running_var")},
}
"""Functions that write arguments which their schema does not mark as written: output name -> (position, keyword)."""

UNVERSIONED = "torch._fused_"
"""Start of the names of functions that write their arguments without counting it in the version (PyTorch 2.13)."""


def inputs_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without ``out``: what a function only writes to is no input, and may hold anything."""
    return {name: value for name, value in kwargs.items() if name != "out"} if "out" in kwargs else kwargs


class FunctionMode(TorchFunctionMode):
    """Makes each outermost call of an overridable function an `api` call."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
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
        return self._call(func, args, kwargs or {})

    def _at_length(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        state = session.threads.state
        if state.busy or not session.sees():
            return func(*args, **kwargs)
        try:
            name = self._names[func]
        except (KeyError, TypeError):  # TypeError: a callable that has no hash
            name = self._name(func)
        if name is None:
            if getattr(func, "__name__", "") in EXPOSES:
                with session.observing(state, "memory handed out"):
                    session.buffers.exposed(args[0], filled="storage" not in func.__name__)
            return func(*args, **kwargs)
        if state.stepping is not None and session.passes_optimizer and not state.modules and in_optimizer(state):
            return func(*args, **kwargs)
        if name == "torch.Tensor.backward":
            with session.observing(state, "the loss"):
                session.slots.loss(args, kwargs)
            return func(*args, **kwargs)
        if has(name, "allocates"):
            result = func(*args, **kwargs)
            with session.observing(state, name):
                session.buffers.allocated(result)
            return result
        return execute(session, state, name, func, args, kwargs)

    def _name(self, func: Callable[..., Any]) -> str | None:
        name = _name_of(func)
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


def _name_of(func: Callable[..., Any]) -> str | None:
    """Return the public name of a function, or None when it computes nothing."""
    name = resolve_name(func) or f"{getattr(func, '__module__', '')}.{getattr(func, '__name__', type(func).__name__)}"
    head, _, last = name.rpartition(".")
    if last in ("__get__", "__set__", "__delete__"):
        attribute = head.rpartition(".")[2]
        return head if last == "__get__" and attribute in PROPERTIES else None
    if last in QUERIES or name.startswith(NOT_COMPUTING):
        return None
    return name


def execute(
    session: Session, state: ThreadState, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
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
        return func(*args, **kwargs)
    state.contexts.append(context)
    try:
        result = func(*args, **kwargs)
    finally:
        state.contexts.pop()
    if session.active:
        with session.observing(state, name):
            outputs = named_tensors("output", result)
            _add_written(outputs, inputs, versions, silently=name.startswith(UNVERSIONED))
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
    session: Session, state: ThreadState, name: str, inputs: NamedTensors, func: Callable[..., Any],
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
    session: Session, context: Context, edges: Edges | None, inputs: NamedTensors, outputs: NamedTensors,
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Record the outputs of an api call, and watch for its gradients."""
    call, slots = context.call, session.slots
    if call.kind.recorded and outputs and not inputs:  # a factory; without any tensor it is no computation and leaves no row
        record_values(session, call, func, args, kwargs)
    slots.results(call, inputs, outputs)
    if session.forcing is not None and session.forces("api"):
        session.forcing.watch(call, outputs)
    if edges is not None:
        watch(context, edges, outputs, slots if call.kind.recorded or session.records("api") else None, own=True)


def _begin(session: Session, state: ThreadState, name: str) -> Context:
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
        replay = scope_of_replay(state.runs, task)
        scope = replay if replay is not None else "" if owner is None or phase == "optimizer" else owner.scope
        if owner is not None and phase == "backward":
            above, forward_seq = owner.backward_call(recorder), owner.call.seq
    call = recorder.begin(
        "api", phase, scope, name, parent=None if above is None else above.seq, site=session.site(state), forward_seq=forward_seq
    )
    if state.runs:
        link(state.runs, call)
    return Context(call, outer or module, scope, session.threads, graph_task=task)


def record_values(
    session: Session, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:  # fmt: skip
    """Record what a call was given beside tensors and, at detail tensor, how exactly."""
    if session.invocations is not None:
        session.recorder.value(call, session.invocations.row(call, func, args, kwargs))
    elif (values := describe_values(args, kwargs)) is not None:
        session.recorder.value(call, values)


def _add_written(outputs: NamedTensors, inputs: NamedTensors, versions: list[int | None], *, silently: bool) -> None:
    """Add the inputs that the call wrote to and that are not among its results."""
    results = len(outputs)
    for (slot, tensor), before in zip(inputs, versions, strict=True):
        written = before is not None and (silently or tensor._version != before)
        if written and not any(tensor is t for _, t in outputs[:results]):
            outputs.append((slot.replace("input", "output.written", 1), tensor))


def _add_out(session: Session, outputs: NamedTensors, out: Any) -> None:
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
