"""A policy at work in a process: which rule is for which call, and how many calls it changed.

`AppliedPolicy` meets functions and modules through what an adapter puts in their places; how one call runs under a rule is in
`ruled`. What activation checkpointing runs again is met too, in the scope of its first run.

Values that rules of a policy set (``set = { eps = 1e-5 }``): of modules' attributes, functions' arguments, optimizers' settings,
a scaler's and autocast's.

A module has its values from its first call on, a function for the call, a group of an optimizer while it steps: a schedule goes on
from what it has made itself. A capture sees them all as if the script had set them.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Protocol, TypeVar

from trueup.foundation.facts.operators import has, says
from trueup.foundation.store.declared import RuleUse
from trueup.foundation.words.wording import say
from trueup.recording.engine.ruled import CONVERTS, INSIDE, Framework, RuledCall, function_call, module_call
from trueup.recording.engine.session import Threads, roots, running_of
from trueup.recording.policy_file import SCALARS, Policy, PolicyRule, load
from trueup.recording.recorder.arguments import forward_replaced


@dataclass(slots=True, eq=False)
class Running:
    """A rule at work, with what it did."""

    rule: PolicyRule
    fits: Callable[[str, str], bool]
    matched: int = 0
    changed: int = 0
    shadowed: int = 0
    left: Counter[str] = field(default_factory=Counter)  # reasons why calls were left as they were
    random: int = 0  # calls that drew random numbers

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

    def use(self, path: str) -> RuleUse:
        """Return what it did so far, as a rule of the policy of that path."""
        rule = self.rule
        counts = self.matched, self.changed, self.shadowed
        return RuleUse(path, rule.number, rule.calls, rule.change, *counts, self.why_not, self.random)

    @contextmanager
    def counting_draws(self, call: RuledCall) -> Iterator[None]:
        """Count a call that draws random numbers in a block, in another dtype or on another device."""
        if not (self.rule.moves and call.changes):
            yield
            return
        drew = call.draws()
        yield
        self.random += drew()


class Rules:
    """The rules of a policy at work in this process."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.running = [Running(rule, rule.matcher()) for rule in policy.rules]
        self._found: dict[tuple[str, bool, str, str], tuple[Running | None, tuple[Running, ...]]] = {}

    def first(self, level: str, scope: str, op: str, *, optimizer: bool) -> Running | None:
        """Return the first rule that is for a call."""
        key = (level, optimizer, scope, op)
        found = self._found.get(key)
        if found is None:
            fitting = [
                r for r in self.running
                if r.rule.level == level and not r.rule.set and (r.rule.phase == "optimizer") == optimizer and r.fits(scope, op)
            ]  # fmt: skip
            found = self._found[key] = (fitting[0] if fitting else None), tuple(fitting[1:])
        for running in found[1]:
            running.shadowed += 1
        return found[0]

    def uses(self) -> tuple[RuleUse, ...]:
        """Return how many calls each rule was for, and how many it changed."""
        return tuple(running.use(self.policy.path) for running in self.running)

    def tell(self) -> None:
        """Say on stderr which rules changed nothing."""
        for use in self.uses():
            if use.nothing is not None:
                say(f"note: {use}")


@dataclass(slots=True)
class ThreadState:
    """What nests on one thread."""

    modules: list[Any] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    stepping: int = 0  # how many optimizers' steps are under way, one inside another
    passes: int = 0  # how many backward passes are under way
    changed: int = 0  # calls under way that the policy runs in another way


class Scopes(Protocol):
    """Gives each module its path."""

    def path(self, module: Any, parent: Any) -> str:
        """Return the path of a module that starts to run inside ``parent`` (None: outside any module)."""

    def register(self, root: Any) -> None:
        """Name a root module and all modules below it."""


