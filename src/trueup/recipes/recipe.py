"""A recipe: the steps of an alignment, in order, each with its numbers and where they come from. A TOML table."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from trueup.comparison.verdict.limits import Limit
from trueup.comparison.verdict.limits import parse as parse_limit
from trueup.model import TrueupError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
        return _parse(tomllib.loads(resources.files(__package__).joinpath(f"{recipe}.toml").read_text("utf-8")), str(recipe))
    path = Path(recipe)
    if not path.is_file():
        raise TrueupError(
            f"recipe {str(recipe)!r} is unknown\n  expected: {', '.join(RECIPES)}, or the path of a recipe file\n"
            f"  got:      {recipe}\n  next:     {SEE}"
        )
    try:
        return _parse(tomllib.loads(path.read_text("utf-8")), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise TrueupError(f"recipe file {path} cannot be read: {error}") from None


def _parse(content: dict[str, Any], where: str) -> Recipe:
    try:
        _known(content, ("name", "step"), "")
        tables = content.get("step")
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            raise ValueError("step must be tables, each headed [[step]]")
        steps = tuple(_step(table, f"step {n}: ") for n, table in enumerate(tables, 1))
        names = [step.name for step in steps]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return Recipe(_text(content, "name", ""), steps)
    except ValueError as error:
        raise TrueupError(f"recipe file {where}: {error}; {SEE}") from None


def _step(table: dict[str, Any], at: str) -> Step:
    name, check, origin = (_text(table, key, at) for key in ("name", "check", "origin"))
    if check not in KEYS:
        raise ValueError(f"{at}check {check!r} is unknown: expected {', '.join(KEYS)}")
    _known(table, ("name", "check", "origin", *KEYS[check]), at)
    fail = table.get("fail", [])
    if not isinstance(fail, list) or not all(isinstance(one, dict) for one in fail):
        raise ValueError(f"{at}fail must be tables, each headed [[step.fail]]")
    if "fail" in KEYS[check] and not fail:
        raise ValueError(f"{at}it has no [[step.fail]] table, so nothing could fail")
    limits = tuple(parse_limit(one, f"{at}fail {n}: ") for n, one in enumerate(fail, 1))
    numbers = {key: _number(table[key], f"{at}{key}") for key in ("loss", "limit") if key in table}
    if "limit" in KEYS[check] and "limit" not in numbers:
        raise ValueError(f"{at}limit is missing")
    must = table.get("must", {})
    if not isinstance(must, dict):
        raise ValueError(f"{at}must is a table of switches, each with the values it may have")
    allowed = tuple((key, _words(values, f"{at}must.{key}")) for key, values in must.items())
    may_differ = _words(table.get("may_differ", []), f"{at}may_differ")
    return Step(name, check, origin, limits, numbers.get("loss"), numbers.get("limit", 0.0), allowed, may_differ)


def _text(table: dict[str, Any], key: str, at: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{at}{key} is missing, or no text")
    return value


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{what} must be a number above 0, not {value!r}")
    return float(value)


def _words(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{what} must be a list of texts, not {value!r}")
    return tuple(value)


def _known(table: dict[str, Any], names: tuple[str, ...], at: str) -> None:
    for name in table:
        if name not in names:
            raise ValueError(f"{at}{name!r} is unknown: expected {', '.join(names)}")
