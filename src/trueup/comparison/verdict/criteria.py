"""Criteria: tables of how much error is explained, and how the table is looked up."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from trueup import toml
from trueup.comparison.graph.names import normalised
from trueup.comparison.verdict.limits import Limit
from trueup.comparison.verdict.limits import parse as parse_limit
from trueup.model import PHASES, TrueupError

Own = Literal["exact", "elementwise", "additive", "accumulate", "reduction", "average", "bilinear", "composite"]
Carry = Literal[
    "linear", "accumulate", "sum", "bilinear", "exponential", "smooth", "inverse", "attention", "branch", "pole", "sign",
]  # fmt: skip

OWN: tuple[str, ...] = get_args(Own)
CARRY: tuple[str, ...] = get_args(Carry)

KINDS: tuple[str, ...] = (*PHASES, "aten-backward")
"""What ``phases`` of a row may name."""

SEE = "see docs/criteria.md"

PRESETS: tuple[str, ...] = ("bitwise", "ptdbg", "ptdbg-summary", "precision-tool", "paddle", "msprobe")
"""Criteria of older tools, in presets/."""

FRAMEWORKS = "frameworks"
"""The default where the two runs are of different frameworks: rows for layers, before those of the default table."""

FLIPPED = 2.0
"""Times the root of the inputs' relative error that flipped masks explain. Of normally distributed numbers a share of 0.8 e
lies within e root mean squares of zero. There a branch goes the other way and an element changes by all of itself: an error of
root(0.8 e). Twice that is granted, for distributions with more of their mass at zero."""

TF32 = 2.0**-11
"""Unit roundoff of a float32 operand rounded to the 10 stored bits of TF32 and HF32."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a criterion."""

    name: str
    ops: tuple[str, ...]
    phases: tuple[str, ...]
    own: Own
    ulps: float
    carry: Carry
    factor: float
    random: bool
    matmul: bool
    origin: str
    products: float = 1.0
    """How many products, one after the other, a composite with ``matmul`` holds."""
    roundings: float = 1.0
    """How often a 16-bit or 8-bit result, or what it is made of, is rounded to its dtype; errors add in squares."""
    stored_sums: bool = False
    """Whether sums of 16-bit numbers are kept in their dtype, and not in float32."""


@dataclass(frozen=True)
class Criterion:
    """A named table; `row` finds the row of an operator."""

    name: str
    suspect: float
    certain: float
    input_units: float
    loss: float
    certain_carried: float
    """Times what the inputs' errors explain that a culprit's error exceeds; ``certain`` is for what rounding explains."""
    yardstick: float
    """Times the spread of the baseline's repeats, or its distance from a float64 run, that are explained."""
    rows: tuple[Row, ...]
    limits: tuple[Limit, ...] = ()
    """Where it has any, these decide and not the rows; then its only row names the criterion."""
    _found: dict[tuple[str, str], Row] = field(default_factory=dict, repr=False, compare=False)

    def is_certain(self, error: float, own: float, expected: float, declared: float = 0.0, *, sharp: bool = False) -> bool:
        """Tell whether an error is more than an estimate may be wrong by.

        The carried part has its own factor for that already. ``declared`` is the part of ``own`` that operands rounded to TF32
        or HF32 make: known by its definition, whatever the device, so that it needs no more room than the carried part. Nor does
        the rest of ``own`` where the inputs are equal or the error has a direction (``sharp``).
        """
        carried = max(expected - own, 0.0) + declared
        certain = self.certain_carried if sharp else self.certain
        return error > certain * (own - declared) + self.certain_carried * carried if expected < float("inf") else False

    def row(self, op: str, level: str, phase: str) -> Row:
        """Return the first row that matches an operator as recorded.

        The backward of an api or module call goes by the phase ``backward``; an aten operator that runs in backward is an
        operator like any other and goes by ``aten-backward``.
        """
        kind = "aten-backward" if level == "aten" and phase not in ("forward", "recompute", "optimizer", "collective") else phase
        name = f"module:{op}" if level == "module" else normalised(op)
        found = self._found.get((name, kind))
        if found is None:
            found = next(r for r in self.rows if (not r.phases or kind in r.phases) and _any_of(r.ops).match(name))
            self._found[name, kind] = found
        return found


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)))


