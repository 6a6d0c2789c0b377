"""What is known of operators by their names: one table, asked by every room and read when first asked.

``operators.toml`` has what is known by name, ``positions.toml`` what arguments are called, ``rounding.toml`` how operators
round and carry errors.

>>> has("aten::_scaled_dot_product_flash_attention", "attention")
True
>>> says("torch.addmm", "factors")
{'output.0': ['input.1', 'input.2']}
>>> normalised("torch.Tensor.__iadd__")
'add'
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

from trueup.foundation import toml

TENSORFLOW = "tf.raw_ops."
TABLE, POSITIONS = "operators.toml", "positions.toml"

Row = tuple[frozenset[str], "re.Pattern[str] | None", Any]


def has(op: str, fact: str) -> bool:
    """Tell whether a fact is known of an operator (a module's: ``module:Linear``); raises KeyError if there is no such fact."""
    return says(op, fact) is not None


@lru_cache(maxsize=1 << 16)
def says(op: str, fact: str) -> Any:
    """Return ``is`` of the first row of the fact that names an operator, None where none does. A row names it as recorded
    (``aten::copy_``), by its last part (``copy_``), or as `normalised` (``copy``)."""
    forms = _forms(op)
    for names, patterns, value in _rows(fact):
        if not names.isdisjoint(forms) or (patterns and any(map(patterns.match, forms))):
            return value
    return None


@cache
def having(fact: str) -> Callable[[str], bool]:
    """Return what tells whether a fact is known of an operator: the same object for the same fact."""
    return partial(has, fact=fact)


@cache
def named(fact: str) -> tuple[str, ...]:
    """Return the names and patterns of a fact, as the table has them."""
    return tuple(name for row in _facts(fact) for name in row["ops"])


@cache
def table() -> dict[str, Any]:
    """Return the table."""
    facts = toml.parsed(_text(TABLE))
    return facts | {"fact": facts["fact"] + toml.parsed(_text(POSITIONS))["fact"]}


@cache
def _text(name: str) -> str:
    return toml.text_along(__package__, name)


@cache
def _facts(fact: str) -> list[dict[str, Any]]:
    """Return the rows of one fact. The whole table takes 15 ms to parse, and the first step of a capture asks for two facts."""
    rows, _, _ = _text(POSITIONS if fact == "positions" else TABLE).partition("\n[tensorflow]\n")
    wanted = [row for row in rows.split("[[fact]]\n")[1:] if row.startswith(f'name = "{fact}"\n')]
    return [toml.parsed(row) for row in wanted]


@cache
def rounding() -> dict[str, Any]:
    """Return how operators round: ``row``, as a criterion has them, and ``replay``, the classes that these name."""
    return toml.packaged(__package__, "rounding.toml")


@lru_cache(maxsize=4096)
def normalised(op: str) -> str:
    """Strip what does not change the arithmetic: ``aten::add_`` and ``torch.Tensor.__iadd__`` are both ``add``, and so is
    ``tf.raw_ops.AddV2``. TensorFlow's operations get the table's names; those not listed get their own in snake case."""
    name = _last(op)
    if op.startswith(TENSORFLOW):
        return _of_tensorflow().get(name) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return name[1:] if name in ("iadd", "isub", "imul", "itruediv") else name
    return name[:-1] if name.endswith("_") and len(name) > 1 else name


def _last(op: str) -> str:
    return re.split(r"::|\.", op)[-1]


@lru_cache(maxsize=1 << 16)
def _forms(op: str) -> frozenset[str]:
    return frozenset((op, _last(op), normalised(op)))


@cache
def _of_tensorflow() -> dict[str, str]:
    return {own: name for name, listed in table()["tensorflow"].items() for own in listed.split()}


@cache
def _rows(fact: str) -> list[Row]:
    """Return the rows of a fact: its names, one expression for its patterns, and what it says."""
    rows = _facts(fact)
    if not rows:
        raise KeyError(f"operators.toml has no fact {fact!r}")
    return [_row(row["ops"], row.get("is", True)) for row in rows]


def _row(ops: list[str], value: Any) -> Row:
    plain = frozenset(op for op in ops if not set(op) & set("*?["))
    globs = [fnmatch.translate(op) for op in ops if op not in plain]
    return plain, re.compile("|".join(globs)) if globs else None, value
