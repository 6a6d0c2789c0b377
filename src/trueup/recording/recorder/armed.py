"""An armed process: a session that begins with the framework, or with the process's part in a parallel run, and survives a fork.

A process that multiprocessing started has no rank that can be trusted before it joins the others. Until then nothing is installed
in it but what waits for that, so it pays nothing per call; nor are the parts of Trueup loaded that record.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.foundation.model import TrueupError
from trueup.recording.adapters import Adapter

if TYPE_CHECKING:
    from trueup.recording.recorder.options import CaptureOptions
    from trueup.recording.recorder.running import Running
    from trueup.recording.recorder.session import BaseSession


class BaseArmed(ABC):
    """The capture of this process, present or future.

    Args:
        directory: the capture.
        options: what to keep, an encoded `CaptureOptions`.
        root: what all processes of the run say in the capture's manifest.
        policy: path and text of the policy to apply, or None.
        watch: encoded `WatchOptions`, where the process is watched instead.

    Raises:
        TrueupError: what is asked for is not there for the framework.
    """

    adapter: Adapter
    no_group: str
    """Why there is no capture, where the process joined no others."""

    def __init__(
        self, directory: Path, options: str, root: dict[str, Any], policy: Sequence[str] | None = None, watch: str | None = None
    ) -> None:
        for name, asked in (("policy", policy), ("watch", watch)):
            if asked is not None and name in self.adapter.lacks:
                what = "a policy" if name == "policy" else name
                raise TrueupError(f"{what} is not there for {self.adapter.title} yet ({self.adapter.page} says what there is)")
        self._directory, self._options, self._root, self._policy, self._watch = directory, options, root, policy, watch
        self._session: BaseSession | None = None

    # ------------------------------------------------------------------------------------------------ what an adapter adds
    @abstractmethod
    def rank(self) -> int | None:
        """Return this process's rank; None when nothing says so."""

    @abstractmethod
    def await_others(self, *, at_once: bool) -> None:
        """Have `joined` called when this process joins others; ``at_once``: it is captured before."""

    @abstractmethod
    def open(self, options: CaptureOptions) -> BaseSession:
        """Make the session."""

    def started(self, session: BaseSession) -> None:  # noqa: B027 - most have nothing to add
        """Do what comes after the session began."""

    def rejoined(self, session: BaseSession, rank: int | None) -> None:  # noqa: B027
        """Hear that a process which is captured already has joined others."""

    def forked(self) -> None:  # noqa: B027
        """Hear that this process is a forked child and its parent's capture is let go."""

    # ---------------------------------------------------------------------------------------------------- what all share
    def begin(self, *, at_once: bool) -> None:
        """Capture from now on, or from the moment this process joins others."""
        self.await_others(at_once=at_once)
        os.register_at_fork(after_in_child=self._in_child)
        if at_once:
            self._start()

    def finish(self, ending: str | None) -> None:
        """Write what is left; ``ending`` is a note on how the process ended."""
        if self._session is not None:
            if ending is not None:
                self._session.recorder.cut_off(ending)
            self._session.finish()

    def report(self) -> dict[str, Any]:
        """Say what was recorded, or why nothing."""
        session = self._session
        if session is None:
            return {"process_rank": None, "why": self.no_group}
        from trueup.recording.recorder.options import in_ranges
        from trueup.recording.recorder.seen import unused

        rank = self.rank() or 0
        recorder = session.recorder
        chosen = in_ranges(rank, recorder.options.ranks)
        return session.report() | {
            "process_rank": rank,
            "selected": recorder.selected,
            "displaced": recorder.displaced,
            "unused": unused(recorder.options, recorder.seen()) if chosen else {},
        }

    def joined(self) -> None:
        """Begin now that the process is one of several; where it has begun, take note of the rank while there is one to ask."""
        if self._session is not None:
            self.rejoined(self._session, self.rank())
            return
        module = sys.modules.get(self._capturing)
        if module is not None and module.running.session is not None:
            return  # the worker's own code captures it
        try:
            self._start()
        except Exception as error:
            if self._policy is not None:  # a run without its policy would be taken for one with it
                raise
            print(f"trueup: process {os.getpid()} is not captured: {error}", file=sys.stderr, flush=True)

    @property
    def _capturing(self) -> str:
        return f"trueup.recording.adapters.{self.adapter.name}.capturing"

    def _start(self) -> None:
        import concurrent.futures.thread  # noqa: F401 - Arrow needs it, and at the end of a short run it cannot be loaded any more

        from trueup.recording.recorder.options import CaptureOptions

        self._session = session = self.open(CaptureOptions.from_json(self._options))
        running: Running[Any] = import_module(self._capturing).running
        running.session = session
        session.start()
        self.started(session)

    def _in_child(self) -> None:
        """Let go of the parent's capture; this process has none before it joins others of its own."""
        session, self._session = self._session, None
        if session is None:
            return
        import_module(self._capturing).running.let_go()
        self.forked()
