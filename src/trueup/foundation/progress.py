"""How far a long command is: whoever loops says so with `advance`, and the door that shows it listens.

A door wraps what may take long in `listening`; without it nothing is kept, so a library call costs a look at an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` things of a kind; ``total`` is None where nobody knows it."""

    doing: str
    kind: str
    done: int
    total: int | None = None


Listener = Callable[[Progress], None]

_listeners: list[Listener] = []


def advance(doing: str, kind: str, done: int, total: int | None = None) -> None:
    """Say that ``done`` of ``total`` are done; from any thread."""
    for listener in _listeners[-1:]:
        listener(Progress(doing, kind, done, total))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have all progress within it told to a listener, and to no other."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()
