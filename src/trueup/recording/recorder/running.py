"""The capture that runs in this process, and the ``with`` block around one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from trueup.foundation.model import TrueupError
from trueup.foundation.version import VERSION
from trueup.recording.recorder.options import CaptureOptions, in_ranges
from trueup.recording.recorder.session import BaseSession

S = TypeVar("S", bound=BaseSession)


class Running(Generic[S]):
    """Holds the capture of one framework that runs in this process, in a ``with`` block or because the process is armed.

    A forked child lets go of it: the parent owns it, and its writer thread did not come along.
    """

    def __init__(self) -> None:
        self.session: S | None = None
        os.register_at_fork(after_in_child=self.let_go)

    def step(self) -> None:
        """End the present step, if a capture runs."""
        if self.session is not None:
            self.session.step()

    def let_go(self) -> None:
        """Forget the capture and leave nothing of it in the framework."""
        session, self.session = self.session, None
        if session is not None:
            session.abandon()
            session.take_off()

    def refuse_second(self, also: str = "`trueup capture`") -> None:
        """Refuse to begin a capture while one runs.

        Raises:
            TrueupError: one does.
        """
        if self.session is not None:
            raise TrueupError(
                f"a capture into {self.session.recorder.directory} is already running in this process; "
                f"end it first (or run the script without {also})"
            )


class Capture(Generic[S]):
    """A running capture: `step()` ends a step, leaving the ``with`` block ends the capture.

    Without `step()` a step ends with the first forward after its optimizers have stepped; once it was called, only it ends steps.
    """

    def __init__(self, session: S, running: Running[S]) -> None:
        self._session, self._running = session, running

    @property
    def path(self) -> Path:
        """The capture directory."""
        return self._session.recorder.directory

    def step(self) -> None:
        """End the present step; from now on nothing else does."""
        self._session.step()

    def __enter__(self) -> Capture[S]:
        self._running.refuse_second()
        if in_ranges(self._session.rank_and_world()[0] or 0, self._session.options.ranks):
            try:
                self._session.claim()
            except OSError as error:
                said = error.strerror or error
                raise TrueupError(f"cannot write the capture {self.path}: {said}; choose another directory") from None
        self._session.start()
        self._running.session = self._session
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._running.session is not self._session:  # a forked child leaves the block too
            return
        self._running.session = None
        if error is not None:
            rank, world = self._session.rank_and_world()
            who = f"rank {rank}: " if world > 1 else ""
            said = f"{who}the capture ended with {type(error).__name__}: {str(error)[:200]}"
            recorder = self._session.recorder
            if isinstance(error, SystemExit) and not error.code:  # the program, or --stop, ended it as it meant to
                recorder.note(said)
            else:
                recorder.cut_off(said)
        self._session.stop()
        if error is None:
            self._session.recorder.stop_if_asked()
        report = self._session.report()
        if error is not None or report["failure"] is not None:
            return
        if not report["calls"]:
            print(f"trueup: nothing was captured into {self.path}: {report['why']}", file=sys.stderr)
            return
        for said in self._session.unused():
            print(f"trueup: note: {said}", file=sys.stderr)


def root_manifest(options: CaptureOptions, detail: str | None = None) -> dict[str, Any]:
    """Return what the manifest of a capture says that a ``with`` block makes."""
    return {
        "trueup_version": VERSION, "command": sys.argv[:64], "levels": list(options.levels),
        "detail": options.detail if detail is None else detail, "config": json.loads(options.to_json()),
    }  # fmt: skip


def roots(model: Any, kind: type[Any]) -> Iterable[Any]:
    """Return the modules that were named: none, one, or several."""
    return [] if model is None else [model] if isinstance(model, kind) else model
