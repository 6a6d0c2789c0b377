"""An attribute of a framework in whose place Trueup stands for the time of a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Replacement:
    """An attribute of a class or module that another value stands in for between `install` and `remove`.

    ``make`` gets the original and returns what stands in its place. That passes through when the capture is over, for others may
    have kept a reference to it, and it is taken back only where it still stands, for others may have replaced it since.
    """

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
