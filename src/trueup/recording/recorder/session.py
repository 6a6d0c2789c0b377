"""What the sessions of all adapters have in common: who this process is, what it recorded, and why nothing."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from trueup.foundation.model import LEVELS, TrueupError
from trueup.foundation.store import claim
from trueup.recording.adapters import Adapter
from trueup.recording.recorder.failure import Failure
from trueup.recording.recorder.options import CaptureOptions, in_ranges
from trueup.recording.recorder.recorder import Recorder
from trueup.recording.recorder.seen import sentence, unused

Identity = tuple[int, dict[str, Any], dict[str, Any]]


class BaseSession(ABC):
    """A running capture; each adapter's own adds what sees the calls. One at a time in a process."""

    recorder_type: type[Recorder] = Recorder
    nothing_ran: str
    """Why there is nothing, where no call was seen at all."""

    options: CaptureOptions
    recorder: Recorder
    failure: Failure
    active: bool = False
    """Whether what executes now is recorded."""
    over: bool = False
    """Whether the capture has ended."""
    rank: int | None = None
    """Number of this process's folder, once it is claimed."""
    _root: dict[str, Any]

    # ------------------------------------------------------------------------------------------------ what an adapter adds
    @abstractmethod
    def start(self) -> None:
        """Begin to see calls on this thread."""

    @abstractmethod
    def finish(self) -> None:
        """Write what is left (at the end of an armed process)."""

    @abstractmethod
    def take_off(self) -> None:
        """Leave nothing of ours in the framework."""

    @abstractmethod
    def step(self) -> None:
        """End the present step; from now on only this ends steps."""

    @abstractmethod
    def rank_and_world(self) -> tuple[int | None, int]:
        """Return this process's rank (None when nothing says so) and the world size."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe this process for its rank's manifest."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether an optimizer has stepped in a step that did not end yet."""

    # ---------------------------------------------------------------------------------------------------- what all share
    def stop(self) -> None:
        """Stop to see calls and finish the capture."""
        self.active = False
        self.take_off()
        self.finish()

    def abandon(self) -> None:
        """Let go of the capture, in a forked child: the parent owns it."""
        self.active, self.over = False, True
        self.recorder.forked()

    def failed(self, error: Exception, what: str) -> bool:
        """Take an exception of our own; see `Failure.take`."""
        self.active = False
        return self.failure.take(error, what)

    def report(self) -> dict[str, Any]:
        """Say what this process recorded, or why nothing."""
        recorder = self.recorder
        return {
            "rank": self.rank, "calls": recorder.calls, "steps": recorder.step + self.pending,
            "failure": recorder.failure or self.failure.text, "why": None if recorder.calls else self.why_nothing(),
        }  # fmt: skip

    def why_nothing(self) -> str:
        """Explain an empty capture."""
        if not in_ranges(self.rank_and_world()[0] or 0, self.options.ranks):
            return "this rank is not among the ranks selected"
        if said := self.unused():
            return "; ".join(said)
        if not self.recorder.seen().calls:
            return self.nothing_ran
        return "no call matched the level, phase, include and exclude options together"

    def unused(self) -> list[str]:
        """Describe the options that selected nothing, each with what was there to select."""
        return [sentence(*item) for item in unused(self.options, self.recorder.seen()).items()]

    def claim(self) -> int:
        """Take this process's rank folder, once."""
        if self.rank is None:
            rank, _ = self.rank_and_world()
            self.rank = claim(self.recorder.directory, rank, self._root.get("run"))
        return self.rank

    def identify(self) -> Identity:
        """Return the rank's number, and what the manifests of the capture and of the rank say."""
        rank, _ = self.rank_and_world()
        number = self.claim()
        if rank is None and number:
            self.recorder.note(f"no rank was set; this process (pid {os.getpid()}) is rank {number} by order of arrival")
        return number, self._root, self.describe() | {"rank": number}


def check(options: CaptureOptions, adapter: Adapter) -> None:
    """Refuse options that mean nothing for a framework.

    Raises:
        TrueupError: one is given.
    """
    asked = {
        f"level {'aten' if 'aten' in options.levels else options.levels[0]}": not set(options.levels) & set(adapter.levels),
        "compile=through": options.compile == "through" and "compile" in adapter.lacks,
        "shadow": options.shadow is not None and "shadow" in adapter.lacks,
        "inputs_from": options.inputs_from is not None and "inputs_from" in adapter.lacks,
    }
    for name, given in asked.items():
        if given:
            levels = ", ".join(name for name in LEVELS if name in adapter.levels)
            raise TrueupError(
                f"{name} is not there for {adapter.title}\n"
                f"  expected: level {levels} or all; detail digest, stats or tensor\n"
                f"  got:      {name}\n"
                f"  next:     leave it out ({adapter.page} says what there is)"
            )
