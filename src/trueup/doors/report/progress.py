"""How far a command is, on standard error: a bar on a terminal, in a log a line each ten seconds, nothing if it is soon over."""

from __future__ import annotations

import io
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column

from trueup.foundation.progress import Progress, is_set, listening
from trueup.foundation.words.wording import say

SOON = 2.0
"""Seconds that nobody minds."""
EVERY = 10.0
"""Seconds between two lines of a log; with ``--verbose`` one."""
SMALLEST = 5
"""Lines of a terminal that has one to spare."""
Latest = deque[tuple[Progress, float]]
"""What was said last, and when what it is about began."""


@contextmanager
def shown(*, below: bool = False) -> Iterator[None]:
    """Show how far the block is, unless ``TRUEUP_QUIET`` is set (or ``--quiet``, which sets it). On a terminal that others write to
    meanwhile, a command of the user's or lines of ours, the bar stands ``below``: their lines scroll above it."""
    if is_set("TRUEUP_QUIET"):
        yield
        return
    latest: Latest = deque(maxlen=1)
    ended = Event()
    console = Console(stderr=True)
    show = Thread(target=(_below if below else _bar) if console.is_terminal else _lines, args=(latest, ended, console), daemon=True)
    show.start()

    def hear(one: Progress) -> None:
        same = [began for before, began in list(latest) if before.doing == one.doing]
        latest.append((one, same[0] if same else time.monotonic()))

    try:
        with listening(hear):
            yield
    finally:
        ended.set()
        show.join()


def _bar(latest: Latest, ended: Event, console: Console) -> None:
    if ended.wait(SOON):
        return
    with _empty(console) as bar:
        task = bar.add_task("", total=None, detail="")
        while not ended.wait(0.2):
            _told(bar, task, latest)


def _empty(console: Console) -> Bar:
    """Return a bar that fits into one line: what is done, the bar, what else is to be said, and the time."""
    said = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    more = TextColumn("{task.fields[detail]}", table_column=Column(no_wrap=True))
    drawn = BarColumn(None, table_column=Column(min_width=4, max_width=40, ratio=1))
    return Bar(said, drawn, TaskProgressColumn(), more, TimeElapsedColumn(), console=console, transient=True, expand=True)


def _told(bar: Bar, task: TaskID, latest: Latest) -> bool:
    """Bring a bar up to date, and tell whether anything was said yet."""
    for one, began in list(latest):
        done = f"{one.done:,} of {one.total:,}" if one.total else f"{one.done:,}"
        said = f"{one.doing} {done} {named(one)}" if one.kind else one.doing
        bar.update(task, description=said, detail=one.detail, completed=one.done, total=one.total)
        bar.tasks[0].start_time = began
        return True
    return False


def _below(latest: Latest, ended: Event, console: Console) -> None:
    """Keep a bar in the last line of a terminal that somebody else writes to, by a scroll region that ends above it (DECSTBM). Each
    change is one write, so that it never stands inside a line of theirs."""
    if ended.wait(SOON):
        return
    screen = console.file.fileno()
    if os.environ.get("TERM", "dumb") == "dumb":
        _lines(latest, ended, console)
        return
    paper = Console(file=io.StringIO(), force_terminal=True, color_system=console.color_system, height=1)  # type: ignore[arg-type]
    bar = _empty(paper)
    task = bar.add_task("", total=None, detail="")
    lines = 0  # of the terminal, while its last one is ours
    try:
        while not ended.wait(0.2):
            width, height = os.get_terminal_size(screen)
            if not _told(bar, task, latest) or height < SMALLEST or os.tcgetpgrp(screen) != os.getpgrp():
                continue  # nothing to show, no room, or we run in the background
            paper.width = width
            with paper.capture() as drawn:
                paper.print(bar.get_renderable())
            if lines != height:
                _write(screen, _given_back(lines) + f"\x1bD\x1b[1A\x1b7\x1b[1;{height - 1}r\x1b8")  # down a line, and up again
                lines = height
            _write(screen, f"\x1b7\x1b[{height};1H\x1b[2K{drawn.get().splitlines()[0]}\x1b8")
    except OSError:  # the terminal is gone
        return
    finally:
        with suppress(OSError):
            _write(screen, _given_back(lines))


def _given_back(lines: int) -> str:
    """Return what gives the whole screen back to others, with its last line empty; the cursor stays where they had it."""
    return f"\x1b7\x1b[r\x1b[{lines};1H\x1b[2K\x1b8" if lines else ""


def _write(screen: int, text: str) -> None:
    os.write(screen, text.encode())


def _lines(latest: Latest, ended: Event, _console: Console) -> None:
    while not ended.wait(min(EVERY, 1.0) if is_set("TRUEUP_VERBOSE") else EVERY):
        for one, began in list(latest):
            say(sentence(one, time.monotonic() - began))


def sentence(one: Progress, seconds: float) -> str:
    """Say how far it is after some seconds, and how long the rest takes at that rate."""
    more = f"; {one.detail}" if one.detail else ""
    if not one.kind:
        return f"{one.doing}: {seconds:.0f} s"
    if one.total is None:
        return f"{one.doing}: {one.done:,} {named(one)} in {seconds:.0f} s{more}"
    left = f", about {seconds * (one.total - one.done) / one.done:.0f} s left" if 0 < one.done < one.total else ""
    return f"{one.doing}: {one.done:,} of {one.total:,} {one.kind} in {seconds:.0f} s{left}{more}"


def named(one: Progress) -> str:
    """Return the kind of what is done, of one thing without its s."""
    return one.kind.removesuffix("s") if one.done == 1 and not one.total else one.kind
