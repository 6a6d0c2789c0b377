"""A recipe: the steps of an alignment, in order, each with its numbers and where they come from. A TOML table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.comparison.verdict.criteria import Limit
from trueup.comparison.verdict.criteria import parse as parse_limit
from trueup.foundation import toml
from trueup.foundation.model import TrueupError

RECIPES = ("paddle",)
"""Recipes that come along."""

KEYS: dict[str, tuple[str, ...]] = {
    "environment": ("must", "may_differ"), "inputs": (), "forward": ("fail", "loss"), "backward": ("fail", "loss"),
    "losses": ("limit",), "metric": ("limit",),
}  # fmt: skip
"""What there is to check, and what a step of it may say besides name, check and origin."""

SEE = "see docs/align.md"


@dataclass(frozen=True, slots=True)
class Step:
    """A ``[[step]]`` table."""

    name: str
    check: str
    origin: str
    fail: tuple[Limit, ...] = ()
    loss: float | None = None
    """Most that the losses of the first step may be apart, relative."""
    limit: float = 0.0
    must: tuple[tuple[str, tuple[str, ...]], ...] = ()
    may_differ: tuple[str, ...] = ()

    @property
    def numbers(self) -> str:
        """Say the step's numbers in words."""
        if self.check in ("losses", "metric"):
            return f"at most {self.limit:.3g}"
        tables = [" and ".join(f"{name} {side} {number:g}" for name, side, number in limit.conditions) for limit in self.fail]
        loss = [] if self.loss is None else [f"losses more than {self.loss:.3g} apart"]
        return "; or ".join([*tables, *loss])


@dataclass(frozen=True, slots=True)
class Recipe:
    """Steps in the order in which they are made."""

    name: str
    steps: tuple[Step, ...]


def load(recipe: str | Path) -> Recipe:
    """Load a recipe by name or from a file of the same form.

    Raises:
        TrueupError: there is no such recipe, or the file is not one.
    """
    if str(recipe) in RECIPES:
        return _parse(toml.packaged(__package__, f"{recipe}.toml"), str(recipe))
    path = Path(recipe)
    if not path.is_file():
        raise TrueupError(
            f"recipe {str(recipe)!r} is unknown\n  expected: {', '.join(RECIPES)}, or the path of a recipe file\n"
            f"  got:      {recipe}\n  next:     {SEE}"
        )
    return _parse(toml.read(path, "recipe file", SEE), str(path))


def _parse(content: dict[str, Any], where: str) -> Recipe:
    try:
        toml.known(content, ("name", "step"))
        steps = tuple(_step(*table) for table in toml.tables(content, "step"))
        if not steps:
            raise ValueError("it holds no steps: tables, each headed [[step]]")
        names = [step.name for step in steps]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return Recipe(toml.text(content, "name"), steps)
    except ValueError as error:
        raise TrueupError(f"recipe file {where}: {error}; {SEE}") from None


def _step(table: dict[str, Any], at: str) -> Step:
    name, check, origin = (toml.text(table, key, at) for key in ("name", "check", "origin"))
    toml.chosen(check, KEYS, f"{at}check")
    toml.known(table, ("name", "check", "origin", *KEYS[check]), at)
    limits = tuple(parse_limit(*one) for one in toml.tables(table, "fail", at, "step.fail"))
    if "fail" in KEYS[check] and not limits:
        raise ValueError(f"{at}it has no [[step.fail]] table, so nothing could fail")
    numbers = {key: toml.number(table[key], f"{at}{key}") for key in ("loss", "limit") if key in table}
    if "limit" in KEYS[check] and "limit" not in numbers:
        raise ValueError(f"{at}limit is missing")
    must = table.get("must", {})
    if not isinstance(must, dict):
        raise ValueError(f"{at}must is a table of switches, each with the values it may have")
    allowed = tuple((key, toml.texts(values, f"{at}must.{key}")) for key, values in must.items())
    may_differ = toml.texts(table.get("may_differ", []), f"{at}may_differ")
    return Step(name, check, origin, limits, numbers.get("loss"), numbers.get("limit", 0.0), allowed, may_differ)
