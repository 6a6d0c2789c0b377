"""Policies at work in Paddle: rules of a `policy.toml` applied to the operators and Layers of a process (`trueup.apply_policy`).

Operators that a rule may be for are replaced as a capture replaces them, below it, so that a capture records what the user's code
gave them and got; Layers are met inside ``Layer.__call__``. What recomputation runs again is met too, in the scope of its first
run.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import paddle
from paddle.base import framework

from trueup.foundation.facts.operators import has
from trueup.foundation.model import TrueupError
from trueup.foundation.store.policy_uses import RuleUse
from trueup.recording.adapters.paddle.policies_calls import Call, operator_call
from trueup.recording.adapters.paddle.policies_captures import busy, captures_aside
from trueup.recording.adapters.paddle.policies_captures import running as running_capture
from trueup.recording.adapters.paddle.policies_deterministic import FLAGS, Backward, setting
from trueup.recording.adapters.paddle.policies_entrances import PolicyEntrances
from trueup.recording.adapters.paddle.policies_layers import layer_call
from trueup.recording.adapters.paddle.policies_tensors import tensors_in
from trueup.recording.adapters.paddle.scopes import WRAPPERS, Scopes
from trueup.recording.policies import Policy, load
from trueup.recording.policies.calls import CONVERTS, INSIDE
from trueup.recording.policies.holding import forward_replaced
from trueup.recording.policies.running import Rules, Running

DYNAMIC = "a Layer was given to to_static: its Python code runs while a policy is applied, for no rule reaches into a program"


@dataclass(slots=True)
class _Thread:
    """What nests on the thread of the policy."""

    layers: list[paddle.nn.Layer] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    stepping: int = 0
    """How many optimizers' steps are under way, one inside another."""
    passes: int = 0
    """How many backward passes are under way."""
    changed: int = 0
    """Calls under way that the policy runs in another way."""
    alone: bool = False
    """Whether an operator runs in another way: what it calls in turn belongs to it."""


