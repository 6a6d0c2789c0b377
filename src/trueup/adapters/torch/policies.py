"""Policies at work: rules of a `policy.toml` applied to the functions and modules of a process (`trueup.apply_policy`).

A function mode below all others executes functions, so that a capture records what the user's code gave them and got; modules
are met inside ``nn.Module.__call__``. Functions that activation checkpointing runs again are met too, in the scope of their first run.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from trueup.adapters.torch.functions import _name_of
from trueup.adapters.torch.modes import put_on, take_off, without
from trueup.adapters.torch.policies_calls import Call, function_call
from trueup.adapters.torch.policies_deterministic import Backward
from trueup.adapters.torch.policies_modules import forward_replaced, module_call
from trueup.adapters.torch.policies_tensors import tensors_in
from trueup.adapters.torch.replacing import Replacement
from trueup.adapters.torch.scopes import WRAPPER_CLASSES, Scopes
from trueup.model import TrueupError
from trueup.remedy import Policy, PolicyRule, RuleUse, load

CONVERSIONS = frozenset(
    f"torch.Tensor.{name}" for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf",
                                        "cpu", "cuda", "npu", "xpu", "detach", "backward")
)  # fmt: skip
"""Functions whose result is the dtype or device that they were asked for: another way to run them is another result."""

INSIDE = "they run inside a call that the policy runs in another way"
EAGER = "torch.compile was used: its Python code runs while a policy is applied, for no rule reaches into compiled code"
CONVERTS = "they convert a tensor, and compute nothing"


@dataclass(slots=True, eq=False)
class Running:
    """A rule at work, with what it did."""

    rule: PolicyRule
    fits: Callable[[str, str], bool]
    matched: int = 0
    changed: int = 0
    shadowed: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """Reasons why calls were left as they were."""

    def count(self, left: str) -> None:
        """Count a call, changed unless there is a reason why it was left as it was."""
        self.matched += 1
        if left:
            self.left[left] += 1
        else:
            self.changed += 1

    @property
    def why_not(self) -> str:
        """The most frequent reason why calls were left as they were."""
        return self.left.most_common(1)[0][0] if self.left else ""


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
        self._rules = [Running(rule, rule.matcher()) for rule in policy.rules]
        self._threads = _Threads()
        self._mode = _Mode(self)
        self._names: dict[Any, str | None] = {}
        self._found: dict[tuple[str, bool, str, str], tuple[Running | None, tuple[Running, ...]]] = {}
        self._backward = Backward()
        self._eager: Any = None
        self.eager = False
        """Whether compiled code was met, whose Python code ran instead."""
        self._hooks: list[Any] = []
        self._on = False
        self._thread = threading.get_ident()
        self._replacements = _replacements(self)

    # ---------------------------------------------------------------- life
    def start(self) -> AppliedPolicy:
        """Apply the rules from now on, on this thread and those that autograd starts from it."""
        self._on = True
        with _captures_aside():
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
        if (session := _session()) is not None:
            session.policies.append(self)
        return self

    def remove(self) -> None:
        """Apply the rules no longer, and say on stderr which changed nothing. Calling it again does nothing."""
        if not self._on:
            return
        self._on = False
        if threading.get_ident() == self._thread:
            take_off(self._mode)
        with _captures_aside():
            for replacement in self._replacements:
                replacement.remove()
        for hook in self._hooks:
            hook.remove()
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None
        _applied.remove(self)
        self.tell()

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def uses(self) -> tuple[RuleUse, ...]:
        """Return how many calls each rule was for, and how many it changed."""
        return tuple(
            RuleUse(self.policy.path, r.rule.number, r.rule.calls, r.rule.change, r.matched, r.changed, r.shadowed, r.why_not)
            for r in self._rules
        )

    def tell(self) -> None:
        """Say on stderr which rules changed nothing."""
        for use in self.uses():
            if use.nothing is not None:
                print(f"trueup: note: {use}", file=sys.stderr, flush=True)

    def run_eagerly(self) -> None:
        """Run the Python code of what torch.compile compiled: no rule reaches into compiled code."""
        if self._eager is not None:
            return
        from torch._dynamo import eval_frame

        self._eager = torch.compiler.set_stance("force_eager")
        self._replacements.append(Replacement(eval_frame, "_callback_from_stance", functools.partial(_meets_compiled, self)))
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
        if name is None or not self._works():
            return func(*args, **kwargs)
        return self.call_named(name, func, args, kwargs)

    def call_named(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a function of that name."""
        state = self._threads.state
        scope = state.scopes[-1] if state.scopes else ""
        running = self._rule("api", scope, name, optimizer=state.stepping and not state.modules)
        if running is None or not any(True for _ in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        if name in CONVERSIONS and running.rule.moves:
            running.count(CONVERTS)
            return func(*args, **kwargs)
        return self._execute(running, function_call(running.rule, scope, name, func, args, kwargs, quietly, self._alone))

    def module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a module, under the first rule that is for it."""
        if not self._works():
            return original(module, *args, **kwargs)
        state = self._threads.state
        called = module._orig_mod if type(module).__name__ == "OptimizedModule" else module
        scope = self._scopes.path(called, state.modules[-1] if state.modules else None)
        running = None
        if type(module).__name__ not in WRAPPER_CLASSES:  # the module inside has the same scope
            running = self._rule("module", scope, type(called).__name__, optimizer=False)
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
                f"The policy cannot be kept.\n  where:    backward of {call}\n  expected: a deterministic algorithm\n  got:      {error}\n"
                "  next:     leave out deterministic for this call, or run it with device = \"cpu\""
            ) from error
        finally:
            self._backward.leave()

    @contextmanager
    def function_mode_on(self) -> Iterator[None]:
        """Have the function mode on in a block: PyTorch switches it off while it handles ``Tensor.backward``."""
        on = _is_on(self._mode)
        if not on:
            put_on(self._mode)
        try:
            yield
        finally:
            if not on:
                take_off(self._mode)

    # ---------------------------------------------------------------- inside
    def _works(self) -> bool:
        """Tell whether what executes is computed for the user: no trace, nothing of Trueup's own, no backward of autograd's."""
        if not self._on or torch._C._get_tracing_state() is not None or torch.compiler._is_compiling_flag or _busy():
            return False
        return torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled()

    def _name(self, func: Callable[..., Any]) -> str | None:
        try:
            return self._names[func]
        except (KeyError, TypeError):
            name = _name_of(func)
            with suppress(TypeError):  # a callable that has no hash
                self._names[func] = name
            return name

    def _rule(self, level: str, scope: str, op: str, *, optimizer: bool) -> Running | None:
        key = (level, optimizer, scope, op)
        found = self._found.get(key)
        if found is None:
            fitting = [
                r for r in self._rules
                if r.rule.level == level and (r.rule.phase == "optimizer") == optimizer and r.fits(scope, op)
            ]  # fmt: skip
            found = self._found[key] = (fitting[0] if fitting else None), tuple(fitting[1:])
        for running in found[1]:
            running.shadowed += 1
        return found[0]

    def _steps(self, *, begins: bool) -> None:
        self._threads.state.stepping = begins


_applied: list[AppliedPolicy] = []
"""The policies at work in this process."""


def applied() -> tuple[AppliedPolicy, ...]:
    """Return the policies at work in this process."""
    return tuple(_applied)


def apply_policy(model: torch.nn.Module | Iterable[torch.nn.Module] | None, policy: str | Policy) -> AppliedPolicy:
    """Apply a policy in this process; see `trueup.apply_policy`."""
    from trueup.adapters.torch.capturing import current

    read = policy if isinstance(policy, Policy) else load(policy)
    session = current()
    if session is not None and session.options.compile == "through":
        raise TrueupError(f"{read.path} cannot be applied in a capture with compile=through: no rule reaches into compiled code; use off")
    scopes = session.scopes if session is not None else Scopes()
    if session is None:
        for root in [] if model is None else [model] if isinstance(model, torch.nn.Module) else model:
            scopes.register(root)
    handle = AppliedPolicy(read, scopes).start()
    atexit.register(lambda: handle.tell() if handle._on else None)
    return handle


# ---------------------------------------------------------------- entrances of PyTorch
def _replacements(policy: AppliedPolicy) -> list[Replacement]:
    from torch.utils import checkpoint

    return [
        Replacement(torch.nn.Module, "_call_impl", functools.partial(_modules, policy)),
        Replacement(torch.autograd.Function, "apply", functools.partial(_applies, policy)),
        Replacement(torch.autograd, "_engine_run_backward", functools.partial(_runs_backward, policy)),
        Replacement(checkpoint, "_checkpoint_without_reentrant_generator", functools.partial(_checkpoints, policy)),
        Replacement(checkpoint.CheckpointFunction, "forward", functools.partial(_checkpoints_reentrant, policy)),
        Replacement(torch, "compile", functools.partial(_compiles, policy)),
    ]


def _modules(policy: AppliedPolicy, original: Any) -> Any:
    @functools.wraps(original)
    def _call_impl(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return policy.module(original, module, args, kwargs)

    return _call_impl


def _applies(policy: AppliedPolicy, original: Any) -> Any:
    plain = original.__func__

    def apply(cls: type, /, *args: Any, **kwargs: Any) -> Any:
        if not policy._works():
            return plain(cls, *args, **kwargs)
        return policy.call_named(f"{cls.__module__}.{cls.__qualname__}.apply", functools.partial(plain, cls), args, kwargs)

    return classmethod(apply)


def _runs_backward(policy: AppliedPolicy, original: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        return policy.run_backward(original, *args, **kwargs) if policy._on else original(*args, **kwargs)

    return run_backward


def _checkpoints(policy: AppliedPolicy, original: Any) -> Any:
    def generator(fn: Any, *rest: Any, **kwargs: Any) -> Any:
        return original(policy.checkpointed(fn) if policy._on else fn, *rest, **kwargs)

    return generator


def _checkpoints_reentrant(policy: AppliedPolicy, original: Any) -> Any:
    plain = original.__func__

    def forward(ctx: Any, run_function: Any, *rest: Any) -> Any:
        return plain(ctx, policy.checkpointed(run_function) if policy._on else run_function, *rest)

    return staticmethod(forward)


def _compiles(policy: AppliedPolicy, original: Any) -> Any:
    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if policy._on:
            policy.run_eagerly()
        return original(*args, **kwargs)

    return compile


def _meets_compiled(policy: AppliedPolicy, original: Any) -> Any:
    def _callback_from_stance(callback: Any) -> Any:
        if policy._on and callback not in (None, False):
            policy.meets_compiled()
        return original(callback)

    return _callback_from_stance


def _is_on(mode: TorchFunctionMode) -> bool:
    return mode in torch.overrides._get_current_function_mode_stack()


# ---------------------------------------------------------------- beside a capture
def _session() -> Any | None:
    capturing = sys.modules.get("trueup.adapters.torch.capturing")
    return None if capturing is None else capturing.current()


def _busy() -> bool:
    session = _session()
    return session is not None and session.threads.state.busy


@contextmanager
def quietly() -> Iterator[None]:
    """Let nothing that executes in a block be recorded."""
    session = _session()
    if session is None:
        yield
        return
    state = session.threads.state
    before, state.busy = state.busy, True
    try:
        yield
    finally:
        state.busy = before


@contextmanager
def _captures_aside() -> Iterator[None]:
    """Take a capture's replacements away in a block, so that they stand around what is replaced in it."""
    session = _session()
    if session is None:
        yield
        return
    with session.compiling.out_of_sight():
        yield
