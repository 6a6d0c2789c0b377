"""Policies at work: rules of a `policy.toml` applied to the functions and modules of a process (`trueup.apply_policy`).

A function mode below all others executes functions, so that a capture records what the user's code gave them and got; modules
are met inside ``nn.Module.__call__``. What activation checkpointing runs again is met too, in the scope of its first run.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from trueup.foundation.facts.operators import has
from trueup.foundation.model import TrueupError
from trueup.foundation.store.policy_uses import RuleUse
from trueup.recording.adapters.torch.functions import _name_of
from trueup.recording.adapters.torch.modes import put_on, take_off, without
from trueup.recording.adapters.torch.policies_calls import Call, function_call
from trueup.recording.adapters.torch.policies_captures import busy, captures_aside, quietly
from trueup.recording.adapters.torch.policies_captures import running as running_capture
from trueup.recording.adapters.torch.policies_deterministic import Backward
from trueup.recording.adapters.torch.policies_entrances import entrances, meets_compiled
from trueup.recording.adapters.torch.policies_modules import module_call
from trueup.recording.adapters.torch.policies_tensors import tensors_in
from trueup.recording.adapters.torch.scopes import WRAPPER_CLASSES, Scopes
from trueup.recording.policies import Policy, load
from trueup.recording.policies.calls import CONVERTS, INSIDE
from trueup.recording.policies.holding import forward_replaced
from trueup.recording.policies.running import Rules, Running
from trueup.recording.recorder.replacing import Replacement

EAGER = "torch.compile was used: its Python code runs while a policy is applied, for no rule reaches into compiled code"


@dataclass(slots=True)
class _Thread:
    """What nests on one thread."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    stepping: bool = False
    """Whether an optimizer steps."""
    changed: int = 0
    """Calls under way that the policy runs in another way."""


class _Threads(threading.local):
    def __init__(self) -> None:
        self.state = _Thread()


