"""Values that rules of a policy set (``set = { eps = 1e-5 }``): of modules' attributes, functions' arguments, optimizers' settings,
a scaler's and autocast's.

A module has its values from its first call on, a function for the call, a group of an optimizer while it steps: a schedule goes on
from what it has made itself. A capture sees them all as if the script had set them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

from trueup.foundation.facts.operators import says
from trueup.recording.policy_file import SCALARS, PolicyRule

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
