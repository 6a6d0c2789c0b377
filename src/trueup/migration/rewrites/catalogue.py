"""The catalogue of rewrites (`catalogue.toml`)."""

from __future__ import annotations

import functools
from typing import Any, Literal

from trueup.foundation import toml

Kind = Literal["name", "number", "condition", "plain", "size"]


class Rewrite(toml.Table):
    """A row; see the head of the file. ``reference`` is what ``before`` computes, where that needs a package that PyTorch lacks."""

    id: str
    title: str
    why: str
    before: str
    after: str
    inputs: tuple[dict[str, Any], ...]
    exact: bool
    source: str
    where: dict[str, Kind] = {}  # noqa: RUF012 - a struct copies its defaults
    unlike: tuple[str, ...] = ()
    reference: str | None = None


class _Catalogue(toml.Table):
    rewrite: tuple[Rewrite, ...]


@functools.cache
def catalogue() -> tuple[Rewrite, ...]:
    """Return all rows."""
    return toml.checked(toml.packaged("trueup.migration.rewrites", "catalogue.toml"), _Catalogue).rewrite
