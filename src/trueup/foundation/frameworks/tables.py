"""The tables of functions, layers and optimizers, read once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from trueup.foundation import toml

FRAMEWORKS: tuple[str, ...] = ("torch", "paddle", "tensorflow")  # frameworks that the tables have columns for

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter or an attribute of a framework; its neutral value is made of the framework's by ``how``."""

    own: str
    neutral: str
    how: str = ""  # ``1-``: one minus it; ``!``: not it; else a name that `settings` knows


@dataclass(frozen=True, slots=True)
class Own:
    """What a framework has for a neutral row."""

    names: tuple[str, ...]  # operators, or classes
    takes: tuple[Named, ...] = ()
    gives: tuple[str, ...] = ()
    axes: Mapping[str, Axes] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)  # own name of a tensor -> neutral name, where it is another
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reshaped: frozenset[str] = frozenset()
    settings: tuple[Named, ...] = ()
    ignored: frozenset[str] = frozenset()
    channels_last: bool = False  # whether the channels of what the layer takes and gives are the last axis; neutral is the second
    differs: str = ""  # of an optimizer: what is no setting and still another thing, here alone


@dataclass(frozen=True, slots=True)
class Function:
    """A function that frameworks share."""

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    same: frozenset[str]
    defaults: Mapping[str, Any]
    unless: frozenset[str]
    one: frozenset[str]
    own: Mapping[str, Own]
    origin: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that frameworks share."""

    name: str
    tensors: tuple[str, ...]  # neutral names; ``("*",)``: whatever it has
    buffers: frozenset[str]
    own: Mapping[str, Own]
    origin: str

    def neutral(self, framework: str, tensor: str) -> str:
        """Return the neutral name of a tensor of a framework's layer."""
        return self.own[framework].tensors.get(tensor, tensor)

    def axes(self, framework: str, neutral: str) -> Axes | None:
        """Return how a tensor lies there: neutral axis n is the framework's axis ``axes[n]``; None: the same."""
        return self.own[framework].axes.get(neutral)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer that frameworks share."""

    name: str
    defaults: Mapping[str, Any]
    differs: str
    own: Mapping[str, Own]
    origin: str


@lru_cache(maxsize=1)
def optimizers() -> tuple[Optimizer, ...]:
    """Return the rows of optimizers.toml."""
    return tuple(
        Optimizer(
            row["name"], row["defaults"], row.get("differs", ""),
            {name: _own(row[name], "classes", row) for name in FRAMEWORKS if name in row}, row["origin"],
        )
        for row in _read("optimizers.toml")["optimizer"]
    )  # fmt: skip


@lru_cache(maxsize=8)
def optimizers_by_class(framework: str) -> dict[str, Optimizer]:
    """Return the row of each class of a framework."""
    return {name: row for row in optimizers() if framework in row.own for name in row.own[framework].names}


@lru_cache(maxsize=1)
def functions() -> tuple[Function, ...]:
    """Return the rows of functions.toml."""
    return tuple(
        Function(
            row["name"], tuple(row["takes"].split()), tuple(row.get("gives", "output").split()), _words(row, "same"),
            row.get("defaults", {}), _words(row, "unless"), _words(row, "one"),
            {name: _own(row[name], "ops", row) for name in FRAMEWORKS if name in row}, row["origin"],
        )
        for row in _read("functions.toml")["function"]
    )  # fmt: skip


@lru_cache(maxsize=1)
def layers() -> tuple[Layer, ...]:
    """Return the rows of layers.toml, one for each number of dimensions."""
    return tuple(
        Layer(
            row["name"], tuple(row["tensors"].split()), _words(row, "buffers"),
            {name: _own(row[name], "classes", row) for name in FRAMEWORKS if name in row}, row["origin"],
        )
        for row in _spread(_read("layers.toml")["layer"])
    )  # fmt: skip


@lru_cache(maxsize=8)
def layers_by_class(framework: str) -> dict[str, Layer]:
    """Return the row of each class of a framework."""
    return {name: layer for layer in layers() if framework in layer.own for name in layer.own[framework].names}


@lru_cache(maxsize=8)
def layers_by_name() -> dict[str, Layer]:
    """Return the rows by their neutral names."""
    return {layer.name: layer for layer in layers()}


@lru_cache(maxsize=8)
def functions_by_op(framework: str) -> dict[str, Function]:
    """Return the row of each operator of a framework."""
    return {name: row for row in functions() if framework in row.own for name in row.own[framework].names}


def _read(name: str) -> dict[str, Any]:
    return toml.packaged(__package__, name)


def _spread(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for n in row.get("dims", [""]):
            yield {
                key: _of_dims(value, n) if key in FRAMEWORKS else value
                for key, value in (row | {"name": row["name"].replace("{n}", str(n))}).items()
            }


def _of_dims(column: dict[str, Any], n: Any) -> dict[str, Any]:
    """Return a framework's column of a row for n dimensions."""
    made = {**column, "classes": [one.replace("{n}", str(n)) for one in column["classes"]]}
    if "spatial_first" in column:
        made["axes"] = {**column.get("axes", {}), column["spatial_first"]: [n + 1, n, *range(n)]}
    return made


def _own(column: dict[str, Any], names: str, row: dict[str, Any]) -> Own:
    tensors = {one.own: one.neutral for one in _named(column.get("tensors", ""))}
    return Own(
        tuple(column[names]), _named(column.get("takes", "")), tuple(column.get("gives", row.get("gives", "output")).split()),
        {name: tuple(axes) for name, axes in column.get("axes", {}).items()}, column.get("values", {}), tensors,
        {name: tuple(parts.split()) for name, parts in column.get("packed", {}).items()}, _words(column, "reshaped"),
        _named(column.get("settings", row.get("settings", ""))), _words(column, "ignored"),
        bool(column.get("channels_last")), column.get("differs", ""),
    )  # fmt: skip


def _words(table: Mapping[str, Any], name: str) -> frozenset[str]:
    return frozenset(str(table.get(name, "")).split())


NAMED = re.compile(r"(?P<how>1-|!)?(?P<own>[\w.]+)(?:(?P<sign>[=:])(?P<back>1-)?(?P<neutral>[\w.]+))?")


def _named(text: str) -> tuple[Named, ...]:
    """Read ``own``, ``own=neutral``, ``1-own=neutral``, ``own=1-neutral``, ``!own=neutral``, ``own:neutral`` (made by its name)."""
    found = []
    for word in text.split():
        match = NAMED.fullmatch(word)
        assert match is not None, word
        own, neutral = match["own"], match["neutral"] or match["own"]
        how = own if match["sign"] == ":" else match["how"] or match["back"] or ""
        found.append(Named(own, neutral, how))
    return tuple(found)
