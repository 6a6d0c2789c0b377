"""Which operators are casts and which are matrix products; the table is ``operators.toml``."""

from __future__ import annotations

import fnmatch
from functools import cache
from typing import Any

from trueup import toml
from trueup.comparison.verdict.criteria import Criterion
from trueup.comparison.verdict.criteria import load as load_criterion
from trueup.facts.operators import normalised


@cache
def cast_source(op: str) -> str | None:
    """Return the slot that holds what a cast casts, None of what is no cast."""
    name = normalised(op)
    return next((slot for slot, names in _table()["casts"].items() if name in names), None)


@cache
def is_product(op: str, level: str) -> bool:
    """Tell whether a call is a matrix product, a convolution, or made of some (attention, recurrent layers)."""
    table = _table()["products"]
    if level == "module":
        return _matches(op.rpartition(".")[2], table["modules"])
    if _matches(normalised(op), table["except"]):
        return False
    return _criterion().row(op, level, "forward").name in table["rows"]


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@cache
def _table() -> dict[str, dict[str, Any]]:
    return toml.packaged(__package__, "operators.toml")


@cache
def _criterion() -> Criterion:
    return load_criterion("default")