def load(criterion: str | Path) -> Criterion:
    """Load a criterion by name or from a file of the same form.

    Raises:
        TrueupError: there is no such criterion, or the file is not one.
    """
    name, path = str(criterion), Path(criterion)
    if name in ("default", FRAMEWORKS, *PRESETS):
        return _packaged(name)
    if not path.is_file():
        known = ", ".join(("default", *PRESETS))
        raise TrueupError(f"criterion {name!r} is unknown: expected {known}, or the path of a criterion file")
    return _parsed(toml.read(path, "criterion file", SEE), str(path))


@cache
def _packaged(name: str) -> Criterion:
    default = toml.packaged(__package__, "criteria.toml")
    if name == "default":
        return _parsed(default, "criteria.toml")
    found = toml.packaged(__package__, "presets", f"{name}.toml")
    if name == FRAMEWORKS:  # further rows before those of the default table
        found = {**default, **found, "row": [*found["row"], *default["row"]]}
    return _parsed(found, f"{name}.toml")


def _parsed(content: dict[str, Any], where: str) -> Criterion:
    try:
        return _limits(content) if "fail" in content else _table(content)
    except (TypeError, AttributeError, ValueError) as error:
        raise TrueupError(f"criterion file {where}: {error}; {SEE}") from None


def _limits(content: dict[str, Any]) -> Criterion:
    toml.known(content, ("name", "loss", "yardstick", "fail"))
    name = str(toml.given(content, "name"))
    limits = tuple(parse_limit(*table) for table in toml.tables(content, "fail"))
    if not limits:
        raise ValueError("it holds no limits")
    row = Row(name, ("*",), (), "composite", 512.0, "branch", 32.0, False, True, "; ".join(limit.origin for limit in limits))
    numbers = {key: toml.number(content[key], key) for key in ("loss", "yardstick") if key in content}
    return replace(load("default"), name=name, rows=(row,), limits=limits, _found={}, **numbers)


def _table(content: dict[str, Any]) -> Criterion:
    needed = ("suspect", "certain", "input_units", "loss")
    numbers: dict[str, Any] = {key: toml.number(toml.given(content, key), key) for key in needed}
    for key in ("certain_carried", "yardstick"):
        numbers[key] = toml.number(content[key], key) if key in content else getattr(load("default"), key)
    rows = tuple(_row(*table) for table in toml.tables(content, "row"))
    if not rows:
        raise ValueError("it holds no rows")
    if "*" not in rows[-1].ops or rows[-1].phases:
        raise ValueError('the last row must match every call (ops = ["*"], no phases)')
    return Criterion(str(toml.given(content, "name")), rows=rows, **numbers)


def _row(row: dict[str, Any], place: str) -> Row:
    at = f"{place.removesuffix(': ')} ({row.get('name', '?')}): "
    toml.known(row, ("name", "ops", "phases", "own", "carry", "random", "matmul", "origin"), at)
    own, carry = (toml.given(row, key, at) for key in ("own", "carry"))
    toml.known(own, ("kind", "ulps", "products", "roundings", "stored_sums"), at)
    toml.known(carry, ("kind", "factor"), at)
    phases = toml.texts(row.get("phases", []), f"{at}phases")
    for phase in phases:
        toml.chosen(phase, KINDS, f"{at}phase")
    kinds = toml.chosen(own.get("kind"), OWN, f"{at}own.kind"), toml.chosen(carry.get("kind"), CARRY, f"{at}carry.kind")
    return Row(
        str(toml.given(row, "name", at)),
        toml.texts(toml.given(row, "ops", at), f"{at}ops"),
        phases,
        kinds[0],
        toml.number(toml.given(own, "ulps", f"{at}own."), f"{at}own.ulps"),
        kinds[1],
        toml.number(toml.given(carry, "factor", f"{at}carry."), f"{at}carry.factor"),
        bool(row.get("random", False)),
        bool(row.get("matmul", False)),
        str(toml.given(row, "origin", at)),
        toml.number(own.get("products", 1.0), f"{at}own.products"),
        toml.number(own.get("roundings", 16.0 if kinds[0] == "composite" else 1.0), f"{at}own.roundings"),
        bool(own.get("stored_sums", False)),
    )
