"""Policies at work in Paddle: rules of a `policy.toml` applied to the operators and Layers of a process (`trueup.apply_policy`).

Operators that a rule may be for are replaced as a capture replaces them, below it, so that a capture records what the user's code
gave them and got; Layers are met inside ``Layer.__call__``. What recomputation runs again is met too, in the scope of its first
run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.base import core, framework

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import say
from trueup.recording.adapters.paddle import ruled
from trueup.recording.adapters.paddle.context import WRAPPERS, Scopes
from trueup.recording.adapters.paddle.gradients import PASSES
from trueup.recording.adapters.paddle.operators import Entrances, Function, around_recomputed, named_as, py_layers
from trueup.recording.adapters.paddle.optimizers import steps_of_optimizers
from trueup.recording.adapters.paddle.session import aside
from trueup.recording.engine import policies
from trueup.recording.engine.replacing import Around
from trueup.recording.engine.ruled import Framework
from trueup.recording.policy_file import Policy
from trueup.recording.recorder.options import Patterns

DYNAMIC = "a Layer was given to to_static: its Python code runs while a policy is applied, for no rule reaches into a program"


class AppliedPolicy(policies.AppliedPolicy):
    """A policy at work in this process; see `engine.policies`."""

    name, wrappers = "paddle", tuple(WRAPPERS)
    framework: Framework = ruled

    def __init__(self, policy: Policy, scopes: Scopes) -> None:
        check(policy)
        super().__init__(policy, scopes, ruled.Backward())
        self._said_dynamic = self._alone = False
        self._static = True
        self._parts: list[Any] = []

    # ---------------------------------------------------------------- life
    def install(self) -> None:
        self._parts = self._entrances()
        with aside():  # so that a capture stands around what is put there
            for part in self._parts:
                part.install()
            self._static = _to_static(False)

    def leave(self) -> None:
        with aside():
            for part in reversed(self._parts):
                part.remove()
            _to_static(self._static)

    def _entrances(self) -> list[Any]:
        """Return everything through which calls are met; operators that no rule names are left alone."""
        rules = [rule for rule in self.policy.rules if rule.level == "api"]
        every = any(rule.op is None for rule in rules)
        named = Patterns([rule.op for rule in rules if rule.op is not None])
        return [
            Entrances(self._stand_in, lambda op: every or named.match_name(op), [py_layers(self.operator)] if rules else []),
            Around(paddle.nn.Layer, "__call__", self._call_layer),
            *(Around(core.eager, name, self.run_pass) for name in PASSES),
            *steps_of_optimizers(self.run_step),
            *around_recomputed(lambda function: self.recomputed(function) if self.on else function),
        ]

    def _call_layer(self, original: Function, layer: paddle.nn.Layer, *args: Any, **kwargs: Any) -> Any:
        return self.module(original, layer, args, kwargs)

    def _stand_in(self, name: str, function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.operator(name, function, args, kwargs)

        return named_as(call, function)

    # ---------------------------------------------------------------- what Paddle calls
    def operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.works() or self._alone:
            return function(*args, **kwargs)
        return self.call_named(name, function, args, kwargs)

    def called(self, layer: paddle.nn.Layer) -> paddle.nn.Layer:
        """Return a Layer that is called; say, once, where it is one whose program does not run."""
        if type(layer.forward).__name__.endswith("StaticFunction") and not self._said_dynamic:
            self._said_dynamic = True
            say(f"note: {DYNAMIC}")
        return layer

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run a block in which no rule holds: what an operator calls in turn belongs to it."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def run_pass(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return original(*args, **kwargs)
        state = self._threads.state
        state.passes += 1
        try:
            return original(*args, **kwargs)
        finally:
            state.passes -= 1
            if not state.passes:
                self._backward.leave()

    def run_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return original(*args, **kwargs)
        state = self._threads.state
        state.stepping += 1
        try:
            return original(*args, **kwargs)
        finally:
            state.stepping -= 1

    def works(self) -> bool:
        """Tell whether what executes is computed for the user: no program that is built, nothing of Trueup's own, no backward of a
        PyLayer's."""
        if not self.on or threading.get_ident() != self._thread or not framework.in_dygraph_mode() or policies.busy("paddle"):
            return False
        return not self._threads.state.passes or bool(paddle.is_grad_enabled())


def check(policy: Policy) -> None:
    """Refuse what cannot be done in Paddle, or not in this one: raise `TrueupError` where a rule asks for it."""
    setting = next((rule for rule in policy.rules if rule.set and rule.level != "module"), None)
    if setting is not None:
        raise TrueupError(
            f"The policy cannot be used; nothing was run with it.\n  where:    {policy.path}, {setting}\n"
            "  expected: of Paddle, set for attributes of Layers (level = \"module\")\n"
            f"  got:      level = \"{setting.level}\"\n  next:     set it in the script"
        )
    asked = next((rule for rule in policy.rules if rule.deterministic), None)
    if asked is not None and not ruled.setting():
        raise TrueupError(
            f"The policy cannot be used; nothing was run with it.\n  where:    {policy.path}, {asked}\n"
            f"  expected: a Paddle that has a switch for deterministic algorithms ({', '.join(ruled.FLAGS)})\n"
            f"  got:      Paddle {paddle.__version__} for {paddle.get_device().partition(':')[0]}, which has none\n"
            '  next:     leave out deterministic; device = "cpu" runs the call on the CPU, or see docs/policy.md'
        )


def apply_policy(model: paddle.nn.Layer | Iterable[paddle.nn.Layer] | None, policy: str | Policy) -> AppliedPolicy:
    """Apply a policy in this process; see `trueup.apply_policy`."""
    return policies.apply(AppliedPolicy, policy, Scopes, "paddle", model, paddle.nn.Layer)


def _to_static(on: bool) -> bool:
    """Switch to_static's compilation on or off; return whether it was on. No rule reaches into a program."""
    from paddle.jit.dy2static.program_translator import ProgramTranslator

    translator = ProgramTranslator()
    before = bool(translator.enable_to_static)
    translator.enable(on)
    return before
