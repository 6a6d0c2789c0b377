"""Files that are there whole or not at all: write to ``<name>.tmp``, fsync, rename, fsync the folder.

Large blocks are written past the page cache: the disk takes the bytes from where they lie. Copying them into the cache takes a
core as long as the disk takes to write, and emptying it as long again; without it a write costs the training hardly any CPU time.
Only blocks that lie alike in memory and in the file can go this way (``O_DIRECT``), so `segment` puts them so. The page cache
takes the edges of blocks; everything on a file system that refuses (some networks'); and everything on a slow disk, where it
holds bursts.

Which process writes which rank's folder an exclusive lock file says, and nothing has to coordinate after it. A lock is never taken
over. One from another run, or (where runs have no id) from a process that has ended, means an older capture, which is not
overwritten. One process gives way: the parent that prepared a model before it started its workers has no rank. When rank 0 is a
worker's, the parent's folder is moved aside to ``unranked-<pid>`` and it stops recording.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout
from trueup.foundation.store.layout import TEMPORARY

WORKERS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")

RANK_LIMIT = 100_000
ATTEMPTS = 100  # at a folder that siblings move aside and make anew meanwhile

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


class Displaced(TrueupError):
    """This process has no rank, and the capture is that of processes which have."""


def claim(directory: Path, preferred_rank: int | None, run: str | None = None) -> int:
    """Take a rank's folder for this process: ``preferred_rank``, or the lowest free one if a sibling took that.

    ``directory``, the capture, is made if need be. A process that knows no rank (None) takes the lowest free one, and gives way
    to a sibling that knows. ``run`` is an id that all processes of one run share and no two runs do (``trueup capture`` hands it
    down): it alone tells a process that ended before its siblings started from an older capture. Raises Displaced if this process
    has no rank and a sibling has, TrueupError if the directory holds an older capture, OSError if it cannot be written.
    """
    make_folder(directory, parents=True)
    check_run(directory, run)
    if (directory / layout.MANIFEST).exists():
        folders = [entry for entry in directory.iterdir() if layout.number(layout.RANK, entry.name) is not None]
        if folders and all(_foreign(folder, run) for folder in folders):
            raise _holds_capture(directory)
        if preferred_rank is None and any(_ranked(holder(folder)) for folder in folders):
            raise Displaced("it has no rank, and the processes that have one are captured")
    first = preferred_rank or 0
    for rank in chain([first], (rank for rank in range(RANK_LIMIT) if rank != first)):
        folder = directory / layout.rank_name(rank)
        for _ in range(ATTEMPTS):
            if _lock_folder(folder, preferred_rank, run):
                return rank
            if _foreign(folder, run):
                raise _holds_capture(directory)
            lock = holder(folder)
            if lock and (rank != preferred_rank or _ranked(lock)):
                break
            if lock:  # else a sibling has just moved it aside
                with suppress(OSError):  # out of the way, and kept
                    folder.rename(folder.with_name(f"{layout.UNRANKED}{holder(folder).get('pid')}"))
    raise TrueupError(f"{directory} has no free rank below {RANK_LIMIT}: choose another -o")


def _lock_folder(folder: Path, preferred_rank: int | None, run: str | None) -> bool:
    make_folder(folder)
    try:
        write_json(folder / layout.LOCK, _lock(preferred_rank, run), replace=False)
    except FileExistsError:
        return False
    except FileNotFoundError:  # a sibling has moved the folder aside
        if folder.parent.exists():
            return False
        raise
    return True


def _ranked(lock: dict[str, Any]) -> bool:
    """Say whether the process that wrote a lock knew its rank."""
    return type(lock.get("preferred_rank")) is int


def holder(folder: Path) -> dict[str, Any]:
    """Return a rank folder's lock (pid, host, run, preferred_rank); empty if there is none or it cannot be read."""
    try:
        return layout.read_object(folder.parent, folder / layout.LOCK)
    except (OSError, TrueupError):
        return {}


def take(directory: Path, rank: int, run: str | None) -> dict[str, Any]:
    """Make sure that this process holds ``rank`` and return the lock; raises TrueupError if another process holds it."""
    folder = directory / layout.rank_name(rank)
    make_folder(folder, parents=True)
    try:
        write_json(folder / layout.LOCK, _lock(rank, run), replace=False)
    except FileExistsError:
        pass  # claimed by ``claim``, or by somebody else
    lock = holder(folder)
    mine = lock.get("pid") == os.getpid() and lock.get("host") == socket.gethostname()
    if not mine or (folder / layout.MANIFEST).exists():
        raise _holds_capture(directory)
    return lock


def _lock(preferred_rank: int | None, run: str | None) -> dict[str, Any]:
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    host = socket.gethostname()
    return {"pid": os.getpid(), "host": host, "run": run, "preferred_rank": preferred_rank, "created": created}


def check_run(directory: Path, run: str | None) -> None:
    """Refuse a directory whose manifest another run left; raises TrueupError if it did, or the manifest is none of a capture."""
    try:
        content = layout.read_root(directory) if (directory / layout.MANIFEST).exists() else {}
    except TrueupError as error:
        raise TrueupError(f"nothing is recorded into {directory}: {error}; or choose another -o") from None
    theirs = content.get("run")
    if run is not None and theirs is not None and theirs != run:
        raise _holds_capture(directory)


def _foreign(folder: Path, run: str | None) -> bool:
    """Say whether ``folder`` belongs to another run; not one that a sibling is making, or has just moved aside."""
    for _ in range(3):  # it may be made, or moved aside, between two looks
        if _sibling(folder, run) or not ((folder / layout.LOCK).exists() or (folder / layout.MANIFEST).exists()):
            return False
    return True


def _sibling(folder: Path, run: str | None) -> bool:
    """Say whether the process that holds ``folder`` belongs to this run."""
    lock = holder(folder)
    if lock.get("pid") == os.getpid() and lock.get("host") == socket.gethostname():
        return False  # this process's own earlier capture
    if run is not None and lock.get("run") is not None:
        return bool(lock["run"] == run)
    if lock.get("host") != socket.gethostname():
        return False
    return alive(lock.get("pid"))


def alive(pid: Any) -> bool:
    """Tell whether a process of this number lives on this host."""
    if type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _holds_capture(directory: Path) -> TrueupError:
    return TrueupError(f"{directory} already holds a capture: nothing was recorded; choose another -o or remove it")