class _Mode(TorchFunctionMode):
    """Executes functions under the rules. It stays below every other mode (`modes.put_on`)."""

    lowest = True

    def __init__(self, policy: AppliedPolicy) -> None:
        super().__init__()
        self._policy = policy

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a function."""
        return self._policy.function(func, args, kwargs or {})


class AppliedPolicy:
    """A policy at work in this process, until `remove` or the end of a ``with`` block."""

    def __init__(self, policy: Policy, scopes: Scopes) -> None:
        self.policy = policy
        self._scopes = scopes
        self.rules = Rules(policy)
        self._threads = _Threads()
        self._mode = _Mode(self)
        self._names: dict[Any, str | None] = {}
        self._backward = Backward()
        self._eager: Any = None
        self.eager = False
        """Whether compiled code was met, whose Python code ran instead."""
        self._hooks: list[Any] = []
        self.on = False
        self._thread = threading.get_ident()
        self._replacements = entrances(self)

    # ---------------------------------------------------------------- life
    def start(self) -> AppliedPolicy:
        """Apply the rules from now on, on this thread and those that autograd starts from it."""
        self.on = True
        with captures_aside():
            for replacement in self._replacements:
                replacement.install()
        put_on(self._mode)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._steps(begins=True)),
            register_optimizer_step_post_hook(lambda *_: self._steps(begins=False)),
        ]
        if "torch._dynamo" in sys.modules:
            self.run_eagerly()
        _applied.append(self)
        if (session := running_capture()) is not None:
            session.policies.append(self)
        return self

    def remove(self) -> None:
        """Apply the rules no longer, and say on stderr which changed nothing. Calling it again does nothing."""
        if not self.on:
            return
        self.on = False
        if threading.get_ident() == self._thread:
            take_off(self._mode)
        with captures_aside():
            for replacement in self._replacements:
                replacement.remove()
        for hook in self._hooks:
            hook.remove()
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None
        _applied.remove(self)
        self.rules.tell()

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def uses(self) -> tuple[RuleUse, ...]:
        """Return how many calls each rule was for, and how many it changed."""
        return self.rules.uses()

    def run_eagerly(self) -> None:
        """Run the Python code of what torch.compile compiled: no rule reaches into compiled code."""
        if self._eager is not None:
            return
        from torch._dynamo import eval_frame

        self._eager = torch.compiler.set_stance("force_eager")
        self._replacements.append(Replacement(eval_frame, "_callback_from_stance", functools.partial(meets_compiled, self)))
        self._replacements[-1].install()

    def meets_compiled(self) -> None:
        """Say, once, that compiled code does not run."""
        if not self.eager:
            self.eager = True
            print(f"trueup: note: {EAGER}", file=sys.stderr, flush=True)

    # ---------------------------------------------------------------- what PyTorch calls
    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a function, under the first rule that is for it."""
        name = self._name(func)
        if name is None or not self.works():
            return func(*args, **kwargs)
        return self.call_named(name, func, args, kwargs)

    def call_named(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a function of that name."""
        state = self._threads.state
        scope = state.scopes[-1] if state.scopes else ""
        running = self.rules.first("api", scope, name, optimizer=state.stepping and not state.modules)
        if running is None or not any(True for _ in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        if has(name, "converts") and running.rule.moves:
            running.count(CONVERTS)
            return func(*args, **kwargs)
        return self._execute(running, function_call(running.rule, scope, name, func, args, kwargs, quietly, self._alone))

    def module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a module, under the first rule that is for it."""
        if not self.works():
            return original(module, *args, **kwargs)
        state = self._threads.state
        called = module._orig_mod if type(module).__name__ == "OptimizedModule" else module
        scope = self._scopes.path(called, state.modules[-1] if state.modules else None)
        running = None
        if type(module).__name__ not in WRAPPER_CLASSES:  # the module inside has the same scope
            running = self.rules.first("module", scope, type(called).__name__, optimizer=False)
        state.modules.append(called)
        state.scopes.append(scope)
        try:
            if running is None:
                return original(module, *args, **kwargs)
            with forward_replaced(module, functools.partial(self._forward, running, scope, module)):
                return original(module, *args, **kwargs)
        finally:
            state.modules.pop()
            state.scopes.pop()

    def _forward(self, running: Running, scope: str, module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        inside = self.checkpointed(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._execute(running, module_call(running.rule, scope, module, inside, args, kwargs))

        return run

    def _execute(self, running: Running, call: Call) -> Any:
        state = self._threads.state
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

    def _alone(self) -> AbstractContextManager[None]:
        return without(self._mode)

    def checkpointed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that may run again in a backward pass: its scope is that of its first run."""
        state = self._threads.state
        above = state.modules[-1:], state.scopes[-1:]

        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            state = self._threads.state
            before = state.modules, state.scopes
            state.modules, state.scopes = list(above[0]), list(above[1])
            try:
                return function(*args, **kwargs)
            finally:
                state.modules, state.scopes = before

        return run

    def run_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass with the function mode on; say which call has no deterministic backward."""
        try:
            with self.function_mode_on():
                return original(*args, **kwargs)
        except RuntimeError as error:
            call = self._backward.under_way
            if not call or "deterministic" not in str(error):
                raise
            raise TrueupError(
                f"The policy cannot be kept.\n  where:    backward of {call}\n  expected: a deterministic algorithm\n"
                f"  got:      {error}\n"
                "  next:     leave out deterministic for this call, or run it with device = \"cpu\""
            ) from error
        finally:
            self._backward.leave()

    @contextmanager
    def function_mode_on(self) -> Iterator[None]:
        """Have the function mode on in a block: PyTorch switches it off while it handles ``Tensor.backward``."""
        on = self._mode in _get_current_function_mode_stack()
        if not on:
            put_on(self._mode)
        try:
            yield
        finally:
            if not on:
                take_off(self._mode)

    # ---------------------------------------------------------------- inside
    def works(self) -> bool:
        """Tell whether what executes is computed for the user: no trace, nothing of Trueup's own, no backward of autograd's."""
        if not self.on or torch._C._get_tracing_state() is not None or torch.compiler._is_compiling_flag or busy():
            return False
        return bool(torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled())

    def _name(self, func: Callable[..., Any]) -> str | None:
        try:
            return self._names[func]
        except (KeyError, TypeError):
            name = _name_of(func)
            with suppress(TypeError):  # a callable that has no hash
                self._names[func] = name
            return name

    def _steps(self, *, begins: bool) -> None:
        self._threads.state.stepping = begins


_applied: list[AppliedPolicy] = []
"""The policies at work in this process."""


def applied() -> tuple[AppliedPolicy, ...]:
    """Return the policies at work in this process."""
    return tuple(_applied)


def apply_policy(model: torch.nn.Module | Iterable[torch.nn.Module] | None, policy: str | Policy) -> AppliedPolicy:
    """Apply a policy in this process; see `trueup.apply_policy`."""
    read = policy if isinstance(policy, Policy) else load(policy)
    session = running_capture()
    if session is not None and session.options.compile == "through":
        raise TrueupError(
            f"{read.path} cannot be applied in a capture with compile=through: no rule reaches into compiled code; use compile=off"
        )
    scopes = session.scopes if session is not None else Scopes()
    if session is None:
        for root in [] if model is None else [model] if isinstance(model, torch.nn.Module) else model:
            scopes.register(root)
    handle = AppliedPolicy(read, scopes).start()
    atexit.register(lambda: handle.rules.tell() if handle.on else None)
    return handle
