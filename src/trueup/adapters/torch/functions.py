"""Level `api`: every user-facing function, seen by a TorchFunctionMode, with its backward.

The mode is on whichever levels are recorded: it gives `aten` calls their api call, and marks autograd nodes so that backward
operators find their scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from trueup.adapters.torch.context import Context, enclosing, phase_of, running_owner
from trueup.adapters.torch.gradients import Edges, input_edges, watch
from trueup.adapters.torch.tensors import describe_values, named_tensors
from trueup.recorder import Call

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Session

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

ALLOCATIONS = frozenset(
    {"torch.empty", "torch.empty_like", "torch.empty_strided", "torch.empty_permuted", "torch.Tensor.new_empty",
     "torch.Tensor.new_empty_strided", "torch.Tensor.new"}
)  # fmt: skip
"""Functions whose result has no content yet."""

PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes whose read is a computation."""

BUFFERS_WRITTEN: dict[str, dict[str, tuple[int, str]]] = {
    "torch.nn.functional.batch_norm": {"running_mean": (1, "running_mean"), "running_var": (2, "running_var")},
    "torch.batch_norm": {"running_mean": (3, "running_mean"), "running_var": (4, "running_var")},
    "torch.nn.functional.instance_norm": {"running_mean": (1, "running_mean"), "running_var": (2, "running_var")},
}
"""Functions that write arguments which their schema does not mark as written: output name -> (position, keyword)."""


class FunctionMode(TorchFunctionMode):
    """Makes each outermost call of an overridable function an `api` call."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._names: dict[Any, str | None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a function and record it."""
        kwargs = kwargs or {}
        session = self._session
        state = session.threads.state
        if state.busy or not session.sees():
            return func(*args, **kwargs)
        name = self._name(func)
        if name is None:
            if getattr(func, "__name__", "") in EXPOSES:
                with session.observing(state, "memory handed out"):
                    session.buffers.written(args[0])
            return func(*args, **kwargs)
        if name == "torch.Tensor.backward":
            with session.observing(state, "the loss"):
                session.slots.loss(args, kwargs)
            return func(*args, **kwargs)
        if name in ALLOCATIONS:
            result = func(*args, **kwargs)
            with session.observing(state, name):
                session.buffers.allocated(result)
            return result
        return Execution(session, name, func, args, kwargs).run()

    def _name(self, func: Callable[..., Any]) -> str | None:
        try:
            return self._names[func]
        except (KeyError, TypeError):  # TypeError: a callable that has no hash
            pass
        name = _name_of(func)
        try:
            self._names[func] = name
        except TypeError:
            pass
        return name


def _name_of(func: Callable[..., Any]) -> str | None:
    """Return the public name of a function, or None when it computes nothing."""
    name = resolve_name(func) or f"{getattr(func, '__module__', '')}.{getattr(func, '__name__', type(func).__name__)}"
    head, _, last = name.rpartition(".")
    if last in ("__get__", "__set__", "__delete__"):
        attribute = head.rpartition(".")[2]
        return head if last == "__get__" and attribute in PROPERTIES else None
    if last in QUERIES or name.startswith(("torch.autograd.", "torch._C._set", "profiler.", "torch.ops.profiler")):
        return None
    return name


class Execution:
    """One api call from its inputs to its outputs."""

    __slots__ = ("args", "context", "edges", "func", "inputs", "kwargs", "name", "session", "state", "versions")

    def __init__(
        self, session: Session, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.session, self.name, self.func, self.args, self.kwargs = session, name, func, args, kwargs
        self.state = session.threads.state
        self.context: Context | None = None
        self.edges: Edges | None = None
        self.inputs: list[tuple[str, torch.Tensor]] = []
        self.versions: list[int | None] = []

    def run(self) -> Any:
        """Execute the function between the record of its inputs and that of its outputs."""
        state = self.state
        context = None
        with self.session.observing(state, self.name):
            context = self._begin()
            self._before(context)
        if context is None:  # the capture has just failed
            return self.func(*self.args, **self.kwargs)
        state.contexts.append(context)
        try:
            result = self.func(*self.args, **self.kwargs)
        finally:
            state.contexts.pop()
        if self.session.active:
            with self.session.observing(state, self.name):
                self._after(context, result)
        return result

    def _begin(self) -> Context:
        session, state = self.session, self.state
        recorder = session.recorder
        task = torch._C._current_graph_task_id()
        outer, module = enclosing(state), state.modules[-1] if state.modules else None
        above: Call | None = None
        forward_seq = None
        if outer is not None:
            phase, scope, above = outer.call.phase, outer.scope, outer.call
        elif module is not None and module.graph_task == task:
            phase, scope, above = phase_of(state), module.scope, module.call
        elif task == -1:
            phase, scope = phase_of(state), ""
        else:
            phase, owner = phase_of(state), running_owner()
            scope = state.replayed[-1] if state.replayed else "" if owner is None else owner.scope
            if owner is not None and phase == "backward":
                above, forward_seq = owner.backward_call(recorder), owner.call.seq
        call = recorder.begin(
            "api", phase, scope, self.name, parent=None if above is None else above.seq, site=recorder.sites.here(),
            forward_seq=forward_seq,
        )  # fmt: skip
        return Context(call, outer or module, scope, session.threads, graph_task=task)

    def _before(self, context: Context) -> None:
        session, call = self.session, context.call
        self.inputs = list(named_tensors("input", self.args, self.kwargs))
        if torch.is_grad_enabled():
            self.edges = input_edges(self.inputs)
        if call.recorded:
            session.slots.inputs(call, self.inputs)
            if self.inputs:
                self._record_values(call)
        self.versions = [_version(t) for _, t in self.inputs]

    def _after(self, context: Context, result: Any) -> None:
        session, call = self.session, context.call
        outputs = list(named_tensors("output", result)) + self._written(result)
        session.slots.api_outputs(call, self.inputs, outputs)
        if call.recorded:
            if outputs and not self.inputs:  # a factory; without any tensor it is no computation and leaves no row
                self._record_values(call)
            session.slots.outputs(call, outputs)
        if self.edges is not None:
            watch(context, self.edges, outputs, session.slots if session.records("api") else None, own=True)

    def _record_values(self, call: Call) -> None:
        if (values := describe_values(self.args, self.kwargs)) is not None:
            self.session.recorder.value(call, values)

    def _written(self, result: Any) -> list[tuple[str, torch.Tensor]]:
        """Find inputs the call wrote to that are not among its results."""
        returned = {id(t) for _, t in named_tensors("output", result)}
        written = [
            (slot.replace("input", "output.written", 1), tensor)
            for (slot, tensor), before in zip(self.inputs, self.versions, strict=True)
            if before is not None and tensor._version != before and id(tensor) not in returned
        ]
        for name, (position, keyword) in BUFFERS_WRITTEN.get(self.name, {}).items():
            tensor = self.kwargs.get(keyword, self.args[position] if len(self.args) > position else None)
            if isinstance(tensor, torch.Tensor):
                written.append((f"output.{name}", tensor))
        return written


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
