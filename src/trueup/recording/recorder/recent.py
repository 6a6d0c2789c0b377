"""A dictionary of bounded size: what was used longest ago is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The ``limit`` entries that were used last.

    >>> recent = Recent(2)
    >>> for name in "abac":
    ...     recent.put(name, name.upper())
    >>> [recent.get(name) for name in "abc"]
    ['A', None, 'C']
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the entry and count it as used; None where it is not known, or no longer."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)
