"""The classes of a step's time, by the names of operators, kernels and calls: ``classes.toml``."""

from __future__ import annotations

import functools
import re

from trueup.foundation import toml

OPERATOR, COPY, FRAMEWORK, COMPILE, HOST, COMMUNICATION = (
    "operator", "copy and format", "framework", "compile", "host", "communication",
)  # fmt: skip
CLASSES = (OPERATOR, COPY, FRAMEWORK, COMPILE, HOST, COMMUNICATION)


class Row(toml.Table):
    """A class that names decide."""

    name: str
    says: tuple[str, ...]
    sign: str
    remedy: str


class _File(toml.Table, rename={"rows": "class"}):
    wrapper: tuple[str, ...]
    sync: tuple[str, ...]
    made_for: tuple[str, ...]
    graphs: tuple[str, ...]
    rows: tuple[Row, ...]
    other: dict[str, str]


@functools.cache
def _file() -> _File:
    return toml.checked(toml.packaged(__package__, "classes.toml"), _File)


@functools.cache
def _expression(name: str) -> re.Pattern[str]:
    parts = [re.sub(r"^\(\?i\)(.*)", r"(?i:\1)", one) for one in getattr(_file(), name)]
    return re.compile("|".join(f"(?:{part})" for part in parts))


@functools.cache
def _rows() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple(
        (row.name, re.compile("|".join(re.sub(r"^\(\?i\)(.*)", r"(?i:\1)", one) for one in row.says))) for row in _file().rows
    )


@functools.lru_cache(maxsize=200_000)
def named_class(name: str) -> str:
    """Return the class that a name alone decides, `OPERATOR` where none does."""
    return next((found for found, says in _rows() if says.search(name)), OPERATOR)


@functools.lru_cache(maxsize=200_000)
def is_wrapper(name: str) -> bool:
    """Tell whether a span only holds operators that have spans of their own."""
    return named_class(name) != COMPILE and _expression("wrapper").search(name) is not None


@functools.lru_cache(maxsize=200_000)
def is_sync(name: str) -> bool:
    """Tell whether the host waits for the device there."""
    return _expression("sync").search(name) is not None


@functools.lru_cache(maxsize=200_000)
def is_graph(name: str) -> bool:
    """Tell whether a graph of launches is started there."""
    return _expression("graphs").search(name) is not None


def is_made_for(name: str) -> bool:
    """Tell whether a device is made for an operator, so that much time in it is no fault."""
    return _expression("made_for").search(name) is not None


def sign(kind: str, variant: str = "") -> str:
    """Return the sign that proves a class, or a variant of one."""
    return _said(kind, variant, "")


def remedy(kind: str, variant: str = "") -> str:
    """Return what to do about a class, or a variant of one."""
    return _said(kind, variant, "_remedy")


def _said(kind: str, variant: str, part: str) -> str:
    row = next((row for row in _file().rows if row.name == kind), None)
    if row is None or variant:
        return _file().other[f"{variant or kind}{part}"]
    return row.remedy if part else row.sign
