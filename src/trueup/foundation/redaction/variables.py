"""Which environment variables are recorded: those of ``variables.toml``, by exact name or narrow family, and no other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from trueup.foundation.redaction.masking import redacted
from trueup.foundation.redaction.names import is_secret

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LENGTH = 500
"""Characters of a value that are kept: the longest that matter are lists of XLA's flags."""


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that choose what a run computes, sorted by name, their values without secrets."""
    chosen = sorted(name for name in environment if is_recorded(name))
    return {name: redacted(environment[name])[:LENGTH] for name in chosen}


def is_recorded(name: str) -> bool:
    """Tell whether a variable is recorded; names are told apart by case, as the libraries that read them do."""
    names, families, left_out = _table()
    if name in names:
        return True
    return name.startswith(families) and name not in left_out and not is_secret(name)


@cache
def _table() -> tuple[frozenset[str], tuple[str, ...], frozenset[str]]:
    """Return exact names, families and what is left out of these."""
    text = resources.files(__package__).joinpath("variables.toml").read_text("utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["rows"]
    kinds = ("names", "families", "except")
    names, families, left_out = ([name for row in rows for name in row.get(kind, "").split()] for kind in kinds)
    return frozenset(names), tuple(families), frozenset(left_out)
