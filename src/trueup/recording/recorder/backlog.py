"""What was recorded and is not on disk yet: a bounded queue between the training and the writer's thread.

The training adds portions and is held back while the queue is full: nothing is dropped, and memory stays bounded. A disk that
takes nothing at all for a long time is as good as a full one; who waits for it learns so and ends the capture.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from trueup.foundation.model import TrueupError

PORTION_BYTES = 24 << 20
"""What makes a portion: as much payload as a disk likes to take in one write, or rows for a part."""
HELD_BYTES = 4 * PORTION_BYTES
"""Beyond this the training waits. With the portion that is being gathered, the one that is being written and the libraries of a
capture, 256 MB."""
PATIENCE = 300.0
"""Seconds without a single portion written after which the disk is given up."""
LOUD_AFTER = 10.0
"""Seconds of waiting after which the user is told what the training waits for."""

T = TypeVar("T")


class Stalled(TrueupError):
    """The disk took nothing for `PATIENCE` seconds."""


class Backlog(Generic[T]):
    """Portions in order, with their sizes in bytes; a portion counts until it is done, not until it is taken.

    Time is measured by the monotonic clock: a jump of the wall clock neither ends a wait nor prolongs it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of an RLock: a signal handler may come in while this thread holds it
        self._portions: deque[tuple[T, int]] = deque()
        self._held = 0
        self._taken = 0
        self._moved = time.monotonic()
        self.waited = 0.0
        """Seconds for which the training was held back."""
        self._told = False

    @property
    def full(self) -> bool:
        """Whether whoever adds should wait."""
        return self._held > HELD_BYTES

    @property
    def held(self) -> int:
        """Bytes that wait, or are being written."""
        return self._held

    def put(self, portion: T, size: int) -> None:
        """Add a portion of ``size`` bytes, however full it is."""
        with self._changed:
            if not self._held:
                self._moved = time.monotonic()  # there was nothing to write, so nothing has stalled
            self._portions.append((portion, size))
            self._held += size

    def take(self) -> T | None:
        """Return the oldest portion, or None; `done` says that it is written. Only one thread at a time takes."""
        with self._changed:
            if not self._portions:
                return None
            portion, self._taken = self._portions.popleft()
            return portion

    def done(self) -> None:
        """Count the portion that was taken as written, and let go on who waits for room."""
        with self._changed:
            self._held -= self._taken
            self._taken = 0
            self._moved = time.monotonic()
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget everything: the capture has ended, nobody is to wait."""
        with self._changed:
            self._portions.clear()
            self._held = self._taken
            self._changed.notify_all()

    def wait(self, needed: Callable[[], bool], tell: Callable[[], None]) -> None:
        """Hold this thread back while ``needed()``; ``tell`` is called the first time that this takes long.

        Raises:
            Stalled: nothing was written for `PATIENCE` seconds.
        """
        started = time.monotonic()
        try:
            with self._changed:
                while needed():
                    self._changed.wait(0.25)  # in case that what is to write has ended without a word
                    now = time.monotonic()
                    if now - max(started, self._moved) > PATIENCE:
                        raise Stalled(f"the disk took nothing for {PATIENCE:.0f} seconds")
                    if now - started > LOUD_AFTER and not self._told:
                        self._told = True
                        tell()
        finally:
            self.waited += time.monotonic() - started
