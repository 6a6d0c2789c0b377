"""One call under a rule: its tensors are copied to the dtype or device of the rule, it runs, its results are copied back.

A `RuledCall` decides between running a call as it is, in the other way, or in both, forward and backward apart (`split`); each
framework says how tensors are found, copied and cast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.recording.policies.copies import Copies
from trueup.recording.policies.policy import PolicyRule

Arguments = tuple[Any, ...]

NOTHING = "their tensors have that dtype and device already"
VIEW = "they return an argument or a view of it, and compute nothing"
NO_GRADIENT = "no gradient flows through them"
INSIDE = "they run inside a call that the policy runs in another way"
CONVERTS = "they convert a tensor, and compute nothing"
EXPLAINED = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""Errors that get the context of the policy; subclasses (out of memory) stay what they are."""


class PolicyFailed(TrueupError, RuntimeError):
    """A call cannot be executed as a rule asks for."""


def failed(rule: PolicyRule, where: str, got: str, advice: str) -> PolicyFailed:
    """Return the error of a call that cannot be executed as a rule asks for."""
    return PolicyFailed(
        f"The policy cannot be kept.\n  where:    {where}\n  expected: {rule}\n  got:      {got}\n  next:     {advice}"
    )


class CannotSplit(Exception):
    """Why the forward and the backward of a call cannot run in different ways."""


class ReturnsArgument(CannotSplit):
    """The call returns an argument or a view of one: it computes nothing."""


