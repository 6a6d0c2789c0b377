"""What a framework's records are called in neutral terms: operators, slots, layouts, arguments; by the tables of `frameworks`."""

from __future__ import annotations

import json
from collections.abc import Mapping as Lookup
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.graph.streams import Array, decoded
from trueup.comparison.normalise.mapping import Mapping
from trueup.foundation.frameworks.tables import Axes, Function, Layer, Named, functions_by_op, layers_by_class, layers_by_name
from trueup.foundation.store import Capture

MODULE = "module"
"""Neutral name of a module that is none of the known layers: which one it is tells its scope."""

ALONE = "only {framework}'s: {op}"
"""Neutral name of a function that the others do not have."""

BUFFER = "output.buffer."

NEUTRAL = "neutral"
"""Column that a translated capture has beside those of the format: the name by which a call is matched."""

MARK = "\0"
"""Begins what a payload's name is told of its layout; no framework's tensor names hold it."""


def framework_of(capture: Capture) -> str | None:
    """Return the name of the framework that a capture is of, None where nothing says it."""
    return next((str(m["framework"]) for m in capture.ranks.values() if "framework" in m), None)


@dataclass(frozen=True, slots=True)
class Slotted:
    """What becomes of a slot: its neutral name, None where it is not compared, and how its elements lie."""

    name: str | None
    axes: Axes | None = None


class Dialect:
    """The names of one framework.

    Args:
        framework: whose records these are.
        mapping: what the user says; its scopes and layouts are the candidate's.
        candidate: whether these are the candidate's records.
    """

    def __init__(self, framework: str, mapping: Mapping, *, candidate: bool) -> None:
        self.framework, self.mapping, self.candidate = framework, mapping, candidate
        self._functions: dict[str, Function] = functions_by_op(framework)
        self._layers = layers_by_class(framework)

    def scope(self, scope: str) -> str:
        """Return the baseline's name of a scope."""
        return self.mapping.scope(scope) if self.candidate else scope

    def layer(self, scope: str, op: str) -> Layer | None:
        """Return the row of a module: as the map says, else by its class."""
        kind = self.mapping.kinds.get(self.scope(scope))
        return layers_by_name().get(kind) if kind else self._layers.get(op)

    def function(self, op: str) -> Function | None:
        """Return the row of a function."""
        return self._functions.get(op)

    def neutral(self, level: str, scope: str, op: str, *, other: bool) -> str:
        """Return the name by which a call is matched; ``other``: it was given what makes another function of it."""
        if level == "module":
            layer = self.layer(scope, op)
            return MODULE if layer is None or not layer.tensors else layer.name
        row = self.function(op)
        return ALONE.format(framework=self.framework, op=op) if row is None or other else row.name

    def slot(self, level: str, scope: str, op: str, slot: str) -> Slotted:
        """Return what becomes of a slot."""
        found = self._of_layer(self.layer(scope, op), slot) if level == "module" else self._of_function(self.function(op), slot)
        if found.name is None or not self.candidate:
            return found
        name, axes = self.mapping.slot(self.scope(scope), op, found.name)
        return Slotted(name, axes or found.axes)

    def _of_layer(self, layer: Layer | None, slot: str) -> Slotted:
        if layer is None:
            return Slotted(slot)
        for prefix in ("param.", BUFFER):
            if slot.startswith(prefix):
                own = slot.removeprefix(prefix)
                name = layer.neutral(self.framework, own)
                if own in layer.own[self.framework].ignored or (name in layer.buffers and prefix != BUFFER):
                    return Slotted(None)
                return Slotted(f"{prefix}{name}", layer.axes(self.framework, name))
        return Slotted(slot)

    def _of_function(self, row: Function | None, slot: str) -> Slotted:
        if row is None:
            return Slotted(slot)
        own = row.own[self.framework]
        plain = slot.removeprefix("grad_")
        kind, _, rest = plain.partition(".")
        first, _, below = rest.partition(".")
        if kind == "input":
            name = _taken(own.takes, first)
            if name not in row.takes:
                return Slotted(slot)
            neutral = f"input.{row.takes.index(name)}"
            found = Slotted(slot.replace(plain, f"{neutral}.{below}" if below else neutral), own.axes.get(name))
        elif kind == "output":
            given = own.gives[int(first)] if first.isdigit() and int(first) < len(own.gives) else first
            if given == "-":
                return Slotted(None)
            place = str(row.gives.index(given)) if given in row.gives else first
            found = Slotted(slot.replace(plain, f"output.{place}"))
        else:
            found = Slotted(slot)
        return found

    def given(self, op: str, value: str | None) -> dict[str, Any]:
        """Return the other arguments of a function by neutral names and values."""
        row, told = self.function(op), decoded(value)
        if row is None:
            return {}
        own, found = row.own[self.framework], dict(row.defaults)
        for n, one in enumerate(own.takes):
            at = one.own if one.own in told else str(n)
            if at in told:
                found[one.neutral] = _valued(told[at], one, own.values.get(one.neutral, {}))
        return found

    def arguments(self, op: str, value: str | None) -> str | None:
        """Return what of a function's arguments is compared, as JSON; None: nothing."""
        row = self.function(op)
        if row is None or not row.same:
            return None
        told = {name: given for name, given in self.given(op, value).items() if name in row.same}
        return json.dumps(told, sort_keys=True) if told else None

    def is_other(self, op: str, slots: set[str], value: str | None) -> bool:
        """Tell whether a call was given what makes another function of it (`Function.unless`)."""
        row = self.function(op)
        if row is None or not row.unless:
            return False
        own = row.own[self.framework]
        plain = [slot.removeprefix("grad_").removeprefix("input.").partition(".")[0] for slot in slots if "input." in slot]
        tensors = {_taken(own.takes, name) for name in plain}
        told = self.given(op, value)
        numbers = {name for name in row.unless if told.get(name) and not (name in row.one and told[name] == 1)}
        return bool(row.unless & tensors) or bool(numbers)


