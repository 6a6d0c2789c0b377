"""Criteria: tables of how much error is explained, and how the table is looked up.

Criteria that put limits to named measures of a slot, as older tools do: `bitwise`, `ptdbg`, `paddle`, ...

A slot fails when all conditions of one ``[[fail]]`` table hold. A call whose inputs pass and whose outputs fail is a culprit; where
an input fails, its outputs are explained. What a condition needs and the captures do not hold leaves the slot open, never passed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from trueup.comparison.graph.streams import Array
from trueup.comparison.measures.measure import DIGEST, STATISTICS, Errors
from trueup.foundation import toml
from trueup.foundation.facts import operators
from trueup.foundation.facts.operators import normalised
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.kernels import Pair
from trueup.foundation.model import PHASES, TrueupError

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

    @cached_property
    def exact(self) -> Array:
        """Whether operators of a row round nothing, by row."""
        return np.array([row.own == "exact" for row in self.rows])

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


def _limits(content: dict[str, Any]) -> Criterion:
    toml.known(content, ("name", "loss", "yardstick", "fail"))
    name = str(toml.given(content, "name"))
    limits = tuple(parse(*table) for table in toml.tables(content, "fail"))
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


PERFECT = {"equal": 1.0, "cosine": 1.0, "thousandth": 1.0, "five_thousandths": 1.0}
"""What measures of equal tensors are; the others are 0."""

SYMMETRIC = 1e-10
"""What ptdbg_ascend adds to the larger magnitude before it divides by it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A ``[[fail]]`` table: ``(measure, above or below, number)`` that hold together."""

    conditions: tuple[tuple[str, Literal["above", "below"], float], ...]
    detail: Literal["", "tensor", "stats"]
    """Whether it is for slots whose bytes both captures kept, for the others, or for all."""
    origin: str


class Measures:
    """Named measures of the slots of matched calls, each an array by entry, NaN where the captures do not tell."""

    def __init__(self, errors: Errors) -> None:
        self.errors = errors
        self.equal_digests = (errors.method == DIGEST) & (errors.absolute == 0)
        self.from_bytes = np.zeros(len(errors.pair), bool)
        self.from_bytes[list(errors.bytes)] = True

    def named(self, name: str) -> Array:
        """Return a measure; perfect where the digests are equal."""
        with np.errstate(all="ignore"):
            found = np.asarray(MEASURES[name](self), np.float64)
        return np.where(self.equal_digests, PERFECT.get(name, 0.0), found)

    def of_bytes(self, measure: Callable[[Pair], float]) -> Array:
        """Return what the pass over both tensors gave, where there was one."""
        found = np.full(len(self.errors.pair), np.nan)
        for n, pair in self.errors.bytes.items():
            found[n] = measure(pair)
        return found

    @cached_property
    def _numbers(self) -> dict[str, tuple[Array, Array]]:
        found = {}
        for name in ("min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf"):
            sides = zip(self.errors.streams, self.errors.slots, strict=True)
            first, second = (stream.number(name)[at] for stream, at in sides)
            found[name] = first, second
        return found

    def equal(self) -> Array:
        """Return 1 for bitwise equal values, 0 for others."""
        told = self.of_bytes(lambda p: float(p.equal == p.counted and not p.n_disagree))
        return np.where(self.from_bytes, told, np.where(self.errors.absolute > 0, 0.0, np.nan))

    def cosine(self) -> Array:
        """Return cosines: of the tensors, else from norms and the estimated distance (1 - cosine within about 18 %)."""
        told = self.of_bytes(lambda p: 1.0 if p.l2_baseline == 0 == p.l2_candidate else p.cosine)
        a, b = self._numbers["l2"]
        estimated = (a**2 + b**2 - self.errors.absolute**2) / (2 * a * b)
        unknown = np.isinf(self.errors.absolute) | (self.errors.method == STATISTICS)
        return np.where(self.from_bytes, told, np.where(unknown, np.nan, estimated))

    def relative_l2(self) -> Array:
        """Return relative errors; not known from statistics, which only bound them."""
        return np.where(self.errors.method == STATISTICS, np.nan, self.errors.relative)

    def error(self) -> Array:
        """Return relative errors as far as the captures tell: from another tool's statistics at least so much."""
        return self.errors.relative

    def mean_scaled(self) -> Array:
        """Return the difference of the means relative to the baseline's root mean square; at most the relative error."""
        size = self.errors.streams[0].numel[self.errors.slots[0]]
        difference = self.difference("mean")
        return np.where(difference == 0, 0.0, difference * np.sqrt(size) / self._numbers["l2"][0])

    def difference(self, name: str) -> Array:
        """Return |candidate - baseline| of a statistic."""
        first, second = self._numbers[name]
        return np.where(first == second, 0.0, np.abs(second - first))

    def relative(self, name: str) -> Array:
        """Return the same relative to the baseline's; Inf where that is zero and the difference is not."""
        difference = self.difference(name)
        return np.where(difference == 0, 0.0, difference / np.abs(self._numbers[name][0]))

    def symmetric(self, name: str) -> Array:
        """Return the same relative to the larger of the two."""
        first, second = self._numbers[name]
        return self.difference(name) / (np.maximum(np.abs(first), np.abs(second)) + SYMMETRIC)

    def new_nonfinite(self) -> Array:
        """Return 1 where the candidate has NaN or Inf and the baseline has none, else 0."""
        first, second = (sum(self._numbers[name][side] for name in ("n_nan", "n_posinf", "n_neginf")) for side in (0, 1))
        return np.where(np.isnan(first) | np.isnan(second), np.nan, (first == 0) & (second > 0))


