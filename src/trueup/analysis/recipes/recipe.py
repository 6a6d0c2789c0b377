"""A recipe: the steps of an alignment in order, each with its numbers and their origin (a TOML table); and the result of following
it: an outcome for each step, and the comparison behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec import field

from trueup.foundation import toml
from trueup.foundation.facts.criteria import Limit
from trueup.foundation.facts.criteria import parse as parse_limit
from trueup.foundation.model import Result, Status, TrueupError, VerdictWord

RECIPES = ("paddle",)  # recipes that come along

Check = Literal["environment", "inputs", "forward", "backward", "losses", "metric"]
# Optional keys of a check's step, besides name, check and origin
KEYS: dict[Check, tuple[str, ...]] = {
    "environment": ("must", "may_differ"), "inputs": (), "forward": ("fail", "loss"), "backward": ("fail", "loss"),
    "losses": ("limit",), "metric": ("limit",),
}  # fmt: skip

SEE = "see docs/align.md"


class Step(toml.Table):
    """A ``[[step]]`` table."""

    name: str
    check: Check
    origin: str
    fail: tuple[dict[str, Any], ...] = ()
    loss: toml.Positive | None = None  # most that the losses of the first step may be apart, relative
    limit: toml.Positive = math.inf
    must: dict[str, tuple[str, ...]] = field(default_factory=dict)
    may_differ: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = KEYS[self.check]
        for key in ("fail", "loss", "limit", "must", "may_differ"):
            if key not in keys and getattr(self, key) not in ((), {}, None, math.inf):
                raise ValueError(f"{key!r} is unknown: expected {', '.join(('name', 'check', 'origin', *keys))}")
        if "limit" in keys and math.isinf(self.limit):
            raise ValueError("limit is missing")
        if "fail" in keys and not self.limits:
            raise ValueError("it has no [[step.fail]] table, so nothing could fail")

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What fails the step."""
        return tuple(parse_limit(table, f"fail {n}: ") for n, table in enumerate(self.fail, 1))

    @property
    def numbers(self) -> str:
        """Say the step's numbers in words."""
        if self.check in ("losses", "metric"):
            return f"at most {self.limit:.3g}"
        tables = [" and ".join(f"{name} {side} {number:g}" for name, side, number in limit.conditions) for limit in self.limits]
        loss = [] if self.loss is None else [f"losses more than {self.loss:.3g} apart"]
        return "; or ".join([*tables, *loss])


@dataclass(frozen=True, slots=True)
class Recipe:
    """Steps in the order in which they are made."""

    name: str
    steps: tuple[Step, ...]


def load(recipe: str | Path) -> Recipe:
    """Load a recipe by name or from a file of the same form; raises TrueupError if there is none or it is malformed."""
    if str(recipe) in RECIPES:
        return _parse(toml.packaged(__package__, f"{recipe}.toml"), str(recipe))
    path = Path(recipe)
    if not path.is_file():
        raise TrueupError(
            f"recipe {str(recipe)!r} is unknown\n  expected: {', '.join(RECIPES)}, or the path of a recipe file\n"
            f"  got:      {recipe}\n  next:     {SEE}"
        )
    return _parse(toml.read(path, "recipe file", SEE), str(path))


class _Recipe(toml.Table):
    name: str
    step: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not self.step:
            raise ValueError("it holds no steps: tables, each headed [[step]]")
        if len({step.name for step in self.step}) < len(self.step):
            raise ValueError("two steps have the same name")


def _parse(content: dict[str, Any], where: str) -> Recipe:
    try:
        read = toml.checked(content, _Recipe)
        return Recipe(read.name, read.step)
    except ValueError as error:
        raise TrueupError(f"recipe file {where}: {error}; {SEE}") from None


def apart(before: float, after: float) -> float:
    """Return the distance of two numbers; Inf where one is NaN and the other is not."""
    if math.isnan(before) and math.isnan(after):
        return 0.0
    distance = abs(after - before)
    return math.inf if math.isnan(distance) else distance


def relative(before: float, after: float) -> float:
    """Return the distance relative to the baseline's number."""
    distance = apart(before, after)
    return 0.0 if distance == 0 else distance / abs(before) if before else math.inf


def means_apart(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return how far numbers of several steps are apart on average: relative, absolute. The smaller one counts."""
    return sum(relative(*pair) for pair in pairs) / len(pairs), sum(apart(*pair) for pair in pairs) / len(pairs)


RungStatus = Literal["pass", "DEVIATES", "could not tell"]

COUNTED: tuple[Status, ...] = ("pass", "DEVIATES", "could not tell")  # made steps; a metric that was not given is none


@dataclass(frozen=True, slots=True)
class Rung:
    """A module on the way down to the call to blame; siblings that were executed before it stand above it."""

    depth: int
    name: str
    status: RungStatus
    said: str  # the figures of its worst tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step of the recipe."""

    name: str
    check: str
    status: Status
    said: str  # one sentence: what was looked at and found; of a step that could not be made, why
    limit: str  # the numbers of the recipe, in words
    origin: str  # where they come from
    remarks: tuple[str, ...] = ()
    rungs: tuple[Rung, ...] = ()  # the way from the top to the call that is to blame
    scope: str | None = None  # the module of the call that is to blame; empty for one outside all modules, None where no call is


@dataclass(frozen=True)
class RecipeResult:
    """What `follow` returns."""

    recipe: str
    outcomes: Sequence[Outcome]
    result: Result  # the comparison: the report shows it
    step: int = 0  # the first step that both runs hold, of which forward and backward were looked at
    has_operators: bool = True  # whether both runs hold operators beside modules, so that the way down does not end at a module
    advice: tuple[str, tuple[str, ...]] | None = None  # what to do next, and the commands for it

    @property
    def verdict(self) -> VerdictWord:
        """``deviates`` if a step or the comparison does, ``aligned`` if both say so of all that was asked, else ``inconclusive``. A
        recipe's numbers are wide and its steps see the first step's tensors and losses; the comparison sees the rest."""
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
