"""Criteria: tables of how much error is explained, and how the table is looked up."""

from __future__ import annotations

import fnmatch
import re
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from trueup.model import TrueupError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Own = Literal["exact", "elementwise", "additive", "reduction", "average", "bilinear", "composite"]
Carry = Literal["linear", "sum", "bilinear", "exponential", "smooth", "branch"]

OWN: tuple[str, ...] = ("exact", "elementwise", "additive", "reduction", "average", "bilinear", "composite")
CARRY: tuple[str, ...] = ("linear", "sum", "bilinear", "exponential", "smooth", "branch")

UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53, "complex128": 2.0**-53,
    "float32": 2.0**-24, "complex64": 2.0**-24,
    "float16": 2.0**-11, "complex32": 2.0**-11,
    "bfloat16": 2.0**-8 / 2,
    "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4, "float8_e5m2": 2.0**-3, "float8_e5m2fnuz": 2.0**-3,
}  # fmt: skip
"""Half the distance from 1 to the next number (IEEE 754-2019; OCP 8-bit formats 1.0). Integers and bools round nothing."""

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


@dataclass(frozen=True)
class Criterion:
    """A named table; `row` finds the row of an operator."""

    name: str
    suspect: float
    certain: float
    input_units: float
    loss: float
    rows: tuple[Row, ...]
    _found: dict[tuple[str, str], Row] = field(default_factory=dict, repr=False, compare=False)

    def row(self, op: str, level: str, phase: str) -> Row:
        """Return the first row that matches an operator as recorded.

        The backward of an api or module call goes by the phase ``backward``; an aten operator that runs in backward is an
        operator like any other and goes by ``aten-backward``.
        """
        kind = "aten-backward" if level == "aten" and phase not in ("forward", "recompute", "optimizer") else phase
        found = self._found.get((op, kind))
        if found is None:
            name = normalised(op)
            if level == "module":
                name = f"module:{op}"
            found = next(r for r in self.rows if (not r.phases or kind in r.phases) and _matches(r.ops, name))
            self._found[op, kind] = found
        return found


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@lru_cache(maxsize=4096)
def normalised(op: str) -> str:
    """Strip what does not change the arithmetic: ``aten::add_`` and ``torch.Tensor.__iadd__`` are both ``add``."""
    name = re.split(r"::|\.", op)[-1]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return name[1:] if name in ("iadd", "isub", "imul", "itruediv") else name
    return name[:-1] if name.endswith("_") and len(name) > 1 else name


def load(criterion: str | Path) -> Criterion:
    """Load a criterion by name or from a file of the same form as ``criteria.toml``.

    Raises:
        TrueupError: there is no such criterion, or the file is not one.
    """
    if str(criterion) == "default":
        return _parse(tomllib.loads(resources.files(__package__).joinpath("criteria.toml").read_text()), "criteria.toml")
    path = Path(criterion)
    if not path.is_file():
        raise TrueupError(f"criterion {str(criterion)!r} is unknown: expected default, or the path of a criterion file")
    try:
        return _parse(tomllib.loads(path.read_text()), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise TrueupError(f"criterion file {path} cannot be read: {error}") from None


def _parse(content: dict[str, Any], where: str) -> Criterion:
    try:
        rows = tuple(_row(row, where) for row in content["row"])
        numbers = {name: float(content[name]) for name in ("suspect", "certain", "input_units", "loss")}
        name = str(content["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise TrueupError(f"criterion file {where}: {error!r} is missing or of the wrong kind; see docs/criteria.md") from None
    if not rows or "*" not in rows[-1].ops or rows[-1].phases:
        raise TrueupError(f'criterion file {where}: the last row must match every call (ops = ["*"], no phases)')
    return Criterion(name=name, rows=rows, **numbers)


def _row(row: dict[str, Any], where: str) -> Row:
    own, carry = row["own"], row["carry"]
    for word, known, what in ((own["kind"], OWN, "own.kind"), (carry["kind"], CARRY, "carry.kind")):
        if word not in known:
            raise TrueupError(f"criterion file {where}: {what} {word!r} is unknown: expected {', '.join(known)}")
    return Row(
        str(row["name"]), tuple(row["ops"]), tuple(row.get("phases", ())), own["kind"], float(own["ulps"]), carry["kind"],
        float(carry["factor"]), bool(row.get("random", False)), bool(row.get("matmul", False)), str(row["origin"]),
    )  # fmt: skip