class AppliedPolicy:
    """A policy at work in this process, until `remove` or the end of a ``with`` block."""

    def __init__(self, policy: Policy, scopes: Scopes) -> None:
        check(policy)
        self.policy = policy
        self.rules = Rules(policy)
        self._scopes = scopes
        self._state = _Thread()
        self._backward = Backward()
        self._said_dynamic = False
        self.on = False
        self._thread = threading.get_ident()
        self._entrances = PolicyEntrances(self)

    # ---------------------------------------------------------------- life
    def start(self) -> AppliedPolicy:
        """Apply the rules from now on, on this thread."""
        self.on = True
        with captures_aside():
            self._entrances.install()
        _applied.append(self)
        if (session := running_capture()) is not None:
            session.policies.append(self)
        return self

    def remove(self) -> None:
        """Apply the rules no longer, and say on stderr which changed nothing. Calling it again does nothing."""
        if not self.on:
            return
        self.on = False
        with captures_aside():
            self._entrances.remove()
        _applied.remove(self)
        self.rules.tell()

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def uses(self) -> tuple[RuleUse, ...]:
        """Return how many calls each rule was for, and how many it changed."""
        return self.rules.uses()

    # ---------------------------------------------------------------- what Paddle calls
    def operator(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute an operator, under the first rule that is for it."""
        state = self._state
        if not self.works() or state.alone:
            return function(*args, **kwargs)
        scope = state.scopes[-1] if state.scopes else ""
        running = self.rules.first("api", scope, name, optimizer=bool(state.stepping) and not state.layers)
        if running is None or not tensors_in((args, kwargs)):
            return function(*args, **kwargs)
        if has(name, "converts") and running.rule.moves:
            running.count(CONVERTS)
            return function(*args, **kwargs)
        return self._execute(running, operator_call(running.rule, scope, name, function, args, kwargs, self._alone))

    def layer(self, original: Callable[..., Any], layer: paddle.nn.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a Layer, under the first rule that is for it."""
        if not self.works():
            return original(layer, *args, **kwargs)
        state = self._state
        if type(layer.forward).__name__.endswith("StaticFunction") and not self._said_dynamic:
            self._said_dynamic = True
            print(f"trueup: note: {DYNAMIC}", file=sys.stderr, flush=True)
        scope = self._scopes.path(layer, state.layers[-1] if state.layers else None)
        running = None
        if type(layer).__name__ not in WRAPPERS:  # the Layer inside has the same scope
            running = self.rules.first("module", scope, type(layer).__name__, optimizer=False)
        state.layers.append(layer)
        state.scopes.append(scope)
        try:
            if running is None:
                return original(layer, *args, **kwargs)
            with forward_replaced(layer, functools.partial(self._forward, running, scope, layer)):
                return original(layer, *args, **kwargs)
        finally:
            state.layers.pop()
            state.scopes.pop()

    def _forward(self, running: Running, scope: str, layer: paddle.nn.Layer, forward: Callable[..., Any]) -> Callable[..., Any]:
        inside = self.recomputed(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._execute(running, layer_call(running.rule, scope, layer, inside, args, kwargs))

        return run

    def _execute(self, running: Running, call: Call) -> Any:
        state = self._state
        if state.changed and running.rule.moves and not call.changes:
            result, left = call.execute(self._backward)[0], INSIDE
        else:
            state.changed += 1
            try:
                with running.counting_draws(call):
                    result, left = call.execute(self._backward)
            finally:
                state.changed -= 1
        running.count(left)
        return result

    @contextmanager
    def _alone(self) -> Iterator[None]:
        before, self._state.alone = self._state.alone, True
        try:
            yield
        finally:
            self._state.alone = before

    def recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that may run again in a backward pass: its scope is that of its first run."""
        above = self._state.layers[-1:], self._state.scopes[-1:]

        @functools.wraps(function, assigned=("__name__", "__doc__"), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            state = self._state
            before = state.layers, state.scopes
            state.layers, state.scopes = list(above[0]), list(above[1])
            try:
                return function(*args, **kwargs)
            finally:
                state.layers, state.scopes = before

        return run

    def run_pass(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass."""
        if threading.get_ident() != self._thread:
            return original(*args, **kwargs)
        self._state.passes += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._state.passes -= 1
            if not self._state.passes:
                self._backward.leave()

    def run_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run an optimizer's step."""
        if threading.get_ident() != self._thread:
            return original(*args, **kwargs)
        self._state.stepping += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._state.stepping -= 1

    def works(self) -> bool:
        """Tell whether what executes is computed for the user: no program that is built, nothing of Trueup's own, no backward of a
        PyLayer's."""
        if not self.on or threading.get_ident() != self._thread or not framework.in_dygraph_mode() or busy():
            return False
        return not self._state.passes or bool(paddle.is_grad_enabled())


def check(policy: Policy) -> None:
    """Refuse what this Paddle cannot do.

    Raises:
        TrueupError: a rule asks for it.
    """
    asked = next((rule for rule in policy.rules if rule.deterministic), None)
    if asked is not None and not setting():
        raise TrueupError(
            f"The policy cannot be used; nothing was run with it.\n  where:    {policy.path}, {asked}\n"
            f"  expected: a Paddle that has a switch for deterministic algorithms ({', '.join(FLAGS)})\n"
            f"  got:      Paddle {paddle.__version__} for {paddle.get_device().partition(':')[0]}, which has none\n"
            '  next:     leave out deterministic; device = "cpu" runs the call on the CPU, or see docs/policy.md'
        )


_applied: list[AppliedPolicy] = []
"""The policies at work in this process."""


def applied() -> tuple[AppliedPolicy, ...]:
    """Return the policies at work in this process."""
    return tuple(_applied)


def apply_policy(model: paddle.nn.Layer | Iterable[paddle.nn.Layer] | None, policy: str | Policy) -> AppliedPolicy:
    """Apply a policy in this process; see `trueup.apply_policy`."""
    read = policy if isinstance(policy, Policy) else load(policy)
    session = running_capture()
    scopes = session.scopes if session is not None else Scopes()
    if session is None:
        for root in [] if model is None else [model] if isinstance(model, paddle.nn.Layer) else model:
            scopes.register(root)
    handle = AppliedPolicy(read, scopes).start()
    atexit.register(lambda: handle.rules.tell() if handle.on else None)
    return handle
