"""Which calls a configuration wants, by msprobe's names: ``Functional.linear.0.forward``, ``Module.head.Linear.forward.0``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from trueup_compat.msprobe.config import Config
from trueup_compat.names import CallName

Wanted = Callable[[CallName | None], bool]


def entry_name(name: CallName) -> str:
    """Return the name of a call's entry: a module's number comes last.

    >>> entry_name(CallName("", "head.Linear", 0, "backward"))
    'Module.head.Linear.backward.0'
    """
    return name.text(".") if name.kind else f"Module.{name.api}.{name.direction}.{name.index}"


def wanted(config: Config) -> Wanted | None:
    """Return what tells whether a call is wanted, None where all are; made anew for each step."""
    if config.scope:
        return _Scope(*config.scope)
    if config.names:
        return _List(config.names)
    return None


def is_listed(entry: str, names: tuple[str, ...]) -> bool:
    """Tell whether a list of the configuration names an entry."""
    return _listed(names).has(entry)


class _Scope:
    """All calls from the first to the last named one, in the order of execution."""

    def __init__(self, first: str, last: str) -> None:
        self._first, self._last, self._inside = first, last, False

    def __call__(self, name: CallName | None) -> bool:
        """Tell whether a call lies in the range."""
        if name is None:
            return self._inside
        entry = entry_name(name)
        self._inside = self._inside or entry == self._first
        found = self._inside
        if found and entry == self._last:
            self._inside = False
        return found


class _List:
    """Calls by whole names, parts of names, and ``name-regex(...)``."""

    def __init__(self, names: tuple[str, ...]) -> None:
        patterns = [name for name in names if name.startswith("name-regex(") and name.endswith(")")]
        self._patterns = [re.compile(name[len("name-regex(") : -1]) for name in patterns]
        self._names = [name for name in names if name not in patterns]
        self._whole = {name for name in self._names if re.search(r"\.\d+\.(forward|backward)$|\.(forward|backward)\.\d+$", name)}

    def __call__(self, name: CallName | None) -> bool:
        """Tell whether a call is listed; a name that ends in a number and a direction is that call alone."""
        return name is not None and self.has(entry_name(name))

    def has(self, entry: str) -> bool:
        """Tell whether an entry's name is listed."""
        if entry in self._whole or any(pattern.search(entry) for pattern in self._patterns):
            return True
        return any(part in entry for part in self._names if part not in self._whole)


@lru_cache(maxsize=8)
def _listed(names: tuple[str, ...]) -> _List:
    return _List(names)
