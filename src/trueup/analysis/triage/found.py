"""What a triage gives: an outcome a step, and the runs that they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trueup.analysis.recipes.found import Status
from trueup.foundation.model import Result

Word = Literal["explained", "nothing found", "could not tell"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the command."""

    name: str
    """``as it is``, ``without oneDNN`` ..."""
    off: tuple[str, ...]
    """Names of the switches that were off."""
    directory: Path
    losses: dict[int, float] = field(default_factory=dict)
    """By step; mean over ranks and micro-batches."""
    seconds: float = 0.0
    failed: str = ""
    """Why it did not end well, in words; empty where it did."""
    remarks: tuple[str, ...] = ()
    """Switches that could not be switched off, and why; what was seen of those that were."""
    framework: str | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step of the triage."""

    name: str
    status: Status
    said: str
    """One sentence."""
    remarks: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    """What to do next: lines to type, or to write into the script."""
    guilty: tuple[str, ...] = ()
    """Names of the switches that explain the difference."""
    result: Result | None = None
    """The comparison behind it: of the run as it is against the one without optimisations, or against the baseline."""
    page: str | None = None
    """Folder, beside the report, of the step's own report."""


@dataclass(frozen=True)
class Triage:
    """What `triage` returns."""

    command: tuple[str, ...]
    directory: Path
    outcomes: Sequence[Outcome]
    trials: Sequence[Trial]
    baseline: str | None = None
    framework: str | None = None

    @property
    def explaining(self) -> Outcome | None:
        """The first step that explains the difference."""
        return next((one for one in self.outcomes if one.status == "DEVIATES"), None)

    @property
    def verdict(self) -> Word:
        """``explained`` if a step explains it, ``could not tell`` if one that was made could not, else ``nothing found``."""
        if self.explaining is not None:
            return "explained"
        return "could not tell" if any(one.status == "could not tell" for one in self.outcomes) else "nothing found"

    @property
    def exit_code(self) -> int:
        """0 nothing found, 1 explained, 2 could not tell."""
        return {"nothing found": 0, "explained": 1, "could not tell": 2}[self.verdict]

    @property
    def sentence(self) -> str:
        """The conclusion."""
        first = self.explaining
        if first is not None:
            return f"EXPLAINED by {first.name}: {first.said}"
        if self.verdict == "could not tell":
            unknown = next(one for one in self.outcomes if one.status == "could not tell")
            return f"COULD NOT TELL, because {unknown.said}"
        made = ", ".join(one.name for one in self.outcomes if one.status == "pass")
        more = "" if self.baseline else "; without a baseline the network was not compared with anything"
        return f"NOTHING FOUND by {made}{more}"