class AppliedPolicy(ABC):
    """A policy at work in this process, until `remove` or the end of a ``with`` block. An adapter's own says through what it
    meets calls, and when."""

    name: str  # of the framework
    framework: Framework
    wrappers: tuple[str, ...]  # classes of modules that only hold another one, whose scope they share

    def __init__(self, policy: Policy, scopes: Scopes, backward: Any) -> None:
        self.policy, self.rules = policy, Rules(policy)
        self.given = GivenValues(self.rules.running)
        self.on = False
        self._scopes, self._backward = scopes, backward
        self._threads = Threads(ThreadState)
        self._thread = threading.get_ident()

    # ------------------------------------------------------------------------------------------------ what an adapter adds
    @abstractmethod
    def install(self) -> None:
        """Stand where calls are met."""

    @abstractmethod
    def leave(self) -> None:
        """Leave no trace in the framework."""

    @abstractmethod
    def works(self) -> bool:
        """Tell whether what executes is computed for the user: nothing that is traced or built, nothing of Trueup's own, no
        backward of autograd's."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[Any]:
        """Return a block in which no rule holds."""

    # ------------------------------------------------------------------------------------------------------------- life
    def start(self) -> AppliedPolicy:
        """Apply the rules from now on, on this thread and those that autograd starts from it."""
        self.on = True
        self.install()
        _applied.append(self)
        if (session := running_of(self.name).session) is not None:
            session.policies.append(self)
        return self

    def remove(self) -> None:
        """Apply the rules no longer, and say on stderr which changed nothing. Calling it again does nothing."""
        if not self.on:
            return
        self.on = False
        self.leave()
        self.given.take_back()
        _applied.remove(self)
        self.rules.tell()

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def uses(self) -> tuple[RuleUse, ...]:
        """Return how many calls each rule was for, and how many it changed."""
        return self.rules.uses()

    @property
    def scope(self) -> str:
        """The scope of the module that runs now; empty outside of modules."""
        scopes = self._threads.state.scopes
        return scopes[-1] if scopes else ""

    # --------------------------------------------------------------------------------------------- what a framework calls
    def call_named(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a function of that name, under the first rule that is for it."""
        state = self._threads.state
        scope = self.scope
        running = self.rules.first("api", scope, name, optimizer=bool(state.stepping) and not state.modules)
        if running is None or not self.framework.tensors_in((args, kwargs)):
            return self.plainly(func, args, kwargs)
        if has(name, "converts") and running.rule.moves:
            running.count(CONVERTS)
            return self.plainly(func, args, kwargs)
        return self._execute(running, function_call(self.framework, running.rule, scope, name, func, args, kwargs, self.alone))

    def plainly(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a function that no rule is for."""
        return func(*args, **kwargs)

    def module(self, original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a module, under the first rule that is for it."""
        if not self.works():
            return original(module, *args, **kwargs)
        state, called = self._threads.state, self.called(module)
        scope = self._scopes.path(called, state.modules[-1] if state.modules else None)
        running = None
        if type(module).__name__ not in self.wrappers:  # the module inside has the same scope
            self.given.to_module(called, scope)
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

    def called(self, module: Any) -> Any:
        """Return the module that is meant by one that is called."""
        return module

    def _forward(self, running: Running, scope: str, module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        inside = self.recomputed(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._execute(running, module_call(self.framework, running.rule, scope, module, inside, args, kwargs))

        return run

    def _execute(self, running: Running, call: RuledCall) -> Any:
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

    def recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that may run again in a backward pass: its scope is that of its first run."""
        state = self._threads.state
        above = state.modules[-1:], state.scopes[-1:]

        @functools.wraps(function, assigned=("__name__", "__doc__"), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            state = self._threads.state
            before = state.modules, state.scopes
            state.modules, state.scopes = list(above[0]), list(above[1])
            try:
                return function(*args, **kwargs)
            finally:
                state.modules, state.scopes = before

        return run


_applied: list[AppliedPolicy] = []
"""The policies at work in this process."""


def applied(framework: str) -> tuple[AppliedPolicy, ...]:
    """Return the policies at work in this process, of one framework."""
    return tuple(policy for policy in _applied if policy.name == framework)


S = TypeVar("S", bound=Scopes)
P = TypeVar("P", bound=AppliedPolicy)


def apply(
    kind: Callable[[Policy, S], P], policy: str | Policy, scopes: Callable[[], S], framework: str, model: Any, module: type
) -> P:
    """Apply a policy in this process and tell at its end which rules changed nothing; ``scopes`` makes those of ``model``, one
    ``module`` or several, where no capture of the framework runs, which has its own."""
    session = running_of(framework).session
    known = scopes() if session is None else session.scopes
    for root in roots(model, module) if session is None else ():
        known.register(root)
    handle = kind(policy if isinstance(policy, Policy) else load(policy), known)
    handle.start()
    atexit.register(lambda: handle.rules.tell() if handle.on else None)
    return handle


# ------------------------------------------------------------------------------------------------------- beside a capture
class _Quiet(threading.local):
    depth = 0


_quiet = _Quiet()


def busy(framework: str) -> bool:
    """Tell whether what executes is a policy's own work, or that of a capture."""
    session = running_of(framework).session
    return bool(_quiet.depth) or (session is not None and session.threads.state.busy)


@contextmanager
def quietly(framework: str) -> Iterator[None]:
    """Keep a framework's capture from recording, and its policy from changing, anything that executes in a block."""
    session = running_of(framework).session
    state = None if session is None else session.threads.state
    before = state is not None and state.busy
    _quiet.depth += 1
    if state is not None:
        state.busy = True
    try:
        yield
    finally:
        _quiet.depth -= 1
        if state is not None:
            state.busy = before


SAME = "the value was that already"
NONE_SUCH = "there is none of that name with such a value"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Counting(Protocol):
    """A rule at work, which counts its calls, and those for which an earlier rule came first."""

    shadowed: int

    @property
    def rule(self) -> PolicyRule:
        """The rule."""

    @property
    def fits(self) -> Callable[[str, str], bool]:
        """Tells of a scope and an operator whether the rule is for them."""

    def count(self, left: str) -> None:
        """Count a call, changed unless there is a reason why it was left as it was."""


class GivenValues:
    """The rules that set values, at work."""

    def __init__(self, rules: Sequence[Counting]) -> None:
        self._rules = {level: [one for one in rules if one.rule.set and one.rule.level == level] for level in LEVELS}
        self._seen: set[tuple[int, str]] = set()
        self._before: list[tuple[Any, str, Any]] = []

    def are_for(self, level: str) -> bool:
        """Tell whether a rule sets values of modules, functions (``api``), optimizers, or GradScaler and autocast (``amp``)."""
        return bool(self._rules[level])

    def take_back(self) -> None:
        """Leave modules as they were."""
        while self._before:
            setattr(*self._before.pop())

    def to_module(self, module: Any, scope: str) -> None:
        """Set the attributes of a module that is about to run for the first time."""
        key = id(module), scope
        if not self._rules["module"] or key in self._seen:
            return
        self._seen.add(key)
        for running, name, value in self._values("module", scope, type(module).__name__):
            held = getattr(module, name, None)
            left = _left(held, value)
            if not left:
                self._before.append((module, name, held))
                setattr(module, name, _like(held, value))
            running.count(left)

    def to_function(self, name: str, scope: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments of a function with what rules set of them."""
        for running, argument, value in self._values("api", scope, name):
            places = _positions(name, function)
            at = places.index(argument) if argument in places else -1
            given = 0 <= at < len(args)
            held = args[at] if given else kwargs.get(argument, _default(function, argument))
            if not (left := _left(held, value)):
                new = _like(held, value)
                args = (*args[:at], new, *args[at + 1 :]) if given else args
                kwargs = kwargs if given else {**kwargs, argument: new}
            running.count(left)
        return args, kwargs

    @contextmanager
    def to_optimizer(self, groups: Sequence[dict[str, Any]], name: str, step: int) -> Iterator[None]:
        """Set values of an optimizer's groups in a block, as they are in a step; ``beta2`` is the second of ``betas``."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        for at, group in enumerate(groups):
            for running, setting, value in self._values("optimizer", f"group {at}", name):
                key, held, whole = _of_group(group, setting)
                wanted = _at(value, step)
                if not (left := _left(held, wanted)):
                    before.append((group, key, group[key]))
                    group[key] = whole(_like(held, wanted))
                running.count(left)
        try:
            yield
        finally:
            for group, key, held in reversed(before):
                group[key] = held

    def to_amp(self, held: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return what rules set of a scaler or of autocast, by the names of what it holds, as far as that is another value."""
        new = {}
        for running, setting, value in self._values("amp", "", name):
            if not (left := _left(held.get(setting, NotImplemented), value)):
                new[setting] = value
            running.count(left)
        return new

    def _values(self, level: str, scope: str, op: str) -> Iterable[tuple[Counting, str, Any]]:
        found: dict[str, tuple[Counting, str, Any]] = {}
        for one in self._rules[level]:
            if one.fits(scope, op):
                for name, value in (one.rule.set or {}).items():
                    if name in found:  # of several rules the first holds
                        one.shadowed += 1
                    else:
                        found[name] = one, name, value
        return found.values()


LEVELS = ("api", "module", "optimizer", "amp")


def _left(held: Any, value: Any) -> str:
    """Say why a value stays as it is: there is nothing like it, or it is equal. Empty: it is set."""
    several = isinstance(held, (tuple, list)) and all(isinstance(one, SCALARS) for one in held)
    if not (several if isinstance(value, list) else isinstance(held, (*SCALARS, type(None)))):
        return NONE_SUCH
    return SAME if held == _like(held, value) and isinstance(held, bool) == isinstance(value, bool) else ""


def _like(held: Any, value: Any) -> Any:
    return tuple(value) if isinstance(held, tuple) and isinstance(value, list) else value


def _at(value: Any, step: int) -> Any:
    """Return the value of a step; before the first that is named, the first."""
    if not isinstance(value, list):
        return value
    return next((one for since, one in reversed(value) if since <= step), value[0][1])


def _of_group(group: dict[str, Any], setting: str) -> tuple[str, Any, Callable[[Any], Any]]:
    """Return the key of a setting of a group, its value, and what makes of a value the one of the key."""
    betas = group.get("betas")
    number = setting.removeprefix("beta")
    if setting not in group and isinstance(betas, tuple) and number.isdecimal() and 0 < int(number) <= len(betas):
        at = int(number) - 1
        return "betas", betas[at], lambda value: (*betas[:at], value, *betas[at + 1 :])
    return setting, group.get(setting, NotImplemented), lambda value: value


@lru_cache(maxsize=1000)
def _signature(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}


def _positions(name: str, function: Any) -> list[str]:
    """Return the names of a function's arguments in their order, where they are known."""
    return list(_signature(function)) or [str(one) for one in says(name, "positions") or ()]


def _default(function: Any, argument: str) -> Any:
    found = _signature(function).get(argument)
    return NotImplemented if found is None or found.default is found.empty else found.default
