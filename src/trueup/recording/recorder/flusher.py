"""The thread that writes: it takes portions from the backlog each second, or as soon as there is one, until it is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from trueup.recording.recorder.backlog import Backlog, Stalled

FLUSH_SECONDS = 1.0

T = TypeVar("T")


class Flusher(Generic[T]):
    """Writes portions in order, on a thread that starts with the first.

    Args:
        prepare: called first of all on that thread.
        gather: puts what was recorded since the last portion into the backlog.
        write: brings a portion to the disk; what it raises ends the capture.
        settle: called when all portions were written, and at the end: brings to the disk what `write` left for later, if it is
            time or if it is told True.
        fail: called with what ended it. After that portions are forgotten, and nobody waits.
        tell: called when the training has waited for long.
    """

    def __init__(
        self, prepare: Callable[[], None], gather: Callable[[], None], write: Callable[[T], None], settle: Callable[[bool], None],
        fail: Callable[[BaseException], None], tell: Callable[[], None],
    ) -> None:  # fmt: skip
        self.backlog: Backlog[T] = Backlog()
        self._prepare, self._gather, self._write, self._settle, self._fail, self._tell = prepare, gather, write, settle, fail, tell
        self._failed = self._closed = False
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
        """Have what is in the backlog written, and hold this thread back while it is full."""
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
            self._wait(thread.is_alive)
            if thread.is_alive():
                return False
        self._flush()
        return True

    def forget(self) -> None:
        """End without writing anything more."""
        self._closed = self._failed = True
        self.backlog.clear()

    def forked(self) -> None:
        """Forget everything in a forked child, which has no such thread.

        A lock that another thread of the parent held stays locked in the child, where nobody will release it.
        """
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
