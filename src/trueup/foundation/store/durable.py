"""Files that are there whole or not at all: write to ``<name>.tmp``, fsync, rename, fsync the folder.

Large blocks are written past the page cache: the disk takes the bytes from where they lie. Copying them into the cache takes a
core as long as the disk takes to write, and emptying it as long again; without it a write costs the training hardly any CPU time.
Only blocks that lie alike in memory and in the file can go this way (``O_DIRECT``), so `segment` puts them so. The page cache
takes the edges of blocks; everything on a file system that refuses (some networks'); and everything on a slow disk, where it
holds bursts.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.store.layout import TEMPORARY

WORKERS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")

if sys.platform != "win32":
    import fcntl

BLOCK = 4096
"""Bytes to whose multiples addresses, places in the file and sizes are cut: the largest block of any disk, and a page."""
LARGE = 1 << 20  # bytes from which on this pays
AT_ONCE = 64 << 20  # most bytes of one write
SLOW = 500e6  # bytes a second below which a disk is slow
JUDGED = 256 << 20  # bytes over which the speed is taken: one write may wait for much else
PAUSE = 60.0  # seconds for which a slow disk is left to the page cache, before it is tried again


class _Device:
    """What is known of the disk below a file system."""

    __slots__ = ("again", "seconds", "written")

    def __init__(self) -> None:
        self.written, self.seconds = 0, 0.0
        self.again = 0.0  # when it may be written to past the page cache, by the monotonic clock

    def wrote(self, size: int, seconds: float) -> None:
        """Learn how long a write took; none of its bytes where it was refused."""
        self.written += size
        self.seconds += seconds
        if not size:
            self.again = math.inf
        elif self.written >= JUDGED:
            if self.written < SLOW * self.seconds:
                self.again = time.monotonic() + PAUSE
            self.written, self.seconds = 0, 0.0


_devices: defaultdict[int, _Device] = defaultdict(_Device)


def write_chunk(file: IO[bytes], chunk: Any) -> None:
    """Write a bytes-like chunk where ``file``, open for binary writing, stands; raises OSError if disk or file are full."""
    view = memoryview(chunk).cast("B")
    if view.nbytes >= LARGE and hasattr(os, "O_DIRECT"):
        view = view[_blocks(file, view) :]
    file.write(view)


def address(view: memoryview) -> int:
    """Return where bytes lie in memory; 0 where there are none."""
    if not view.nbytes:
        return 0
    array: NDArray[np.uint8] = np.frombuffer(view, np.uint8)
    return int(array.__array_interface__["data"][0])


def _blocks(file: IO[bytes], view: memoryview) -> int:
    """Write what can go past the page cache, and what lies before it; return the bytes written."""
    place, start = file.tell(), address(view)
    edge = -start % BLOCK
    if (place + edge) % BLOCK:
        return 0
    descriptor = file.fileno()
    device = _devices[os.fstat(descriptor).st_dev]
    if time.monotonic() < device.again:
        return 0
    file.write(view[:edge])
    file.flush()
    started = time.monotonic()
    blocks = view[edge : view.nbytes - (view.nbytes - edge) % BLOCK]
    written = _past_cache(descriptor, blocks, place + edge)
    device.wrote(written, time.monotonic() - started)
    file.seek(place + edge + written)
    return edge + written


def _past_cache(descriptor: int, blocks: memoryview, place: int) -> int:
    """Return the bytes written: fewer where the system refuses, or an error comes up, which an ordinary write will tell of."""
    written = 0
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            while written < blocks.nbytes and written % BLOCK == 0:
                written += os.pwrite(descriptor, blocks[written : written + AT_ONCE], place + written)
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:
        pass
    return written


Bytes = bytes | bytearray | memoryview


def write_file(path: Path, chunks: Iterable[Any], *, replace: bool = True, sync: bool = True) -> None:
    """Write ``chunks`` (bytes-like, not copied) to ``path`` atomically; after a failure neither it nor its temporary file is
    left. ``replace`` False raises FileExistsError when ``path`` exists, whoever came first; ``sync`` False leaves surviving a
    power cut to the caller. Raises OSError: disk full, no permission, folder gone."""
    if replace:
        stage(path, chunks, sync=sync)
        publish(path)
    else:
        temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        put(temporary, chunks, sync=sync)
        with _removed_on_failure(temporary):
            os.link(temporary, path)  # unlike rename, a link never replaces
            temporary.unlink()
    if sync:
        sync_folder(path.parent)


def stage(path: Path, chunks: Iterable[Any], *, sync: bool = False) -> None:
    """Write a file that gets its name from `publish`; after a failure (OSError: disk full, no permission) nothing is left."""
    put(_staged(path), chunks, sync=sync)


def publish(path: Path) -> None:
    """Give a staged file its name; raises OSError without permission, or if the folder is gone."""
    temporary = _staged(path)
    with _removed_on_failure(temporary):
        temporary.replace(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary file beside ``path`` that is synced and takes its place when the block ends well, and else is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    with _removed_on_failure(temporary):
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)


def _staged(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY)


def put(temporary: Path, chunks: Iterable[Any], *, sync: bool) -> None:
    """Write a file under its temporary name, as all files here are; after a failure nothing of it is left."""
    with _removed_on_failure(temporary), temporary.open("wb") as file:
        for chunk in chunks:
            write_chunk(file, chunk)
        file.flush()
        if sync:
            os.fsync(file.fileno())


@contextmanager
def _removed_on_failure(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, content: dict[str, Any], *, replace: bool = True) -> None:
    """Write a JSON object atomically; what JSON cannot say (paths, dtypes) is written as its text."""
    text = json.dumps(content, indent=1, default=str)
    write_file(path, [text.encode("utf-8", "backslashreplace"), b"\n"], replace=replace)


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Create ``path`` durably; without ``parents``, a capture that was removed meanwhile is not half resurrected."""
    if not path.is_dir():
        path.mkdir(parents=parents, exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut, where the system can (Windows cannot open folders)."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], workers: int = WORKERS) -> list[Result]:
    """Return ``work`` of each item, in order, ``workers`` at a time; its errors are raised once all are done. A single item is
    done without threads, and so are all while the interpreter is ending, when no more threads can start."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), "trueup-disk") as pool:
        started = []
        try:
            for item in items:
                started.append(pool.submit(work, item))
        except RuntimeError:  # cannot schedule new futures after, or start new threads at, interpreter shutdown
            rest = [work(item) for item in items[len(started) :]]
        else:
            rest = []
        return [future.result() for future in started] + rest
