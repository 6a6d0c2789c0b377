"""What Trueup stands in the place of for the time of a capture: attributes, and functions wherever somebody holds them by name."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from types import ModuleType
from typing import Any


class Replacement:
    """An attribute of a class or module in whose place stands, between `install` and `remove`, what ``make`` makes of it. That
    passes through when the capture is over, for others may hold a reference to it, and is taken back only where it still
    stands."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self.original: Any = None
        self.ours: Any = None
        self._inherited = False

    def install(self) -> None:
        """Replace the attribute; where this version of the framework has none of that name, do nothing."""
        self._inherited = self._name not in vars(self._owner)
        original = getattr(self._owner, self._name, None) if self._inherited else vars(self._owner)[self._name]
        if original is not None:
            if self.ours is None or original is not self.original:
                self.original, self.ours = original, self._make(original)
            setattr(self._owner, self._name, self.ours)

    def remove(self) -> bool:
        """Put the original back; return whether ours stood there."""
        stands = self.ours is not None and vars(self._owner).get(self._name) is self.ours
        if stands and self._inherited:
            delattr(self._owner, self._name)
        elif stands:
            setattr(self._owner, self._name, self.original)
        return stands


class Around(Replacement):
    """A function or method around which another is called: with the original, then with what the original is given."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        def make(original: Callable[..., Any]) -> Any:
            @wraps(original)
            def around(*args: Any, **kwargs: Any) -> Any:
                return call(original, *args, **kwargs)

            return staticmethod(around) if isinstance(original, staticmethod) else around

        super().__init__(owner, name, make)


class Sweep:
    """Functions replaced wherever a module holds them: ``from paddle._C_ops import matmul`` binds the original for good. A module
    that takes one by name while they are replaced keeps the replacement, which hands on to the original afterwards. Modules whose
    names begin with one of ``left_alone`` keep theirs."""

    def __init__(self, replaced: Iterable[tuple[Any, Any]], left_alone: tuple[str, ...] = ()) -> None:
        self._left_alone = left_alone
        self._by_id = {id(original): (original, new) for original, new in replaced}
        self._done: list[tuple[dict[str, Any], str, Any]] = []

    def install(self) -> int:
        """Replace; return in how many places."""
        for name, module in list(sys.modules.items()):
            if type(module) is not ModuleType or name.startswith(self._left_alone):
                continue
            names = vars(module)
            for key, value in list(names.items()):
                found = self._by_id.get(id(value))
                if found is not None and found[0] is value:
                    names[key] = found[1]
                    self._done.append((names, key, found[1]))
        return len(self._done)

    def remove(self) -> None:
        """Restore every place that still holds the replacement."""
        originals = {id(new): original for original, new in self._by_id.values()}
        done, self._done = self._done, []
        for names, key, new in done:
            if names.get(key) is new:
                names[key] = originals[id(new)]


@contextlib.contextmanager
def attributes_set(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[int]:
    """Set attributes of objects for a while; gives how many objects."""
    before = [(one, name, getattr(one, name)) for one, name, _ in changes]
    try:
        for one, name, value in changes:
            setattr(one, name, value)
        yield len({id(one) for one, _, _ in changes})
    finally:
        for one, name, value in before:
            setattr(one, name, value)


def without_dropout(modules: Iterable[Any]) -> contextlib.AbstractContextManager[int]:
    """Turn dropout (``p`` of a Dropout, a number ``dropout`` of any other module) off for a while; gives how many had any."""
    found: list[tuple[Any, str, Any]] = []
    for module in modules:
        if re.fullmatch(r"(Feature)?(Alpha)?Dropout([123][dD])?", type(module).__name__):
            found += [(module, "p", 0.0)] if module.p else []
        elif isinstance(getattr(module, "dropout", None), float) and module.dropout:
            found.append((module, "dropout", 0.0))
    return attributes_set(found)