@lru_cache(maxsize=4096)
def _taken(takes: tuple[Named, ...], own: str) -> str:
    """Return the neutral name of a parameter that a slot names by its place or its name."""
    if own.isdigit():
        return takes[int(own)].neutral if int(own) < len(takes) else ""
    return next((one.neutral for one in takes if one.own == own), "")


def _valued(value: Any, one: Named, values: Lookup[str, Any]) -> Any:
    """Return a framework's value in neutral terms."""
    known = json.dumps(value)
    if known in values:
        return values[known]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if one.how == "1-" and is_number:
        return round(1 - value, 12)
    return float(value) if is_number else value


def put(table: pa.Table, name: str, column: Any) -> pa.Table:
    """Return a table with another column in place of one."""
    return table.set_column(table.schema.get_field_index(name), name, column)


def masked(column: pa.ChunkedArray, kept: Array) -> pa.ChunkedArray:
    """Return a column with nulls where it is not kept."""
    return column.take(pa.array(np.arange(len(column)), mask=~kept))


def laid_out(table: pa.Table, axes: dict[int, Axes]) -> pa.Table:
    """Turn the shapes of some slots, and leave out what depends on the order of their elements."""
    shapes = table["shape"].to_pylist()
    reordered = np.zeros(len(table), bool)
    layouts: dict[int, str] = {}
    digests = table["digest"].to_pylist()
    for k, order in axes.items():
        shape = shapes[k]
        shapes[k] = [shape[n] for n in order]
        moved = [n for n in order if shape[n] != 1]
        if moved != sorted(moved):
            reordered[k] = True
            layouts[k] = json.dumps({"shape": shape, "axes": list(order), "digest": digests[k]})
    table = put(table, "shape", pa.array(shapes, pa.list_(pa.int64())))
    for name in ("digest", "sketch"):
        if name in table.column_names:
            table = put(table, name, masked(table[name], ~reordered))
    if "payload_key" in table.column_names:
        keys = table["payload_key"].to_pylist()
        for k, layout in layouts.items():
            if keys[k] is not None:
                keys[k] = f"{keys[k]}{MARK}{layout}"
        table = put(table, "payload_key", pa.array(keys, pa.string()))
    return table
