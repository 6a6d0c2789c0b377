"""A call of Paddle's whose forward runs one way and whose backward another: a PyLayer that computes the forward again.

It does so in its backward, where recomputation would, with the random numbers and the auto_cast of the first. What it cannot do is
said: a call that writes its arguments, or returns a view of them, cannot be split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import _C_ops
from paddle.base import framework

from trueup.recording.adapters.paddle.buffers import base_of
from trueup.recording.adapters.paddle.policies_captures import quietly
from trueup.recording.adapters.paddle.policies_random import drawing_from, state
from trueup.recording.adapters.paddle.policies_tensors import is_plain, mapped, tensors_in
from trueup.recording.adapters.paddle.tensors import holds
from trueup.recording.policies.calls import CannotSplit, ReturnsArgument

Way = Callable[[tuple[Any, ...]], Any]
"""Executes the call with its arguments (any nested value)."""


def split(forward: Way, backward: Way, arguments: tuple[Any, ...], buffers: frozenset[int]) -> Any:
    """Execute a call whose gradients come from another way to execute it.

    Args:
        forward: gives the results.
        backward: gives the gradients.
        arguments: all that the call reads: tensors in nested values.
        buffers: addresses of tensors among them that the call writes without harm to its gradients (running statistics).

    Raises:
        CannotSplit: the call writes an argument, or returns one or a view of one (`ReturnsArgument`).
    """
    call = _Call(forward, backward, arguments, buffers)
    with quietly():  # a capture sees the gradient that the call makes on the node of the assign
        given = [t if t.stop_gradient or t.is_leaf else _C_ops.assign(t) for t in call.tensors]
    # As `PyLayer.apply` does; a capture that stands in its place would take this for a call.
    found = super(paddle.autograd.PyLayer, _Split).apply(call, *given)
    return call.filled([found] if isinstance(found, paddle.Tensor) else list(found))


class _Call:
    """One execution, from its forward to its backward."""

    def __init__(self, forward: Way, backward: Way, arguments: tuple[Any, ...], buffers: frozenset[int]) -> None:
        self.forward, self.backward = forward, backward
        distinct = {id(tensor): tensor for tensor in tensors_in(arguments)}
        self._places = {address: place for place, address in enumerate(distinct)}
        self.tensors = list(distinct.values())
        self.buffers = [id(tensor) in buffers and tensor.stop_gradient for tensor in self.tensors]
        self._arguments = mapped(arguments, lambda tensor: _Place(self._places[id(tensor)]))
        self.leaves = [tensor.is_leaf for tensor in self.tensors]
        self.random = state()
        self.autocast = _autocast()
        self._result: Any = None

    def arguments(self, tensors: Sequence[paddle.Tensor]) -> tuple[Any, ...]:
        """Return the arguments with other tensors in their places."""
        return mapped(self._arguments, lambda place: tensors[place.number], kind=_Place)  # type: ignore[no-any-return]

    def keep(self, result: Any, tensors: Sequence[paddle.Tensor]) -> tuple[paddle.Tensor, ...]:
        """Take the result apart; what is no tensor, or lies in a buffer, is kept for `filled`.

        Args:
            result: of the call.
            tensors: that it was given.
        """
        written = {base_of(t) for t, buffer in zip(tensors, self.buffers, strict=True) if buffer and _has_memory(t)}
        own = [t for t in tensors_in(result) if not (_has_memory(t) and base_of(t) in written)]
        distinct = {id(tensor): tensor for tensor in own}
        places = {address: place for place, address in enumerate(distinct)}
        self._result = mapped(result, lambda tensor: _Place(places[id(tensor)]) if id(tensor) in places else tensor)
        return tuple(distinct.values())

    def filled(self, tensors: Sequence[paddle.Tensor]) -> Any:
        """Return the result with the tensors that autograd knows."""
        return mapped(self._result, lambda place: tensors[place.number], kind=_Place)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the n-th tensor in a nested value."""

    number: int


class _Split(paddle.autograd.PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        ctx.call, ctx.needs = call, [not tensor.stop_gradient for tensor in call.tensors]
        with quietly():
            kept = [tensor.clone() if buffer else tensor for tensor, buffer in zip(tensors, call.buffers, strict=True)]
        versions = [tensor._inplace_version() for tensor in tensors]
        outputs = call.keep(call.forward(call.arguments(tensors)), tensors)
        if any(t._inplace_version() != v and not b for t, v, b in zip(tensors, versions, call.buffers, strict=True)):
            raise CannotSplit("it writes an argument")
        memory = {base_of(tensor) for tensor in tensors if _has_memory(tensor)}
        if any(base_of(output) in memory for output in outputs if _has_memory(output)):
            raise ReturnsArgument("it returns an argument, or a view of it")
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: paddle.Tensor | None) -> Any:
        call: _Call = ctx.call
        with quietly(), paddle.enable_grad(), drawing_from(call.random), _casting(call.autocast):
            leaves = [_leaf(tensor, needs) for tensor, needs in zip(ctx.saved_tensor(), ctx.needs, strict=True)]
            outputs = call.keep(call.backward(call.arguments(leaves)), leaves)
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and not o.stop_gradient]
            wanted = [leaf for leaf in leaves if not leaf.stop_gradient]
            found: Any = [None] * len(wanted)
            if pairs:
                found = paddle.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        following = iter(found)
        made = [next(following) if needs else None for needs in ctx.needs]
        # The node of an assign needs a gradient: where there is none it gets zeros, of which the sum is the same.
        lacking = [needs and not leaf for needs, leaf in zip(ctx.needs, call.leaves, strict=True)]
        made = [paddle.zeros_like(t) if m is None and lacks else m for m, lacks, t in zip(made, lacking, leaves, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)


def _has_memory(tensor: paddle.Tensor) -> bool:
    return is_plain(tensor) and tensor._is_initialized() and holds(tensor)


def _leaf(tensor: paddle.Tensor, needs: bool) -> paddle.Tensor:
    leaf: paddle.Tensor = tensor.detach()
    leaf.stop_gradient = not needs
    return leaf


def _autocast() -> tuple[Any, ...] | None:
    tracer = framework._dygraph_tracer()
    return None if tracer is None else (tracer._amp_level, tracer._amp_dtype, tracer._get_amp_op_list())


@contextmanager
def _casting(setting: tuple[Any, ...] | None) -> Iterator[None]:
    """Cast in a block as auto_cast did when a setting was read."""
    tracer, before = framework._dygraph_tracer(), _autocast()
    if setting is None or before is None:
        yield
        return
    _put(tracer, setting)
    try:
        yield
    finally:
        _put(tracer, before)


def _put(tracer: Any, setting: tuple[Any, ...]) -> None:
    tracer._amp_level, tracer._amp_dtype = setting[:2]
    tracer._set_amp_op_list(*setting[2])
