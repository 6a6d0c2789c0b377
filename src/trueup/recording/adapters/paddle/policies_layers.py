"""A Layer under a rule: its parameters and buffers, and those of the Layers inside, are replaced while its forward runs.

The forward is replaced on the object for one call, below the Layer's own hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from trueup.recording.adapters.paddle.layers import RUNNING
from trueup.recording.adapters.paddle.policies_calls import Call, narrowed
from trueup.recording.adapters.paddle.policies_returns import Form, autocast, form_of
from trueup.recording.adapters.paddle.policies_tensors import tensors_in
from trueup.recording.adapters.paddle.tensors import dtype_name, holds
from trueup.recording.policies import PolicyRule
from trueup.recording.policies.holding import Place, holding


def layer_call(
    rule: PolicyRule, scope: str, layer: paddle.nn.Layer, forward: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:  # fmt: skip
    """Return the call of a Layer."""
    places, held = _held(layer) if rule.moves else ([], [])
    written = frozenset(map(id, _running(layer))) if rule.moves else frozenset()
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point() or tensor.is_complex()]
    form = form_of(inputs or [t for t in held if t.is_floating_point()] or tensors_in((args, kwargs)))

    def run(given: tuple[Any, ...]) -> Any:
        with holding(places, held, given[2]):
            return forward(*given[0], **given[1])

    def returns(_: int, result: paddle.Tensor) -> Form | None:
        if form is None:
            return None
        dtype, place = form(result)
        if rule.returns is not None and result.is_floating_point():
            return rule.returns, place
        if autocast() is not None:  # which dtype it would have had only its code knows; auto_cast takes any
            return dtype_name(result.dtype), place
        return narrowed(rule, result, (dtype, place))

    return Call(rule, f"{scope or 'the model'} ({type(layer).__name__})", run, (args, kwargs, tuple(held)), returns, written)


def _held(layer: paddle.nn.Layer) -> tuple[list[Place], list[paddle.Tensor]]:
    """Return the parameters, buffers and other tensors that a Layer and those inside hold, and where; an RNN has lists of them."""
    found: list[tuple[Any, Any, paddle.Tensor]] = []
    for inner in layer.sublayers(include_self=True):
        attributes = vars(inner)
        lists = [value for value in attributes.values() if isinstance(value, list)]
        for where in (inner._parameters, inner._buffers, attributes):
            found += [(where, key, value) for key, value in where.items() if holds(value)]
        for items in lists:
            found += [(items, k, value) for k, value in enumerate(items) if holds(value)]
    return [(where, key) for where, key, _ in found], [tensor for _, _, tensor in found]


def _running(layer: paddle.nn.Layer) -> list[paddle.Tensor]:
    """Return what a Layer and those inside write in their forward without counting it: buffers, and batch norms' statistics."""
    found: list[paddle.Tensor] = []
    for inner in layer.sublayers(include_self=True):
        found += [value for value in inner._buffers.values() if holds(value)]
        found += [value for name in RUNNING if holds(value := inner._parameters.get(name))]
    return found
