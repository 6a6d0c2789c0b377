"""How far a long command is: whoever loops says so with `advance`, and the door that shows it listens.

A door wraps what may take long in `listening`; without it nothing is kept, so a library call costs a look at an empty list.
Processes that another one started say what they wrote with `tell_written`: 24 bytes in a folder of that machine. `following` tells
how far a capture is that they write: steps, rows, megabytes and the rate, as they say themselves. The capture's directory is not
looked at: it may be on a disk that a thousand ranks share. What is shown at all, and what a library or a process takes its settings
from, are environment variables, set for a while (`variable_set`).
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from trueup.foundation.words.wording import counted

EVERY = 1.0
"""Seconds between two looks; processes write as often."""


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


@contextmanager
def following(doing: str = "capturing", steps: int | None = None, *, counts: bool = True) -> Iterator[dict[str, str]]:
    """Say how far the capture is that the block's command writes, where somebody listens: what it is for, and of how many steps, if
    that is known; without ``counts``, that it runs. Gives the variables that the command needs."""
    if not is_heard():
        yield {}
        return
    advance(doing, "steps" if counts else "", 0, steps if counts else None)
    if not counts:
        yield {}
        return
    import tempfile  # here: a command that waits for no process does without it

    ended = Event()
    with tempfile.TemporaryDirectory(prefix="trueup-progress-", ignore_cleanup_errors=True) as folder:
        thread = Thread(target=_follow, args=(Path(folder), ended, doing, steps), daemon=True)
        thread.start()
        try:
            yield {TALLIES: folder}
        finally:
            ended.set()
            thread.join()


def _follow(folder: Path, ended: Event, doing: str, most: int | None) -> None:
    began = time.monotonic()
    while not ended.wait(EVERY):
        steps, rows, size = read_written(folder)
        rate = size / max(time.monotonic() - began, 1e-9)
        written = f"{counted(rows, 'row')}, {_sized(size)} written, {_sized(rate)}/s"
        advance(doing, "steps", steps, most, written if rows else "")


def _sized(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in a block, and put back what it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
