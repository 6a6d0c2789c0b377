"""Criteria: tables of how much error is explained, and how the table is looked up."""

from __future__ import annotations

import fnmatch
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from trueup.comparison.graph.names import normalised
from trueup.comparison.verdict.limits import Limit
from trueup.comparison.verdict.limits import parse as parse_limit
from trueup.model import PHASES, TrueupError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Own = Literal["exact", "elementwise", "additive", "accumulate", "reduction", "average", "bilinear", "composite"]
Carry = Literal[
    "linear", "accumulate", "sum", "bilinear", "exponential", "smooth", "inverse", "attention", "branch", "pole", "sign",
]  # fmt: skip

OWN: tuple[str, ...] = ("exact", "elementwise", "additive", "accumulate", "reduction", "average", "bilinear", "composite")
CARRY: tuple[str, ...] = (
    "linear", "accumulate", "sum", "bilinear", "exponential", "smooth", "inverse", "attention", "branch", "pole", "sign",
)  # fmt: skip

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
    if str(criterion) == "default":
        return _packaged("criteria.toml")
    if str(criterion) == FRAMEWORKS:
        return _between_frameworks()
    if str(criterion) in PRESETS:
        return _packaged("presets", f"{criterion}.toml")
    path = Path(criterion)
    if not path.is_file():
        known = ", ".join(("default", *PRESETS))
        raise TrueupError(f"criterion {str(criterion)!r} is unknown: expected {known}, or the path of a criterion file")
    try:
        return _parse(tomllib.loads(path.read_text()), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise TrueupError(f"criterion file {path} cannot be read: {error}") from None


@cache
def _between_frameworks() -> Criterion:
    """Return the default table with further rows before its own."""
    package = resources.files(__package__)
    paths = (("criteria.toml",), ("presets", f"{FRAMEWORKS}.toml"))
    table, over = (tomllib.loads(package.joinpath(*path).read_text()) for path in paths)
    return _parse({**table, **over, "row": [*over["row"], *table["row"]]}, f"{FRAMEWORKS}.toml")


@cache
def _packaged(*path: str) -> Criterion:
    return _parse(tomllib.loads(resources.files(__package__).joinpath(*path).read_text()), path[-1])


def _parse(content: dict[str, Any], where: str) -> Criterion:
    try:
        return _limits(content) if "fail" in content else _table(content)
    except (TypeError, AttributeError, ValueError) as error:
        raise TrueupError(f"criterion file {where}: {error}") from None


def _limits(content: dict[str, Any]) -> Criterion:
    _known(content, ("name", "loss", "yardstick", "fail"), "")
    name = str(_get(content, "name", "name"))
    tables = content["fail"]
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"fail must be tables, each headed [[fail]]; {SEE}")
    limits = tuple(parse_limit(table, f"fail {n}: ") for n, table in enumerate(tables, 1))
    row = Row(name, ("*",), (), "composite", 512.0, "branch", 32.0, False, True, "; ".join(limit.origin for limit in limits))
    numbers = {key: _number(content, key, key) for key in ("loss", "yardstick") if key in content}
    return replace(load("default"), name=name, rows=(row,), limits=limits, _found={}, **numbers)


def _table(content: dict[str, Any]) -> Criterion:
    numbers = {name: _number(content, name, name) for name in ("suspect", "certain", "input_units", "loss")}
    optional = ("yardstick", "certain_carried")
    yardstick, certain_carried = (
        _number(content, name, name) if name in content else getattr(load("default"), name) for name in optional
    )
    name = str(_get(content, "name", "name"))
    if not content.get("row"):
        raise ValueError(f"it holds no rows; {SEE}")
    if not isinstance(content["row"], list) or not all(isinstance(row, dict) for row in content["row"]):
        raise ValueError(f"row must be tables, each headed [[row]], not {content['row']!r:.60}; {SEE}")
    rows = tuple(_row(row, n) for n, row in enumerate(content["row"], 1))
    if "*" not in rows[-1].ops or rows[-1].phases:
        raise ValueError('the last row must match every call (ops = ["*"], no phases)')
    suspect, certain, input_units, loss = numbers.values()
    return Criterion(name, suspect, certain, input_units, loss, certain_carried, yardstick, rows)


def _row(row: dict[str, Any], number: int) -> Row:
    at = f"row {number} ({row.get('name', '?')}): "
    own, carry = _get(row, "own", f"{at}own"), _get(row, "carry", f"{at}carry")
    for table, known, what in ((own, OWN, "own"), (carry, CARRY, "carry")):
        kind = _get(table, "kind", f"{at}{what}.kind")
        if kind not in known:
            raise ValueError(f"{what}.kind {kind!r} is unknown: expected {', '.join(known)}")
    _known(own, ("kind", "ulps", "products", "roundings", "stored_sums"), at)
    _known(carry, ("kind", "factor"), at)
    _known(row, ("name", "ops", "phases", "own", "carry", "random", "matmul", "origin"), at)
    phases = _words(row.get("phases", []), f"{at}phases")
    for phase in phases:
        if phase not in KINDS:
            raise ValueError(f"{at}phase {phase!r} is unknown: expected {', '.join(KINDS)}")
    return Row(
        str(_get(row, "name", f"{at}name")),
        _words(_get(row, "ops", f"{at}ops"), f"{at}ops"),
        phases,
        own["kind"],
        _number(own, "ulps", f"{at}own.ulps"),
        carry["kind"],
        _number(carry, "factor", f"{at}carry.factor"),
        bool(row.get("random", False)),
        bool(row.get("matmul", False)),
        str(_get(row, "origin", f"{at}origin")),
        _number({"products": 1.0, **own}, "products", f"{at}own.products"),
        _number({"roundings": 16.0 if own["kind"] == "composite" else 1.0, **own}, "roundings", f"{at}own.roundings"),
        bool(own.get("stored_sums", False)),
    )


def _get(table: dict[str, Any], key: str, what: str) -> Any:
    if key not in table:
        raise ValueError(f"{what} is missing; {SEE}")
    return table[key]


def _number(table: dict[str, Any], key: str, what: str) -> float:
    value = _get(table, key, what)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{what} must be a number above 0, not {value!r}; {SEE}")
    return float(value)


def _words(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list of patterns, not {value!r}; {SEE}")
    return tuple(map(str, value))


def _known(table: dict[str, Any], names: tuple[str, ...], at: str) -> None:
    for name in table:
        if name not in names:
            raise ValueError(f"{at}{name!r} is unknown: expected {', '.join(names)}")
