"""A call whose forward runs one way and whose backward another: an autograd function that computes the forward again.

It does so in its backward, where activation checkpointing would, with the random numbers and the autocast of the first. It
costs one more forward of the call. What it cannot do is said: a call that writes its arguments, returns a view of them, or is
differentiated twice cannot be split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from trueup.recording.adapters.torch.policies_random import Generators, drawing_from
from trueup.recording.adapters.torch.policies_tensors import mapped, tensors_in
from trueup.recording.policies.calls import CannotSplit, ReturnsArgument

Way = Callable[[tuple[Any, ...]], Any]
"""Executes the call with its arguments (any nested value)."""


def split(
    forward: Way, backward: Way, arguments: tuple[Any, ...], *, buffers: frozenset[int] = frozenset(),
    refuse: Callable[[str], Exception] = CannotSplit,
) -> Any:  # fmt: skip
    """Execute a call whose gradients come from another way to execute it.

    Args:
        forward: gives the results.
        backward: gives the gradients.
        arguments: all that the call reads: tensors in nested values.
        buffers: addresses of tensors among them that the call writes without harm to its gradients (running statistics).
        refuse: makes the exception for a backward that cannot be computed, from the reason.

    Raises:
        CannotSplit: the call writes an argument, or returns one or a view of one (`ReturnsArgument`).
    """
    call = _Call(forward, backward, arguments, buffers, refuse)
    if not call.differentiable:
        return forward(arguments)
    # As `Function.apply` does outside of torch.func; a capture that stands in its place would take this for a call.
    return call.result(super(torch.autograd.Function, _Split).apply(call, *call.tensors))


class _Call:
    """One execution, from its forward to its backward."""

    def __init__(
        self, forward: Way, backward: Way, arguments: tuple[Any, ...], buffers: frozenset[int], refuse: Callable[[str], Exception]
    ) -> None:
        self.forward, self.backward, self.refuse = forward, backward, refuse
        distinct = {id(tensor): tensor for tensor in tensors_in(arguments)}
        self.places = {address: place for place, address in enumerate(distinct)}
        self.tensors = list(distinct.values())
        self.buffers = [id(tensor) in buffers for tensor in self.tensors]
        self.differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
        self._arguments = mapped(arguments, lambda tensor: _Place(self.places[id(tensor)]))
        self.generators = Generators([tensor.device for tensor in self.tensors], arguments)
        self.random = self.generators.state()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *(tensor.device.type for tensor in self.tensors)} - {"meta"}
        ]
        self._result: Any = None

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Return the arguments with other tensors in their places."""
        return _filled(self._arguments, tensors)  # type: ignore[no-any-return]

    def keep(self, result: Any) -> tuple[torch.Tensor, ...]:
        """Take the result apart; what is no tensor is kept for `result`."""
        distinct = {id(tensor): tensor for tensor in tensors_in(result)}
        places = {address: place for place, address in enumerate(distinct)}
        self._result = mapped(result, lambda tensor: _Place(places[id(tensor)]))
        return tuple(distinct.values())

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result with the tensors that autograd knows."""
        return _filled(self._result, tensors)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the n-th tensor in a nested value."""

    number: int


def _filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    return mapped(value, lambda place: tensors[place.number], kind=_Place)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.needs = call, [tensor.requires_grad for tensor in tensors]
        with torch._C.DisableTorchFunction():
            kept = [tensor.clone() if buffer else tensor for tensor, buffer in zip(tensors, call.buffers, strict=True)]
        versions = [tensor._version for tensor in tensors]
        outputs = call.keep(call.forward(call.arguments(tensors)))
        changed = [v != t._version and not b for t, v, b in zip(tensors, versions, call.buffers, strict=True)]
        if any(changed):
            raise CannotSplit("it writes an argument")
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        if any(output.untyped_storage()._cdata in storages for output in outputs):
            raise ReturnsArgument("it returns an argument, or a view of one")
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            raise call.refuse("its backward is differentiated itself (create_graph=True)")
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(drawing_from(call.generators, call.random))
            for kind, enabled, dtype in call.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            with torch._C.DisableTorchFunction():
                leaves = [t.detach().requires_grad_(needs) for t, needs in zip(ctx.saved_tensors, ctx.needs, strict=True)]
            outputs = call.keep(call.backward(call.arguments(leaves)))
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found: Any = (
                torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
                if pairs else [None] * len(wanted)
            )
        following = iter(found)
        return (None, *(next(following) if needs else None for needs in ctx.needs))
