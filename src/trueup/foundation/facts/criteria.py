"""Criteria: tables of how much error is explained, and how the table is looked up.

A criterion has rows, which say what rounding and the errors of inputs explain (``rounding.toml`` of the default), or puts limits to
named measures of a slot, as older tools do: `bitwise`, `ptdbg`, `paddle`, ... (``presets/``).
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from trueup.foundation import toml
from trueup.foundation.facts import operators
from trueup.foundation.facts.operators import has, normalised
from trueup.foundation.model import Phase, TrueupError

Own = Literal["exact", "elementwise", "additive", "accumulate", "reduction", "average", "bilinear", "composite"]
Carry = Literal[
    "linear", "accumulate", "sum", "bilinear", "product", "exponential", "smooth", "inverse", "attention", "branch", "pole", "sign",
]  # fmt: skip

OWN: tuple[str, ...] = get_args(Own)
CARRY: tuple[str, ...] = get_args(Carry)

SEE = "see docs/criteria.md"

PRESETS: tuple[str, ...] = ("bitwise", "ptdbg", "ptdbg-summary", "precision-tool", "paddle", "msprobe")
"""Criteria of older tools, in presets/."""

FRAMEWORKS = "frameworks"  # the default between two frameworks: rows for layers, before those of the default table


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
    products: float = 1.0  # how many products, one after the other, a composite with ``matmul`` holds
    roundings: float = 1.0  # how often a 16-bit or 8-bit result, or its parts, are rounded to its dtype; errors add in squares
    stored_sums: bool = False  # whether sums of 16-bit numbers are kept in their dtype, and not in float32


@dataclass(frozen=True)
class Criterion:
    """A named table; `row` finds the row of an operator."""

    name: str
    suspect: float
    certain: float
    input_units: float
    loss: float
    certain_carried: float
    """A culprit's error exceeds so many times what its inputs' errors explain (``certain``: what rounding does)."""
    yardstick: float  # times the spread of the baseline's repeats, or its distance from a float64 run, that are explained
    rows: tuple[Row, ...]
    limits: tuple[Limit, ...] = ()  # where it has any, these decide and not the rows; then its only row names the criterion
    _found: dict[tuple[str, str], Row] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def exact(self) -> NDArray[np.bool_]:
        """Whether operators of a row round nothing, by row."""
        return np.array([row.own == "exact" for row in self.rows])

    def row(self, op: str, level: str, phase: str) -> Row:
        """Return the first row that matches an operator as recorded. The backward of an api or module call goes by the phase
        ``backward``, an aten operator that runs in backward by ``aten-backward``."""
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
    """Load a criterion by name or from a file of the same form; raises TrueupError if there is none, or the file is not one."""
    name, path = str(criterion), Path(criterion)
    if name in ("default", FRAMEWORKS, *PRESETS):
        return _packaged(name)
    if not path.is_file():
        known = ", ".join(("default", *PRESETS))
        raise TrueupError(f"criterion {name!r} is unknown: expected {known}, or the path of a criterion file")
    return _parsed(toml.read(path, "criterion file", SEE), str(path))


@cache
def is_product(op: str, level: str) -> bool:
    """Tell whether a call is a matrix product, a convolution, or made of some (attention, recurrent layers)."""
    if level == "module":
        return has(f"module:{op.rpartition('.')[2]}", "product")
    criterion = load("default")
    row = criterion.row(op, level, "forward")
    return row.matmul and row is not criterion.rows[-1] and not has(op, "cell")


@cache
def products_at(level: str) -> Callable[[str], bool]:
    """Return what tells whether an operator of a level is a product: the same object for the same level."""
    return partial(is_product, level=level)


@cache
def _packaged(name: str) -> Criterion:
    rows = [{key: value for key, value in row.items() if key != "replay"} for row in operators.rounding()["row"]]
    default = {**toml.packaged(__package__, "criteria.toml"), "row": rows}
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


Kind = Literal[Phase, "aten-backward"]
KINDS: tuple[str, ...] = get_args(Kind)  # what ``phases`` of a row may name


class _Own(toml.Table):
    kind: Own
    ulps: toml.Positive
    products: toml.Positive = 1.0
    roundings: toml.Positive | None = None
    stored_sums: bool = False


class _Carry(toml.Table):
    kind: Carry
    factor: toml.Positive


class _Row(toml.Table):
    name: str
    ops: tuple[str, ...]
    own: _Own
    carry: _Carry
    origin: str
    phases: tuple[Kind, ...] = ()
    random: bool = False
    matmul: bool = False

    def row(self) -> Row:
        own, roundings = self.own, self.own.roundings or (16.0 if self.own.kind == "composite" else 1.0)
        return Row(
            self.name, self.ops, self.phases, own.kind, own.ulps, self.carry.kind, self.carry.factor, self.random, self.matmul,
            self.origin, own.products, roundings, own.stored_sums,
        )  # fmt: skip


class _Rows(toml.Table):
    name: str
    suspect: toml.Positive
    certain: toml.Positive
    input_units: toml.Positive
    loss: toml.Positive
    certain_carried: toml.Positive | None = None
    yardstick: toml.Positive | None = None
    row: tuple[_Row, ...] = ()

    def __post_init__(self) -> None:
        if not self.row:
            raise ValueError("it holds no rows")
        if "*" not in self.row[-1].ops or self.row[-1].phases:
            raise ValueError('the last row must match every call (ops = ["*"], no phases)')


class _Limits(toml.Table):
    name: str
    fail: tuple[dict[str, Any], ...]
    loss: toml.Positive | None = None
    yardstick: toml.Positive | None = None

    def __post_init__(self) -> None:
        if not self.fail:
            raise ValueError("it holds no limits")


def _limits(content: dict[str, Any]) -> Criterion:
    read = toml.checked(content, _Limits)
    limits = tuple(parse(table, f"fail {n}: ") for n, table in enumerate(read.fail, 1))
    origin = "; ".join(limit.origin for limit in limits)
    row = Row(read.name, ("*",), (), "composite", 512.0, "branch", 32.0, False, True, origin)
    known = load("default")
    numbers = {"loss": read.loss or known.loss, "yardstick": read.yardstick or known.yardstick}
    return replace(known, name=read.name, rows=(row,), limits=limits, _found={}, **numbers)


def _table(content: dict[str, Any]) -> Criterion:
    read = toml.checked(content, _Rows)
    carried, yardstick = read.certain_carried or load("default").certain_carried, read.yardstick or load("default").yardstick
    rows = tuple(row.row() for row in read.row)
    return Criterion(read.name, read.suspect, read.certain, read.input_units, read.loss, carried, yardstick, rows)


MEASURES: tuple[str, ...] = (
    "equal", "cosine", "relative_l2", "error", "mean_scaled_difference", "max_absolute", "max_relative", "mean_relative", "rmse",
    "thousandth", "five_thousandths", "new_nonfinite",
    *(f"{of}_{how}" for of in ("min", "max", "mean", "norm") for how in ("absolute_difference", "relative_difference", "symmetric"))
)  # fmt: skip
"""What a condition of a limit may name; `trueup.comparison.limits` measures them."""
Measure: Any = Literal[MEASURES]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Side: Any = Annotated[dict[Literal["above", "below"], Finite], Meta(min_length=1, max_length=1)]


class _Said(toml.Table):
    origin: str
    detail: Literal["", "tensor", "stats"] = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """A ``[[fail]]`` table: ``(measure, above or below, number)`` that hold together."""

    conditions: tuple[tuple[str, Literal["above", "below"], float], ...]
    detail: Literal["", "tensor", "stats"]  # whether it is for slots whose bytes both captures kept, for the others, or for all
    origin: str


def parse(table: dict[str, Any], at: str) -> Limit:
    """Read a ``[[fail]]`` table; raises ValueError if it is not one."""
    named = {name: value for name, value in table.items() if name not in ("origin", "detail")}
    read = toml.checked({name: value for name, value in table.items() if name not in named}, _Said, at)
    sides = {toml.checked(name, Measure, f"{at}measure"): toml.checked(value, Side, f"{at}{name}") for name, value in named.items()}
    if not sides:
        raise ValueError(f"{at}a measure is missing")
    return Limit(tuple((name, side, limit) for name, one in sides.items() for side, limit in one.items()), read.detail, read.origin)
