"""Making files survive a power cut without holding anybody up: a thread that syncs them after they were written.

A killed process loses nothing that was written, synced or not. What is behind is at stake only when the machine itself goes
down; `wait` tells when nothing is.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path

from trueup.foundation.store import durable

PATIENCE = 300.0
"""Seconds in which the disk has to finish a file before it is given up."""


class Syncer:
    """Syncs files and their folders in the order in which they were written."""

    def __init__(self) -> None:
        self._waiting: deque[Path] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def add(self, path: Path) -> None:
        """Sync a file soon.

        Raises:
            OSError: the disk failed to keep an earlier one.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            self._waiting.append(path)
            if self._thread is None:
                try:
                    self._start()
                except RuntimeError:  # the interpreter is ending
                    self._waiting.clear()
                    _sync(path)

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
            OSError: it failed, or took nothing for `PATIENCE` seconds.
        """
        with self._changed:
            while self._thread is not None:
                left = len(self._waiting)
                if not self._changed.wait(PATIENCE) and len(self._waiting) == left:
                    raise OSError(f"the disk took nothing for {PATIENCE:.0f} seconds")
            if self._error is not None:
                raise self._error

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="trueup-sync", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._error is not None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                path = self._waiting[0]
            error = _sync(path)
            with self._changed:
                self._error = error
                self._waiting.popleft()
                self._changed.notify_all()


def _sync(path: Path) -> OSError | None:
    """Sync a file and the folder that names it; a file that is gone was removed with its capture, which is noticed elsewhere."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        os.fsync(descriptor)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
    durable.sync_folder(path.parent)
    return None
