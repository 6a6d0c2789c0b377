"""How far a capture is that other processes write: steps, rows, megabytes and the rate, as they say themselves.

The capture's directory is not looked at: it may be on a disk that a thousand ranks share.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from trueup.foundation.progress import TALLIES, advance, is_heard, read_written
from trueup.foundation.words.wording import counted

EVERY = 1.0
"""Seconds between two looks; processes write as often."""


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
