"""What the schema of an operator tells the device about running it, worked out once per operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Operators that take CPU tensors beside device tensors on real devices too (indices, lengths, copies between devices).
_CROSS_DEVICE = frozenset((
    "copy_", "_copy_from", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put",
    "set_", "_pack_padded_sequence", "_pack_padded_sequence_backward", "tensor_split",
    "_ctc_loss", "_ctc_loss_backward",
    # The step counters of optimizers stay on the CPU beside device parameters; the foreach kernels take both.
    "_foreach_add_", "_foreach_add", "_foreach_mul_", "_foreach_div_", "_foreach_addcdiv_", "_foreach_addcmul_",
    "_foreach_pow", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_",
))  # fmt: skip


COMPOSITE_ELSEWHERE = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Elsewhere than on the CPU these are decomposed; a kernel on our key keeps them whole, as torch_npu does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the schema of an operator tells the dispatcher; worked out once per operator."""

    name: str
    """``aten::add.Tensor``, the spelling used by faults and by `Fired`."""
    view_of: int | None
    """Position of the argument whose storage the outputs share, or None."""
    written: tuple[int | str, ...]
    """Arguments written in place: positions, and names of keyword-only ones."""
    reshapes: bool
    """The operator may change size, strides or storage of a written argument (``resize_``, ``t_``, ``out=``)."""
    cross_device: bool
    on_host: tuple[int, ...]
    """Outputs that stay on the CPU."""
    composite: bool
    """It is made of other operators; it gets here only for tensors made under ``inference_mode``."""


def _is_composite(func: Any) -> bool:
    # Not func._can_decompose(): that also counts Python decompositions, present or not by what else was imported.
    return (
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        and func not in KERNELS
        and func._opname not in COMPOSITE_ELSEWHERE
    )


def _plan(func: Any) -> Plan:
    schema = func._schema
    written: list[int | str] = []
    view_of = None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        if argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
        elif view_of is None:
            view_of = position
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    return Plan(
        name=f"{schema.name}{overload}",
        view_of=view_of,
        written=tuple(written),
        reshapes=torch.Tag.inplace_view in func.tags or any(isinstance(place, str) for place in written),
        cross_device=schema.name.removeprefix("aten::") in _CROSS_DEVICE,
        on_host=(1,) if schema.name == "aten::_pack_padded_sequence" else (),  # the batch sizes steer the host's loop
        composite=_is_composite(func),
    )


plans: dict[Any, Plan] = {}


def plan_of(func: Any) -> Plan:
    """Return the dispatch plan of an ``OpOverload``."""
    plan = plans.get(func)
    if plan is None:
        plan = plans[func] = _plan(func)
    return plan


KERNELS: dict[Any, Callable[..., Any]] = {}
"""Operators that the CPU has no kernel for, or draws other random numbers in; the rest run as they are."""
