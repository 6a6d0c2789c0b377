"""How far a long command is: whoever loops says so with `advance`, and the door that shows it listens.

A door wraps what may take long in `listening`; without it nothing is kept, so a library call costs a look at an empty list.
Processes that another one started say what they wrote with `tell_written`: 24 bytes in a folder of that machine.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` things of a kind; ``total`` is None where nobody knows it, the kind empty where nothing counts."""

    doing: str
    kind: str
    done: int
    total: int | None = None
    detail: str = ""  # what else is to be said of it


def is_set(variable: str) -> bool:
    """Tell whether an environment variable switches something on."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no")


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


TALLIES = "TRUEUP_PROGRESS"
"""Variable that names the folder; of a process on another machine there is no such folder, and it says nothing."""
_TALLY = struct.Struct("<3q")


def tell_written(steps: int, rows: int, size: int) -> None:
    """Say how many steps, rows and bytes this process has written by now, if anybody wants to know."""
    folder = os.environ.get(TALLIES)
    if folder:
        with suppress(OSError):
            Path(folder, str(os.getpid())).write_bytes(_TALLY.pack(steps, rows, size))


def read_written(folder: Path) -> tuple[int, int, int]:
    """Return what the processes of a folder have written: the most steps of one, all rows, all bytes."""
    told = [(0, 0, 0)]
    for file in folder.iterdir():
        with suppress(OSError, struct.error):  # it is being written
            told.append(_TALLY.unpack(file.read_bytes()))
    return max(steps for steps, _, _ in told), sum(rows for _, rows, _ in told), sum(size for _, _, size in told)


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