class RuledCall(ABC):
    """A call that a rule is for.

    Args:
        rule: the rule.
        name: the call, in words.
        run: executes it with arguments like those that it was given.
        arguments: what it was given: values that may hold tensors.
        written: addresses of tensors that it writes without counting it in their version; None: it may be any.
    """

    def __init__(
        self, rule: PolicyRule, name: str, run: Callable[[Arguments], Any], arguments: Arguments, written: frozenset[int] | None
    ) -> None:
        self.rule, self.name, self._run, self.arguments, self._written = rule, name, run, arguments, written
        self.tensors = self.tensors_in(arguments)

    # ---------------------------------------------------------------- what a framework gives
    @property
    @abstractmethod
    def changes(self) -> bool:
        """Whether the rule's dtype or device makes a difference."""

    @abstractmethod
    def tensors_in(self, value: Any) -> list[Any]:
        """Return every tensor of a nested value, in order."""

    @abstractmethod
    def mapped(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """Return a nested value with every tensor changed."""

    @abstractmethod
    def differentiable(self) -> bool:
        """Tell whether gradients flow through the call."""

    @abstractmethod
    def copies(self) -> Copies:
        """Return what makes the copies that the rule asks for."""

    @abstractmethod
    def returned(self, number: int, tensor: Any) -> Any:
        """Return a tensor of the result, the ``number``-th, in the dtype and on the device that it would have had."""

    @abstractmethod
    def bring_back(self, written: list[tuple[Any, Any]]) -> None:
        """Write into originals what the call wrote into their copies, by operations that autograd sees."""

    @abstractmethod
    def split(self, forward: Callable[[Arguments], Any], backward: Callable[[Arguments], Any], buffers: frozenset[int]) -> Any:
        """Execute the call with a forward in one way and a backward in another.

        Raises:
            CannotSplit: it cannot be done.
        """

    @abstractmethod
    def unseen(self) -> AbstractContextManager[Any]:
        """Return a block in which nothing is a call."""

    @abstractmethod
    def without_autocast(self) -> AbstractContextManager[Any]:
        """Return a block in which autocast is off."""

    @abstractmethod
    def deterministic(self) -> AbstractContextManager[Any]:
        """Return a block in which algorithms are deterministic."""

    @abstractmethod
    def mark(self) -> int:
        """Return what tells autograd nodes of this call from earlier ones."""

    @abstractmethod
    def draws(self) -> Callable[[], bool]:
        """Return what tells whether random numbers were drawn since."""

    # ---------------------------------------------------------------- execution
    def execute(self, backward: Any) -> tuple[Any, str]:
        """Execute the call; return its result, and why it was left as it was, if it was.

        Args:
            backward: makes the backward of calls deterministic, and says where there is one (``hook(results, mark, name)``).

        Raises:
            PolicyFailed: it cannot be done.
        """
        if not self.rule.deterministic:
            return self._moved()
        first, phase = self.mark(), self.rule.phase
        if phase != "backward":
            with self.deterministic():
                result, left = self._moved()
        else:
            result, left = self._moved()
            left = NO_GRADIENT if not self.rule.moves else left
        if phase in (None, "backward") and backward.hook(self.tensors_in(result), first, f"{self.name}, {self.rule}"):
            left = ""
        return result, "" if phase != "backward" else left

    def _moved(self) -> tuple[Any, str]:
        if not self.rule.moves:
            return self._plain(self.arguments), ""
        if not self.changes:
            return self._plain(self.arguments), NOTHING
        if self.rule.phase in (None, "optimizer"):
            return self._otherwise(self.arguments)
        if not self.differentiable():
            return self._otherwise(self.arguments) if self.rule.phase == "forward" else (self._plain(self.arguments), NO_GRADIENT)
        ways = [lambda arguments: self._otherwise(arguments)[0], self._plain]
        forward, backward = ways if self.rule.phase == "forward" else ways[::-1]
        try:
            every = frozenset(map(id, self.tensors)) if self._written is None else self._written
            return self.split(forward, backward, every), ""
        except ReturnsArgument:
            return self._plain(self.arguments), VIEW
        except CannotSplit as reason:
            raise self.not_split(str(reason)) from None

    def _plain(self, arguments: Arguments) -> Any:
        try:
            return self._run(arguments)
        except EXPLAINED as error:
            if not (self.rule.deterministic and "deterministic" in str(error)):
                raise
            raise self._failed(str(error)) from error

    def _otherwise(self, arguments: Arguments) -> tuple[Any, str]:
        copies = self.copies()
        try:
            with self.unseen():
                given = self.mapped(arguments, copies)
            with self.without_autocast():
                result = self._run(given)
        except EXPLAINED as error:
            if type(error) not in EXPLAINED:
                raise
            raise self._failed(str(error)) from error
        views = any(copies.shows(tensor) and copies.original(tensor) is None for tensor in self.tensors_in(result))
        with self.unseen():
            wrote = self._what_it_wrote(copies, arguments)
        if views and not (self.rule.level == "module" or wrote):
            return self._run(arguments), VIEW
        with self.unseen():
            self.bring_back(wrote)
            return self._restored(result, copies), ""

    def _what_it_wrote(self, copies: Copies, arguments: Arguments) -> list[tuple[Any, Any]]:
        if self._written is None:
            return copies.written(all_of_them=True)
        places = [n for n, tensor in enumerate(self.tensors) if id(tensor) in self._written]
        if not places:
            return copies.written()
        now = self.tensors_in(arguments)  # of a forward that is computed again they are others
        return copies.written(frozenset(id(now[n]) for n in places))

    def _restored(self, result: Any, copies: Copies) -> Any:
        number = iter(range(1 << 30))

        def restore(tensor: Any) -> Any:
            place = next(number)
            original = copies.original(tensor)
            return self.returned(place, tensor) if original is None else original

        return self.mapped(result, restore)

    def not_split(self, reason: str) -> PolicyFailed:
        """Return the error of a call whose forward and backward cannot run in different ways."""
        got = f"its forward and its backward cannot run in different ways: {reason}"
        return failed(self.rule, self.name, got, "leave out phase, and both run in the same way")

    def _failed(self, got: str) -> PolicyFailed:
        advice = "name another dtype or device, or fewer calls (level, scope, op); see docs/policy.md"
        return failed(self.rule, self.name, got, advice)
