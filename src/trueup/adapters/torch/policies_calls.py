"""One call under a rule: its tensors are copied to the dtype or device of the rule, it runs, its results are copied back.

``Call`` is a function or a module; `execute` decides between running it as it is, in the other way, or in both (`split`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from trueup.adapters.torch.functions import BUFFERS_WRITTEN, UNVERSIONED
from trueup.adapters.torch.gradients import next_node
from trueup.adapters.torch.policies_deterministic import Backward, deterministic
from trueup.adapters.torch.policies_random import Generators
from trueup.adapters.torch.policies_returns import Form, form_of, forms
from trueup.adapters.torch.policies_split import CannotSplit, ReturnsArgument, split
from trueup.adapters.torch.policies_tensors import WIDER, Copies, bring_back, mapped, tensors_in
from trueup.model import TrueupError
from trueup.remedy import PolicyRule

Arguments = tuple[Any, ...]

NOTHING = "their tensors have that dtype and device already"
VIEW = "they return an argument or a view of it, and compute nothing"
NO_GRADIENT = "no gradient flows through them"
EXPLAINED = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""Errors that get the context of the policy; subclasses (out of memory) stay what they are."""


class PolicyFailed(TrueupError, RuntimeError):
    """A call cannot be executed as a rule asks for."""


def failed(rule: PolicyRule, where: str, got: str, advice: str) -> PolicyFailed:
    """Return the error of a call that cannot be executed as a rule asks for."""
    return PolicyFailed(
        f"The policy cannot be kept.\n  where:    {where}\n  expected: {rule}\n  got:      {got}\n  next:     {advice}"
    )


class Call:
    """A call that a rule is for.

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
        self.rule, self.name, self._run, self.arguments = rule, name, run, arguments
        self._returns, self._written = returns, written
        self.tensors = list(tensors_in(arguments))

    @property
    def changes(self) -> bool:
        """Whether the rule's dtype or device makes a difference."""
        wider = WIDER[self.rule.dtype] if self.rule.dtype is not None else {}
        device = self.rule.device
        return any(t.dtype in wider or (device is not None and t.device.type not in (device, "meta")) for t in self.tensors) or (
            self.rule.dtype is not None and bool(self.tensors) and any(map(torch.is_autocast_enabled, self._kinds()))
        )

    def execute(self, backward: Backward) -> tuple[Any, str]:
        """Execute the call; return its result, and why it was left as it was, if it was.

        Raises:
            PolicyFailed: it cannot be done.
        """
        if not self.rule.deterministic:
            return self._moved()
        first, phase = next_node(), self.rule.phase
        if phase != "backward":
            with deterministic():
                result, left = self._moved()
        else:
            result, left = self._moved()
            left = NO_GRADIENT if not self.rule.moves else left
        if phase in (None, "backward") and backward.hook(tensors_in(result), first, f"{self.name}, {self.rule}"):
            left = ""
        return result, "" if phase != "backward" else left

    def _moved(self) -> tuple[Any, str]:
        if not self.rule.moves:
            return self._plain(self.arguments), ""
        if not self.changes:
            return self._plain(self.arguments), NOTHING
        if self.rule.phase in (None, "optimizer"):
            return self._otherwise(self.arguments)
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
        if not differentiable:
            return self._otherwise(self.arguments) if self.rule.phase == "forward" else (self._plain(self.arguments), NO_GRADIENT)
        ways = [lambda arguments: self._otherwise(arguments)[0], self._plain]
        forward, backward = ways if self.rule.phase == "forward" else ways[::-1]
        try:
            every = frozenset(map(id, self.tensors)) if self._written is None else self._written
            return split(forward, backward, self.arguments, buffers=every, refuse=self._not_split), ""
        except ReturnsArgument:
            return self._plain(self.arguments), VIEW
        except CannotSplit as reason:
            raise self._not_split(str(reason)) from None

    def _plain(self, arguments: Arguments) -> Any:
        try:
            return self._run(arguments)
        except EXPLAINED as error:
            if not (self.rule.deterministic and "deterministic" in str(error)):
                raise
            raise self._failed(str(error)) from error

    def _otherwise(self, arguments: Arguments) -> tuple[Any, str]:
        copies = Copies(self.rule.dtype, self.rule.device)
        try:
            with torch._C.DisableTorchFunction():
                given = mapped(arguments, copies)
            with self._no_autocast():
                result = self._run(given)
        except EXPLAINED as error:
            if type(error) not in EXPLAINED:
                raise
            raise self._failed(str(error)) from error
        views = any(copies.shows(tensor) and copies.original(tensor) is None for tensor in tensors_in(result))
        if views and not self._writes(copies):
            return self._run(arguments), VIEW
        with torch._C.DisableTorchFunction():
            bring_back(self._what_it_wrote(copies, arguments))
            return self._restored(result, copies), ""

    def _writes(self, copies: Copies) -> bool:
        return self.rule.level == "module" or bool(copies.written())

    def _what_it_wrote(self, copies: Copies, arguments: Arguments) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self._written is None:
            return copies.written(all_of_them=True)
        places = {id(tensor): n for n, tensor in enumerate(self.tensors) if id(tensor) in self._written}
        if not places:
            return copies.written()
        now = list(tensors_in(arguments))  # of a forward that is computed again they are others
        return copies.written(frozenset(id(now[n]) for n in places.values()))

    def _restored(self, result: Any, copies: Copies) -> Any:
        number = iter(range(1 << 30))

        def restore(tensor: torch.Tensor) -> torch.Tensor:
            form = self._returns(next(number), tensor)
            if (original := copies.original(tensor)) is not None:
                return original
            if form is None or form == (tensor.dtype, tensor.device):
                return tensor
            return tensor.to(dtype=form[0], device=form[1])

        return mapped(result, restore)

    def _kinds(self) -> set[str]:
        return {tensor.device.type for tensor in self.tensors} - {"meta"}

    def _no_autocast(self) -> ExitStack:
        stack = ExitStack()
        for kind in self._kinds() | ({self.rule.device} if self.rule.device else set()):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    def _not_split(self, reason: str) -> PolicyFailed:
        got = f"its forward and its backward cannot run in different ways: {reason}"
        return failed(self.rule, self.name, got, "leave out phase, and both run in the same way")

    def _failed(self, got: str) -> PolicyFailed:
        advice = "name another dtype or device, or fewer calls (level, scope, op); see docs/policy.md"
        return failed(self.rule, self.name, got, advice)

    def generators(self) -> Generators:
        """Return the generators that it may draw from."""
        args, kwargs = self.arguments[:2]
        return Generators((tensor.device for tensor in self.tensors), (*args, *kwargs.values()))


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
