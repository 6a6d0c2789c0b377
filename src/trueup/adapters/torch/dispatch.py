"""Level `aten`: every dispatcher operator, in forward, recompute, backward, optimizer and collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.adapters.torch.context import phase_of, tagged
from trueup.adapters.torch.tensors import describe_values, named_tensors
from trueup.recorder.recorder import Call

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Session

UNMARKED_WRITES: dict[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
    "aten::_fused_moving_avg_obs_fq_helper": ("running_min", "running_max", "scale", "zero_point"),
}
"""Operators that write arguments which their schema does not mark (PyTorch 2.13, native_functions)."""

NOT_RECORDED = frozenset({"aten::detach", "aten::alias", "aten::is_same_size", "aten::_local_scalar_dense", "aten::equal"})
"""Operators that compute no tensor: an alias of the same bytes, or a Python scalar."""

ALLOCATIONS = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_permuted"}
)
"""Operators whose result has no content yet; it is measured once something was written to it."""

COLLECTIVE = ("c10d::", "_c10d_functional::", "fsdp::")


@dataclass(frozen=True, slots=True)
class Operator:
    """What the schema of an operator says, read once."""

    name: str
    recorded: bool
    written: tuple[tuple[int, str], ...]
    """Arguments it writes: (position, name)."""
    view: bool
    """Whether its result is an alias of an input that it does not write."""
    collective: bool

    @classmethod
    def of(cls, func: Any) -> Operator:
        """Read a schema."""
        schema = func._schema
        name = schema.name
        unmarked = UNMARKED_WRITES.get(name, ())
        written = tuple(
            (k, a.name)
            for k, a in enumerate(schema.arguments)
            if a.name in unmarked or (a.alias_info is not None and a.alias_info.is_write)
        )
        recorded = name not in NOT_RECORDED | ALLOCATIONS and not name.startswith(("prim::", "profiler::"))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        return cls(name, recorded, written, view, name.startswith(COLLECTIVE))


class DispatchMode(TorchDispatchMode):
    """Makes each dispatcher operator an `aten` call."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._operators: dict[Any, Operator] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator and record it."""
        kwargs = kwargs or {}
        session = self._session
        state = session.threads.state
        if state.busy or not session.active:
            return func(*args, **kwargs)
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = Operator.of(func)
        if not operator.recorded:
            result = func(*args, **kwargs)
            if operator.name in ALLOCATIONS:
                session.buffers.allocated(result)
            return result
        call = self._begin(operator)
        with session.quietly(state):
            inputs = list(named_tensors("input", args, kwargs))
            if call.recorded:
                session.record_tensors(call, inputs)
                if (values := describe_values(args, kwargs)) is not None:
                    session.recorder.value(call, values)
        result = func(*args, **kwargs)
        with session.quietly(state):
            outputs, written = _outputs(operator, args, kwargs, result)
            for tensor in written:
                session.buffers.written(tensor)
            if not operator.view:
                session.mark_produced(call, outputs)
            if call.recorded:
                session.record_outputs(call, outputs)
        return result

    def _begin(self, operator: Operator) -> Call:
        session = self._session
        state = session.threads.state
        recorder = session.recorder
        above = state.contexts[-1] if state.contexts else None
        if above is not None:
            phase, scope, call = above.call.phase, above.scope, above.call
        elif (owner := tagged(_running_node())) is not None and phase_of(state) == "backward":
            phase, scope, call = "backward", owner.scope, owner.backward_call(recorder)
        else:
            module = state.modules[-1] if state.modules else None
            phase, scope = phase_of(state), "" if module is None else module.scope
            call = None if module is None else module.call
        return recorder.begin(
            "aten",
            "collective" if operator.collective else phase,
            scope,
            operator.name,
            parent=None if call is None else call.seq,
            site=recorder.sites.here() if call is None else call.site,
            forward_seq=None if call is None else call.forward_seq,
        )


def _running_node() -> Any:
    return torch._C._current_autograd_node()


def _outputs(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[tuple[str, torch.Tensor]], list[torch.Tensor]]:
    """Return the outputs (results, then written arguments that are no results) and the tensors that were written."""
    outputs = list(named_tensors("output", result))
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
