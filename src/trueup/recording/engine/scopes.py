"""Module paths: the scope of a call is the path of the innermost module that is running."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Scopes(ABC):
    """Gives each module its path. The first root with parameters is ``""``; further roots start with their class name."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: defaultdict[str, int] = defaultdict(int)
        self._has_main = False
        self.wholes: Callable[[], Iterable[Any]] = tuple
        """Gives the living modules that hold others and are never called themselves; set by the session."""

    # ------------------------------------------------------------------------------------------------ what an adapter adds
    @abstractmethod
    def below(self, root: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        """Yield a module and all below it, each with its path; wrappers are left out of it."""

    @abstractmethod
    def children(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Yield the modules that a module holds, each with its name in it."""

    @abstractmethod
    def is_model(self, root: Any) -> bool:
        """Tell whether a root has parameters: a loss or a metric is no model."""

    def inside(self, root: Any) -> Any:
        """Return the user's module inside wrappers."""
        return root

    def made_up(self, module: Any) -> str:
        """Return a name for a module that its parent does not know."""
        return type(module).__name__

    # ---------------------------------------------------------------------------------------------------- what all share
    def register(self, root: Any, name: str | None = None) -> None:
        """Name a root module and all modules below it."""
        for path, module in self.below(root, self._root_name(root) if name is None else name):
            self._paths.setdefault(module, path)

    def path(self, module: Any, parent: Any) -> str:
        """Return the path of a module that starts to run inside ``parent`` (None: outside any module)."""
        found = self._paths.get(module)
        if found is None:
            if parent is None:
                self.register(next((one for one in self.wholes() if self._holds(one, module)), module))
            else:  # built after its parent was registered
                name = next((k for k, child in self.children(parent) if child is module), None) or self.made_up(module)
                above = self._paths.get(parent, "")
                self.register(module, f"{above}.{name}" if above else name)
            found = self._paths[module]
        return found

    def names(self, root: Any) -> dict[str, str]:
        """Return the paths of a module and all below it, each by its path in that module: those named before keep their own."""
        above = self.path(root, None)
        return {at: self._paths.get(one, f"{above}.{at}" if above and at else at or above) for at, one in self.below(root, "")}

    def _holds(self, whole: Any, module: Any) -> bool:
        return whole not in self._paths and any(one is module for _, one in self.below(whole, ""))

    def _root_name(self, root: Any) -> str:
        if not self._has_main and self.is_model(root):
            self._has_main = True
            return ""
        name = type(self.inside(root)).__name__
        self._roots[name] += 1
        return name if self._roots[name] == 1 else f"{name}~{self._roots[name]}"


def walk(module: Any, path: str, children: Callable[[Any], Iterable[tuple[str | None, Any]]]) -> Iterator[tuple[str, Any]]:
    """Yield a module and all below it once, a shared one at its first place, each with its path; a child without a name has its
    parent's."""
    seen: set[int] = set()
    pending = [(path, module)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        below = [(path if name is None else f"{path}.{name}" if path else name, child) for name, child in children(module)]
        pending += reversed(below)
