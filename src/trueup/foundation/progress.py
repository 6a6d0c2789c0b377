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
    detail: str = ""  # what else is to be said of it


Listener = Callable[[Progress], None]

_listeners: list[Listener] = []


def advance(doing: str, kind: str, done: int, total: int | None = None, detail: str = "") -> None:
    """Say that ``done`` of ``total`` are done; from any thread."""
    for listener in _listeners[-1:]:
        listener(Progress(doing, kind, done, total, detail))


def is_heard() -> bool:
    """Tell whether anybody listens."""
    return bool(_listeners)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have all progress within it told to a listener, and to no other."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


_left: list[str] = []


@contextmanager
def leaving(sentence: str) -> Iterator[None]:
    """Have the user told, if the block is interrupted, what is left of it and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        _left.append(sentence)
        raise


def how_to_go_on() -> list[str]:
    """Return what was left by the blocks that were interrupted, once."""
    said = list(dict.fromkeys(_left))
    _left.clear()
    return said
