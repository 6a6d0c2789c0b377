"""Between the training and the disk: a bounded queue of what was recorded, and the thread that writes it.

The thread takes portions from the backlog each second, or as soon as there is one, until it is closed. The training adds portions
and is held back while the queue is full: nothing is dropped, and memory stays bounded. A disk that takes nothing at all for a long
time is as good as a full one; who waits for it learns so and ends the capture.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
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
"""Seconds of waiting after which a line says what the training waits for."""

T = TypeVar("T")


class Stalled(TrueupError):
    """The disk took nothing for `PATIENCE` seconds."""


class Backlog(Generic[T]):
    """Portions in order, with their sizes in bytes; a portion counts until it is done, not until it is taken. Time is measured by
    the monotonic clock: a jump of the wall clock neither ends a wait nor prolongs it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of an RLock: a signal handler may come in while this thread holds it
        self._portions: deque[tuple[T, int]] = deque()
        self._held = 0
        self._taken = 0
        self._moved = time.monotonic()
        self.waited = 0.0  # seconds for which the training was held back
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

    def over(self) -> None:
        """Let go on who waits: nothing more is taken."""
        with self._changed:
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget everything: the capture has ended, nobody is to wait."""
        with self._changed:
            self._portions.clear()
            self._held = self._taken
            self._changed.notify_all()

    def wait(self, needed: Callable[[], bool], tell: Callable[[], None]) -> None:
        """Hold this thread back while ``needed()``, and ``tell()`` once if long; raise `Stalled` after `PATIENCE` seconds without
        a write."""
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


FLUSH_SECONDS = 1.0


class Flusher(Generic[T]):
    """Writes portions in order, on a thread that starts with the first and calls ``prepare`` first of all. ``gather`` puts what
    was recorded since the last portion into the backlog, ``write`` brings one to the disk (what it raises ends the capture),
    ``settle`` what ``write`` left for later, if it is time or its argument is true. ``fail`` is called with what ended it, after
    which portions are forgotten and nobody waits; ``tell`` when the training has waited for long."""

    def __init__(
        self, prepare: Callable[[], None], gather: Callable[[], None], write: Callable[[T], None], settle: Callable[[bool], None],
        fail: Callable[[BaseException], None], tell: Callable[[], None],
    ) -> None:  # fmt: skip
        self.backlog: Backlog[T] = Backlog()
        self._prepare, self._gather, self._write, self._settle, self._fail, self._tell = prepare, gather, write, settle, fail, tell
        self._failed = self._closed = False
        self._ended = False  # whether the thread has nothing more to do
        self._wake = threading.Event()
        self._starting, self._writing = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="trueup-writer", daemon=True)
                    thread.start()
                    self._thread = thread

    def hold(self) -> None:
        """Wake the writer, and hold this thread back while the backlog is full."""
        self._wake.set()
        if self.backlog.full and threading.current_thread() is not self._thread:
            self._wait(self._no_room_yet)

    def flush(self) -> None:
        """Write what there is, on this thread."""
        self._attempt(self._prepare)
        self._flush(at_once=True)

    def close(self) -> bool:
        """Write what is left, however slow the disk; return False if it hangs: it was given up."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            self._wake.set()
            self._wait(lambda: thread.is_alive() and not self._ended)
            if thread.is_alive() and not self._ended:
                return False
            thread.join()
        self._flush()
        return True

    def forget(self) -> None:
        """End without writing anything more."""
        self._closed = self._failed = True
        self.backlog.clear()

    def forked(self) -> None:
        """Forget everything in a forked child, which has no such thread. A lock that another thread of the parent held stays
        locked in the child, where nobody will release it."""
        self._starting, self._writing, self._thread = threading.Lock(), threading.Lock(), None
        self.backlog = Backlog()
        self.forget()

    def ended(self, error: BaseException) -> None:
        """End the capture because of ``error``."""
        self._failed = True
        self._fail(error)
        self.backlog.clear()

    def _no_room_yet(self) -> bool:
        """Whether there is no room, and somebody who makes some."""
        return self.backlog.full and not self._failed and self._thread is not None and self._thread.is_alive()

    def _wait(self, needed: Callable[[], bool]) -> None:
        try:
            self.backlog.wait(needed, self._tell)
        except Stalled as error:
            self.ended(error)

    def _run(self) -> None:
        try:
            self._prepare()
            while not self._closed:
                self._wake.wait(FLUSH_SECONDS)
                self._wake.clear()
                self._flush()
        except BaseException as error:  # noqa: BLE001 - nobody else would hear that this thread ends
            self.ended(error)
        finally:
            self._ended = True
            self.backlog.over()

    def _flush(self, *, at_once: bool = False) -> None:
        with self._writing:
            self._gather()
            while (portion := self.backlog.take()) is not None:
                try:
                    self._attempt(partial(self._write, portion))
                finally:
                    self.backlog.done()
            self._attempt(partial(self._settle, at_once))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            if not self._failed:
                action()
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self.ended(error)
