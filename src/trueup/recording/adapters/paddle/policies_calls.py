"""A call of Paddle's under a rule, an operator or a Layer: `policies.calls` has what is the same in every framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import paddle
from paddle.base import core, framework

from trueup.foundation.facts.operators import has
from trueup.recording.adapters.paddle.policies_captures import quietly
from trueup.recording.adapters.paddle.policies_deterministic import deterministic
from trueup.recording.adapters.paddle.policies_random import drew, state
from trueup.recording.adapters.paddle.policies_returns import Form, autocast, form_of, forms
from trueup.recording.adapters.paddle.policies_split import split
from trueup.recording.adapters.paddle.policies_tensors import (
    WIDER,
    TensorCopies,
    bring_back,
    in_form,
    is_plain,
    mapped,
    tensors_in,
)  # fmt: skip
from trueup.recording.adapters.paddle.tensors import dtype_name
from trueup.recording.policies import PolicyRule
from trueup.recording.policies.calls import Arguments, RuledCall

Returns = Callable[[int, paddle.Tensor], Form | None]
"""Gives dtype and place of a result by its number; None leaves it as it is."""


class Call(RuledCall):
    """A call of Paddle's that a rule is for; see `RuledCall` for what it is made of."""

    def __init__(
        self, rule: PolicyRule, name: str, run: Callable[[Arguments], Any], arguments: Arguments, returns: Returns,
        written: frozenset[int] | None,
    ) -> None:  # fmt: skip
        super().__init__(rule, name, run, arguments, written)
        self._returns = returns

    @property
    def changes(self) -> bool:
        """Whether the rule's dtype or device makes a difference."""
        wider = WIDER[self.rule.dtype] if self.rule.dtype is not None else {}
        tensors = [tensor for tensor in self.tensors if is_plain(tensor)]
        if any(dtype_name(t.dtype) in wider or (self.rule.device is not None and not t.place.is_cpu_place()) for t in tensors):
            return True
        return self.rule.dtype is not None and autocast() is not None and any(t.is_floating_point() for t in tensors)

    def tensors_in(self, value: Any) -> list[paddle.Tensor]:
        """Return every tensor of a nested value."""
        return tensors_in(value)

    def mapped(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """Return a nested value with every tensor changed."""
        return mapped(value, change)

    def differentiable(self) -> bool:
        """Tell whether gradients flow through the call."""
        return paddle.is_grad_enabled() and any(not tensor.stop_gradient for tensor in self.tensors)

    def copies(self) -> TensorCopies:
        """Return what makes the copies that the rule asks for."""
        return TensorCopies(self.rule.dtype, self.rule.device)

    def returned(self, number: int, tensor: paddle.Tensor) -> paddle.Tensor:
        """Return a tensor of the result in the dtype and on the place that it would have had."""
        form = self._returns(number, tensor) if is_plain(tensor) else None
        return tensor if form is None else in_form(tensor, *form)

    def bring_back(self, written: list[tuple[Any, Any]]) -> None:
        """Write into originals what the call wrote into their copies."""
        bring_back(written)

    def split(self, forward: Callable[[Arguments], Any], backward: Callable[[Arguments], Any], buffers: frozenset[int]) -> Any:
        """Execute the call with a forward in one way and a backward in another."""
        return split(forward, backward, self.arguments, buffers)

    def unseen(self) -> AbstractContextManager[Any]:
        """Return a block in which nothing is a call."""
        return quietly()

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Run a block without auto_cast and, where the rule says so, with new tensors made on the CPU."""
        tracer = framework._dygraph_tracer()
        before = tracer._amp_level
        tracer._amp_level = core.AmpLevel.O0
        try:
            with framework._dygraph_place_guard(paddle.CPUPlace()) if self.rule.device is not None else nullcontext():
                yield
        finally:
            tracer._amp_level = before

    def deterministic(self) -> AbstractContextManager[Any]:
        """Return a block in which algorithms are deterministic."""
        return deterministic()

    def mark(self) -> int:
        """Return nothing of use: nodes of Paddle have no numbers."""
        return 0

    def draws(self) -> Callable[[], bool]:
        """Return what tells whether random numbers were drawn since."""
        before = state()
        return lambda: drew(before)


def operator_call(
    rule: PolicyRule, scope: str, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    alone: Callable[[], AbstractContextManager[None]],
) -> Call:  # fmt: skip
    """Return the call of an operator.

    Args:
        rule: that is for it.
        scope: where it is called.
        name: of the operator, ``paddle._C_ops.matmul``.
        function: what executes it.
        args: what it was given.
        kwargs: likewise.
        alone: makes a block in which no rule holds.
    """
    arguments = args, kwargs
    known: list[Any] = []

    def returns(number: int, result: paddle.Tensor) -> Form | None:
        if not known:
            known.append(forms(name, function, args, kwargs) or form_of(tensors_in(arguments)))
        found = known[0]
        if isinstance(found, tuple):
            return found[number] if number < len(found) else None
        return None if found is None else narrowed(rule, result, found(result))

    def run(given: Arguments) -> Any:
        with alone():  # in the backward of a split call the policy would meet it again
            return function(*given[0], **given[1])

    return Call(rule, f"{scope}/{name}" if scope else name, run, arguments, returns, _written(name, arguments))


def _written(name: str, arguments: Arguments) -> frozenset[int]:
    """Return the tensors that an operator may write without counting it: of batch norms and optimizers those without gradient."""
    if not (has(name, "rewrites") or has(name, "in-place")):
        return frozenset()
    return frozenset(id(tensor) for tensor in tensors_in(arguments) if tensor.stop_gradient or not paddle.is_grad_enabled())


def narrowed(rule: PolicyRule, result: paddle.Tensor, form: Form) -> Form:
    """Return the form in which to return a result: its own dtype unless the rule can have made it from the one expected."""
    dtype, place = form
    own = dtype_name(result.dtype)
    made = rule.dtype is not None and WIDER[rule.dtype].get(dtype) == own
    return (dtype if made else own), place
