"""Which environment variables are recorded: those of ``variables.toml``, by exact name or narrow family, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from trueup.foundation import toml
from trueup.foundation.redaction.masking import is_secret, redacted

LENGTH = 500  # characters of a value that are kept: the longest that matter are lists of XLA's flags


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that choose what a run computes, sorted by name, their values without secrets."""
    chosen = sorted(name for name in environment if is_recorded(name))
    return {name: redacted(environment[name])[:LENGTH] for name in chosen}


def is_recorded(name: str) -> bool:
    """Tell whether a variable is recorded; names differ by case, as for the libraries that read them."""
    names, families, left_out = _table()
    if name in names:
        return True
    return name.startswith(families) and name not in left_out and not is_secret(name)


@cache
def _table() -> tuple[frozenset[str], tuple[str, ...], frozenset[str]]:
    """Return exact names, families and what is left out of these."""
    rows: list[dict[str, Any]] = toml.packaged("trueup.foundation.redaction", "variables.toml")["rows"]
    kinds = ("names", "families", "except")
    names, families, left_out = ([name for row in rows for name in row.get(kind, "").split()] for kind in kinds)
    return frozenset(names), tuple(families), frozenset(left_out)
