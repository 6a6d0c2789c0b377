"""A call of PyTorch under a rule, a function or a module: `policies.calls` has what is the same in every framework."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from trueup.recording.adapters.torch.functions import BUFFERS_WRITTEN, UNVERSIONED
from trueup.recording.adapters.torch.gradients import next_node
from trueup.recording.adapters.torch.policies_deterministic import deterministic
from trueup.recording.adapters.torch.policies_random import Generators
from trueup.recording.adapters.torch.policies_returns import Form, form_of, forms
from trueup.recording.adapters.torch.policies_split import split
from trueup.recording.adapters.torch.policies_tensors import WIDER, TensorCopies, bring_back, mapped, tensors_in
from trueup.recording.policies import PolicyRule
from trueup.recording.policies.calls import Arguments, RuledCall


class Call(RuledCall):
    """A call of PyTorch that a rule is for.

    Args:
        rule: the rule.
        name: the call, in words.
        run: executes it with arguments like those that it was given.
        arguments: what it was given: values that may hold tensors.
        returns: what gives the form of each tensor of its result, asked with the result's number; None leaves a tensor as it is.
        written: addresses of tensors that it writes without counting it in their version; None: it may be any.
    """

    def __init__(
        self, rule: PolicyRule, name: str, run: Callable[[Arguments], Any], arguments: Arguments,
        returns: Callable[[int, torch.Tensor], Form | None], written: frozenset[int] | None,
    ) -> None:  # fmt: skip
        super().__init__(rule, name, run, arguments, written)
        self._returns = returns

    @property
    def changes(self) -> bool:
        """Whether the rule's dtype or device makes a difference."""
        wider = WIDER[self.rule.dtype] if self.rule.dtype is not None else {}
        device = self.rule.device
        return any(t.dtype in wider or (device is not None and t.device.type not in (device, "meta")) for t in self.tensors) or (
            self.rule.dtype is not None and bool(self.tensors) and any(map(torch.is_autocast_enabled, self._kinds()))
        )

    def tensors_in(self, value: Any) -> list[torch.Tensor]:
        """Return every tensor of a nested value."""
        return list(tensors_in(value))

    def mapped(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """Return a nested value with every tensor changed."""
        return mapped(value, change)

    def differentiable(self) -> bool:
        """Tell whether gradients flow through the call."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def copies(self) -> TensorCopies:
        """Return what makes the copies that the rule asks for."""
        return TensorCopies(self.rule.dtype, self.rule.device)

    def returned(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the result in the dtype and on the device that it would have had."""
        form = self._returns(number, tensor)
        return tensor if form is None or form == (tensor.dtype, tensor.device) else tensor.to(dtype=form[0], device=form[1])

    def bring_back(self, written: list[tuple[Any, Any]]) -> None:
        """Write into originals what the call wrote into their copies."""
        bring_back(written)

    def split(self, forward: Callable[[Arguments], Any], backward: Callable[[Arguments], Any], buffers: frozenset[int]) -> Any:
        """Execute the call with a forward in one way and a backward in another."""
        return split(forward, backward, self.arguments, buffers=buffers, refuse=self.not_split)

    def unseen(self) -> AbstractContextManager[Any]:
        """Return a block in which nothing is a call."""
        return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]

    def without_autocast(self) -> ExitStack:
        """Return a block in which autocast is off on the devices of the call."""
        stack = ExitStack()
        for kind in self._kinds() | ({self.rule.device} if self.rule.device else set()):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    def deterministic(self) -> AbstractContextManager[Any]:
        """Return a block in which algorithms are deterministic."""
        return deterministic()

    def mark(self) -> int:
        """Return the sequence number of the next autograd node."""
        return next_node()

    def draws(self) -> Callable[[], bool]:
        """Return what tells whether random numbers were drawn since."""
        args, kwargs = self.arguments[:2]
        generators = Generators((tensor.device for tensor in self.tensors), (*args, *kwargs.values()))
        before = generators.state()
        return lambda: generators.drew(before)

    def _kinds(self) -> set[str]:
        return {tensor.device.type for tensor in self.tensors} - {"meta"}


def function_call(
    rule: PolicyRule, scope: str, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    quietly: Callable[[], Any], alone: Callable[[], Any],
) -> Call:  # fmt: skip
    """Return the call of a function.

    Args:
        rule: that is for it.
        scope: where it is called.
        name: of the function.
        func: the function.
        args: what it was given.
        kwargs: likewise.
        quietly: makes a block in which nothing is recorded.
        alone: makes a block in which no rule holds.
    """
    arguments = args, kwargs
    known: list[Any] = []

    def returns(number: int, result: torch.Tensor) -> Form | None:
        if not known:
            known.append(forms(name, func, args, kwargs, quietly) or form_of(list(tensors_in(arguments))))
        found = known[0]
        if isinstance(found, tuple):
            return found[number] if number < len(found) else None
        return None if found is None else narrowed(rule, result, found(result))

    names = BUFFERS_WRITTEN.get(name, {}).values()
    buffers = [kwargs.get(keyword, args[place] if len(args) > place else None) for place, keyword in names]
    written = None if name.startswith(UNVERSIONED) else frozenset(id(b) for b in buffers if isinstance(b, torch.Tensor))
    where = f"{scope}/{name}" if scope else name

    def run(given: Arguments) -> Any:
        with alone():  # in the backward of a split call the policy would meet it again
            return func(*given[0], **given[1])

    return Call(rule, where, run, arguments, returns, written)


def narrowed(rule: PolicyRule, result: torch.Tensor, form: Form) -> Form:
    """Return the form in which to return a result: its own dtype unless the rule can have made it from the one expected."""
    dtype, device = form
    made = rule.dtype is not None and WIDER[rule.dtype].get(dtype) == result.dtype
    return (dtype if made else result.dtype), device
