"""How far a command is, on standard error: a bar on a terminal, in a log a line each ten seconds, nothing if it is soon over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console
from rich.progress import Progress as Bar

from trueup.foundation.progress import Progress, is_set, listening
from trueup.foundation.words.wording import say

SOON = 2.0
"""Seconds that nobody minds."""
EVERY = 10.0
"""Seconds between two lines of a log; with ``--verbose`` one."""


@contextmanager
def shown(*, lines: bool = False) -> Iterator[None]:
    """Show how far the block is, unless ``TRUEUP_QUIET`` is set (or ``--quiet``, which sets it). With ``lines`` there is no bar on
    a terminal either: it belongs to the command that runs there."""
    if is_set("TRUEUP_QUIET"):
        yield
        return
    latest: deque[Progress] = deque(maxlen=1)
    ended = Event()
    console = Console(stderr=True)
    show = Thread(target=_bar if console.is_terminal and not lines else _lines, args=(latest, ended, console), daemon=True)
    show.start()
    try:
        with listening(latest.append):
            yield
    finally:
        ended.set()
        show.join()


def _bar(latest: deque[Progress], ended: Event, console: Console) -> None:
    if ended.wait(SOON):
        return
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        while not ended.wait(0.2):
            for one in list(latest):
                bar.update(task, description=f"{one.doing} {one.done:,} {one.kind}", completed=one.done, total=one.total)


def _lines(latest: deque[Progress], ended: Event, _console: Console) -> None:
    began = time.monotonic()
    while not ended.wait(min(EVERY, 1.0) if is_set("TRUEUP_VERBOSE") else EVERY):
        for one in list(latest):
            say(sentence(one, time.monotonic() - began))


def sentence(one: Progress, seconds: float) -> str:
    """Say how far it is after some seconds, and how long the rest takes at that rate."""
    if one.total is None:
        return f"{one.doing}: {one.done:,} {one.kind} in {seconds:.0f} s" + (f"; {one.detail}" if one.detail else "")
    left = f", about {seconds * (one.total - one.done) / one.done:.0f} s left" if one.done else ""
    return f"{one.doing}: {one.done:,} of {one.total:,} {one.kind} in {seconds:.0f} s{left}"
