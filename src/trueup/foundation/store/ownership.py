"""Which process writes which rank's folder: an exclusive lock file, and nothing to coordinate after it.

A lock is never taken over. One from another run, or (where runs have no id) from a process that has ended, means an older
capture, which is not overwritten. One process gives way: the parent that prepared a model before it started its workers has no
rank. When rank 0 is a worker's, the parent's folder is moved aside to ``unranked-<pid>`` and it stops recording.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.foundation.store import durable, layout

RANK_LIMIT = 100_000
ATTEMPTS = 100  # at a folder that siblings move aside and make anew meanwhile


class Displaced(TrueupError):
    """This process has no rank, and the capture is that of processes which have."""


def claim(directory: Path, preferred_rank: int | None, run: str | None = None) -> int:
    """Take a rank's folder for this process: ``preferred_rank``, or the lowest free one if a sibling took that.

    ``directory``, the capture, is made if need be. A process that knows no rank (None) takes the lowest free one, and gives way
    to a sibling that knows. ``run`` is an id that all processes of one run share and no two runs do (``trueup capture`` hands it
    down): it alone tells a process that ended before its siblings started from an older capture. Raises Displaced if this process
    has no rank and a sibling has, TrueupError if the directory holds an older capture, OSError if it cannot be written.
    """
    durable.make_folder(directory, parents=True)
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
    durable.make_folder(folder)
    try:
        durable.write_json(folder / layout.LOCK, _lock(preferred_rank, run), replace=False)
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
    durable.make_folder(folder, parents=True)
    try:
        durable.write_json(folder / layout.LOCK, _lock(rank, run), replace=False)
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
