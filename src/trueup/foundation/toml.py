"""TOML tables: those that come along are read, and those that people write are checked.

A check raises ValueError with what is wrong and where (``row 3: ulps is missing``, ``at`` is ``row 3: ``); who reads the file adds
its name and what to read next. It imports `trueup.foundation.model` alone, so that every other package may import it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST = 1 << 20
"""Bytes that a file may have that somebody wrote."""


def packaged(package: str, *path: str) -> dict[str, Any]:
    """Read a file that comes along with a package."""
    return tomllib.loads(resources.files(package).joinpath(*path).read_text("utf-8"))


def read(file: Path, what: str, see: str) -> dict[str, Any]:
    """Read a file that somebody wrote: a map file, a criterion file.

    Raises:
        TrueupError: it cannot be read, or is no TOML.
    """
    try:
        if (size := file.stat().st_size) > LARGEST:
            raise ValueError(f"it has {size} bytes, expected at most {LARGEST}; is it the right file?")
        return tomllib.loads(file.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise TrueupError(f"{what} {file} cannot be read: {error}; {see}") from None


def known(table: dict[str, Any], names: Iterable[str], at: str = "") -> None:
    """Refuse what a table holds beside ``names``."""
    for name in table:
        if name not in names:
            raise ValueError(f"{at}{name!r} is unknown: expected {', '.join(names)}")


def given(table: dict[str, Any], key: str, at: str = "") -> Any:
    """Return what a table must hold."""
    if key not in table:
        raise ValueError(f"{at}{key} is missing")
    return table[key]


def text(table: dict[str, Any], key: str, at: str = "", default: str | None = None) -> str:
    """Return a text of a table."""
    value = given(table, key, at) if default is None else table.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{at}{key} must be a text, not {value!r}")
    return value


def chosen(value: Any, of: Iterable[str], at: str) -> Any:
    """Return one of some words."""
    if value not in of:
        raise ValueError(f"{at} {value!r} is unknown: expected {', '.join(of)}")
    return value


def number(value: Any, at: str) -> float:
    """Return a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{at} must be a number above 0, not {value!r}")
    return float(value)


def texts(value: Any, at: str) -> tuple[str, ...]:
    """Return a list of texts."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{at} must be a list of texts, not {value!r}")
    return tuple(value)


def tables(content: dict[str, Any], name: str, at: str = "", head: str = "") -> list[tuple[dict[str, Any], str]]:
    """Return tables, each with its place: ``fail 2: ``; headed ``[[name]]``, or as ``head`` says it."""
    found = content.get(name, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise ValueError(f"{at}{name} must be tables, each headed [[{head or name}]]")
    return [(table, f"{at}{name} {n}: ") for n, table in enumerate(found, 1)]
