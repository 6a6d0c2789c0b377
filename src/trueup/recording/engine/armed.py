"""An armed process: a session that begins with the framework, or with the process's part in a parallel run, and survives a fork.

A process that multiprocessing started has no rank that can be trusted before it joins the others. Until then nothing is installed
in it but what waits for that, so it pays nothing per call; nor are the parts of Trueup loaded that record.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import say
from trueup.recording.registry import Adapter

if TYPE_CHECKING:
    from trueup.recording.engine.session import BaseSession, Running


class BaseArmed(ABC):
    """The capture of this process, present or future, with encoded `CaptureOptions`, what all processes of the run say in the
    manifest (``root``), and path and text of a policy or None; with encoded `WatchOptions` it is watched instead. Raises
    TrueupError where what is asked for is not there for the framework."""

    adapter: Adapter
    no_group: str  # why there is no capture, where the process joined no others

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
        """Arrange that `joined` is called when this process joins others; ``at_once``: its capture began before."""

    def rejoined(self, session: BaseSession, rank: int | None) -> None:  # noqa: B027 - most have nothing to add
        """Called when a process that is captured already has joined others."""

    def forked(self) -> None:  # noqa: B027
        """Called in a forked child, once its parent's capture is dropped."""

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
        from trueup.recording.recorder.options import in_ranges, unused

        rank = self.rank() or 0
        recorder = session.recorder
        chosen = in_ranges(rank, recorder.options.ranks)
        return session.report() | {
            "process_rank": rank, "selected": recorder.selected, "displaced": recorder.displaced,
            "unused": unused(recorder.options, recorder.seen()) if chosen else {},
        }  # fmt: skip

    def joined(self) -> None:
        """Begin now that the process is one of several; where it has begun, take note of the rank while there is one to ask."""
        if self._session is not None:
            self.rejoined(self._session, self.rank())
            return
        if self._running().session is not None:
            return  # the worker's own code captures it
        try:
            self._start()
        except Exception as error:
            if self._policy is not None:  # a run without its policy would be taken for one with it
                raise
            say(f"process {os.getpid()} is not captured: {error}")

    def _running(self) -> Running[Any]:
        from trueup.recording.engine.session import running_of  # loads what records

        return running_of(self.adapter.name)

    def _start(self) -> None:
        import concurrent.futures.thread  # noqa: F401 - Arrow needs it, and at the end of a short run it cannot be loaded any more

        self._session = session = self._open()
        self._running().session = session
        session.start()
        if self._policy is not None:
            from trueup.recording.policy_file import parse

            self._beside("policies").AppliedPolicy(parse(self._policy[1], self._policy[0]), session.scopes).start()

    def _open(self) -> BaseSession:
        """Make the session, of a capture or of a watch."""
        from trueup.recording.recorder.options import CaptureOptions

        options = CaptureOptions.from_json(self._options)
        if self._watch is None:
            found = self._beside("session").Session(self._directory, options, self._root)
        else:
            found = self._beside("watching").WatchSession.armed(self._directory, options, self._watch, self._root)
        return cast("BaseSession", found)

    def _beside(self, module: str) -> Any:
        """Import a module from the adapter's own folder: those load what records."""
        return import_module(f"{type(self).__module__.rpartition('.')[0]}.{module}")

    def _in_child(self) -> None:
        """Drop the parent's capture; this process has none before it joins others of its own."""
        session, self._session = self._session, None
        if session is None:
            return
        self._running().let_go()
        self.forked()