def _of_bytes(measure: Callable[[Pair], float]) -> Callable[[Measures], Array]:
    return lambda measures: measures.of_bytes(measure)


def _of_statistics() -> dict[str, Callable[[Measures], Array]]:
    found: dict[str, Callable[[Measures], Array]] = {}
    for name, column in (("min", "min"), ("max", "max"), ("mean", "mean"), ("norm", "l2")):
        found[f"{name}_absolute_difference"] = partial(Measures.difference, name=column)
        found[f"{name}_relative_difference"] = partial(Measures.relative, name=column)
        found[f"{name}_symmetric"] = partial(Measures.symmetric, name=column)
    return found


MEASURES: dict[str, Callable[[Measures], Array]] = {
    "equal": Measures.equal,
    "cosine": Measures.cosine,
    "relative_l2": Measures.relative_l2,
    "error": Measures.error,
    "mean_scaled_difference": Measures.mean_scaled,
    **{name: _of_bytes(attrgetter(name)) for name in ("max_absolute", "max_relative", "mean_relative", "rmse")},
    "thousandth": _of_bytes(lambda p: p.n_thousandth / p.counted if p.counted else 1.0),
    "five_thousandths": _of_bytes(lambda p: p.n_five_thousandths / p.counted if p.counted else 1.0),
    "new_nonfinite": Measures.new_nonfinite,
    **_of_statistics(),
}
"""What a condition may name."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What limits say of the entries of a step."""

    fails: Array
    open: Array
    """Where a measure that could make it fail is not known."""
    known: dict[str, Array]
    """The measures that conditions name, by entry."""

    def why(self, limits: tuple[Limit, ...], entry: int, slot: str) -> tuple[Reason, ...]:
        """Return the figures that made an entry fail: ``mean_symmetric of output.0 is 0.73, above 0.5``; none where it did not."""
        for limit in limits if self.fails[entry] else ():
            values = [(name, float(self.known[name][entry]), side, number) for name, side, number in limit.conditions]
            if all(value > number if side == "above" else value < number for _, value, side, number in values):
                return tuple(Why.FIGURE(name, slot, value, side, number) for name, value, side, number in values)
        return ()


def apply(limits: tuple[Limit, ...], errors: Errors) -> Applied:
    """Judge all entries; what fails is not open."""
    measures = Measures(errors)
    fails, open_ = np.zeros(len(errors.pair), bool), np.zeros(len(errors.pair), bool)
    known = {name: measures.named(name) for limit in limits for name, *_ in limit.conditions}
    for limit in limits:
        holds, possible = np.ones(len(fails), bool), np.ones(len(fails), bool)
        for name, side, number in limit.conditions:
            value = known[name]
            beyond = value > number if side == "above" else value < number
            holds &= beyond
            possible &= beyond | np.isnan(value)
        if limit.detail:
            meant = measures.from_bytes | measures.equal_digests if limit.detail == "tensor" else ~measures.from_bytes
            holds, possible = holds & meant, possible & meant
        fails |= holds
        open_ |= possible & ~holds
    return Applied(fails, open_ & ~fails, known)


def parse(table: dict[str, Any], at: str) -> Limit:
    """Read a ``[[fail]]`` table.

    Raises:
        ValueError: it is not one.
    """
    conditions: list[tuple[str, Literal["above", "below"], float]] = []
    for name, value in table.items():
        if name in ("origin", "detail"):
            continue
        toml.chosen(name, MEASURES, f"{at}measure")
        side: Any
        side, number = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
        if side not in ("above", "below") or isinstance(number, bool) or not isinstance(number, (int, float)) or number != number:
            raise ValueError(f"{at}{name} must be {{ above = number }} or {{ below = number }}, not {value!r}")
        conditions.append((name, side, float(number)))
    detail = toml.chosen(table.get("detail", ""), ("", "tensor", "stats"), f"{at}detail")
    if not conditions or not isinstance(table.get("origin"), str):
        raise ValueError(f"{at}expected a measure and an origin")
    return Limit(tuple(conditions), detail, table["origin"])
