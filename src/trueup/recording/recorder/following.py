"""How far a capture is that other processes write: steps, rows, megabytes and the rate, as its directory tells them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from trueup.foundation.progress import advance, is_heard
from trueup.foundation.words.wording import counted

EVERY = 5.0
"""Seconds between two looks; a line of a log comes every ten."""


@contextmanager
def following(directory: Path) -> Iterator[None]:
    """Say how far the capture is that the block's command writes, where somebody listens."""
    if not is_heard():
        yield
        return
    ended = Event()
    thread = Thread(target=_follow, args=(directory, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(directory: Path, ended: Event) -> None:
    seen, began = Seen(directory), time.monotonic()
    while not ended.wait(EVERY):
        seen.look()
        if seen.files:
            rate = seen.bytes / 1e6 / max(time.monotonic() - began, 1e-9)
            steps = counted(len(seen.steps), "step")
            advance("capturing", "rows", seen.rows, detail=f"{steps}, {seen.bytes / 1e6:,.1f} MB written, {rate:,.1f} MB/s")


class Seen:
    """What a directory holds by now; each file is opened once, for a file that has its name is whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.files: set[Path] = set()
        self.steps: set[str] = set()
        self.rows = self.bytes = 0

    def look(self) -> None:
        """Take what is new."""
        for path in self._directory.glob("rank-*/step-*/*"):
            if path in self.files or path.suffix not in (".parquet", ".safetensors"):
                continue
            with suppress(OSError, ValueError):  # gone, or no Parquet file after all: the capture's reader says so in the end
                size, rows = path.stat().st_size, _rows(path)
                self.files.add(path)
                self.steps.add(path.parent.name)
                self.bytes += size
                self.rows += rows


def _rows(path: Path) -> int:
    if path.suffix != ".parquet":
        return 0
    import pyarrow.parquet as parquet  # not before a capture is ten seconds old: most commands load no Arrow in this process

    return int(parquet.read_metadata(path).num_rows)
