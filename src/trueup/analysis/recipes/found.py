"""What following a recipe gives: an outcome a step, and the comparison behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trueup.foundation.model import Result, VerdictWord

Status = Literal["pass", "DEVIATES", "could not tell", "not asked", "not reached"]

RungStatus = Literal["pass", "DEVIATES", "could not tell"]

COUNTED: tuple[Status, ...] = ("pass", "DEVIATES", "could not tell")
"""Statuses of steps that were made; a metric that was not given is no step of this run."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A module on the way down to the call that is to blame; its siblings that were executed before it stand above it."""

    depth: int
    name: str
    status: RungStatus
    said: str
    """The figures of its worst tensor."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step of the recipe."""

    name: str
    check: str
    status: Status
    said: str
    """One sentence: what was looked at and found; of a step that could not be made, why."""
    limit: str
    """The numbers of the recipe, in words."""
    origin: str
    """Where they come from."""
    remarks: tuple[str, ...] = ()
    rungs: tuple[Rung, ...] = ()
    """The way from the top to the call that is to blame."""
    scope: str | None = None
    """The module of the call that is to blame; empty for one outside all modules, None where no call is."""


@dataclass(frozen=True)
class RecipeResult:
    """What `follow` returns."""

    recipe: str
    outcomes: Sequence[Outcome]
    result: Result
    """The comparison: the report shows it."""
    step: int = 0
    """The first step that both runs hold, of which forward and backward were looked at."""
    has_operators: bool = True
    """Whether both runs hold operators beside modules, so that the way down does not end at a module."""
    advice: tuple[str, tuple[str, ...]] | None = None
    """What to do next, and the commands for it."""

    @property
    def verdict(self) -> VerdictWord:
        """``deviates`` if a step or the comparison does, ``aligned`` if both say so of all that was asked, else ``inconclusive``.

        The numbers of a recipe are wide, and its steps look at the first step's tensors and at losses: the comparison at the rest.
        """
        made = [outcome.status for outcome in self.outcomes if outcome.status in COUNTED]
        if "DEVIATES" in made or self.result.verdict == "deviates":
            return "deviates"
        passes = bool(made) and set(made) == {"pass"} and self.result.verdict == "aligned"
        return "aligned" if passes else "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 aligned, 1 deviates, 2 could not tell."""
        return {"aligned": 0, "deviates": 1, "inconclusive": 2}[self.verdict]

    @property
    def deviating(self) -> Outcome | None:
        """The first step that deviates."""
        return next((outcome for outcome in self.outcomes if outcome.status == "DEVIATES"), None)
