"""A module under a rule: its parameters and buffers, and those of the modules inside, are replaced while its forward runs.

The forward is replaced on the object for one call, below the module's own hooks: FSDP gathers its parameters in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trueup.recording.adapters.torch.policies_calls import Call, narrowed
from trueup.recording.adapters.torch.policies_returns import Form, form_of
from trueup.recording.adapters.torch.policies_tensors import tensors_in
from trueup.recording.policies import PolicyRule
from trueup.recording.policies.calls import failed
from trueup.recording.policies.holding import Place, holding

SHARDING = ("FSDPModule", "FullyShardedDataParallel")
"""Classes of modules whose parameters are complete only while they run themselves (FSDP 2 and 1)."""


def module_call(
    rule: PolicyRule, scope: str, module: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:  # fmt: skip
    """Return the call of a module.

    Raises:
        PolicyFailed: the modules inside have no complete parameters at this moment.
    """
    name = f"{scope or 'the model'} ({type(module).__name__})"
    if rule.moves:
        _refuse_shards(rule, name, module)
    places, held = _held(module) if rule.moves else ([], [])
    buffers = frozenset(map(id, module.buffers())) if rule.moves else frozenset()
    inputs = [t for t in tensors_in((args, kwargs)) if t.is_floating_point() or t.is_complex()]
    form = form_of(inputs or [t for t in held if t.is_floating_point()] or list(tensors_in((args, kwargs))))
    kinds = {tensor.device.type for tensor in (*inputs, *held)} - {"meta"}

    def run(given: tuple[Any, ...]) -> Any:
        with holding(places, held, given[2]):
            return forward(*given[0], **given[1])

    def returns(_: int, result: torch.Tensor) -> Form | None:
        if form is None:
            return None
        found = form(result)
        if rule.returns is not None and result.is_floating_point():
            return getattr(torch, rule.returns), found[1]
        if any(map(torch.is_autocast_enabled, kinds)):  # which dtype it would have had only its code knows; autocast takes any
            return result.dtype, found[1]
        return narrowed(rule, result, found)

    return Call(rule, name, run, (args, kwargs, tuple(held)), returns, buffers)


def _held(module: torch.nn.Module) -> tuple[list[Place], list[torch.Tensor]]:
    """Return the parameters, buffers and other tensors that a module and those inside hold, and where they stand.

    FSDP 1 puts views of its flat parameter into plain attributes while the module runs.
    """
    found = [
        (where, key, tensor)
        for inner in module.modules()
        for where in (inner._parameters, inner._buffers, vars(inner))
        for key, tensor in where.items()
        if isinstance(tensor, torch.Tensor) and not is_lazy(tensor)
    ]
    return [(where, key) for where, key, _ in found], [tensor for _, _, tensor in found]


def _refuse_shards(rule: PolicyRule, name: str, module: torch.nn.Module) -> None:
    inside = next((inner for inner in module.modules() if inner is not module and _shards(inner)), None)
    if inside is not None:
        got = f"modules inside whose parameters FSDP gathers one by one (the first: {type(inside).__name__})"
        raise failed(rule, name, got, "name those modules, or functions (level = \"api\")")


def _shards(module: torch.nn.Module) -> bool:
    return any(kind.__name__ in SHARDING for kind in type(module).__mro__)
