"""What a framework's records are called in neutral terms: operators, slots, layouts, arguments; by the tables of `frameworks`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trueup.foundation.facts.arguments import decoded
from trueup.foundation.frameworks.mapping import Mapping
from trueup.foundation.frameworks.neutral import neutral_value
from trueup.foundation.frameworks.tables import Axes, Function, Layer, Named, functions_by_op, layers_by_class, layers_by_name

MODULE = "module"  # neutral name of a module that is none of the known layers: which one it is tells its scope

ALONE = "only {framework}'s: {op}"  # neutral name of a function that the others do not have

BUFFER = "output.buffer."


@dataclass(frozen=True, slots=True)
class Slotted:
    """What becomes of a slot: its neutral name, None where it is not compared, and how its elements lie."""

    name: str | None
    axes: Axes | None = None


class Dialect:
    """The names in one framework's records. The user's ``mapping`` has the candidate's scopes and layouts (``candidate``: these
    are its)."""

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
        row, recorded = self.function(op), decoded(value)
        if row is None:
            return {}
        own, found = row.own[self.framework], dict(row.defaults)
        for n, one in enumerate(own.takes):
            at = one.own if one.own in recorded else str(n)
            if at in recorded:
                found[one.neutral] = neutral_value(recorded[at], one, own.values.get(one.neutral, {}))
        return found

    def arguments(self, op: str, value: str | None) -> str | None:
        """Return what of a function's arguments is compared, as JSON; None: nothing."""
        row = self.function(op)
        if row is None or not row.same:
            return None
        same = {name: _number(given) for name, given in self.given(op, value).items() if name in row.same}
        return json.dumps(same, sort_keys=True) if same else None

    def is_other(self, op: str, slots: set[str], value: str | None) -> bool:
        """Tell whether a call was given what makes another function of it (`Function.unless`)."""
        row = self.function(op)
        if row is None or not row.unless:
            return False
        own = row.own[self.framework]
        plain = [slot.removeprefix("grad_").removeprefix("input.").partition(".")[0] for slot in slots if "input." in slot]
        tensors = {_taken(own.takes, name) for name in plain}
        given = self.given(op, value)
        numbers = {name for name in row.unless if given.get(name) and not (name in row.one and given[name] == 1)}
        return bool(row.unless & tensors) or bool(numbers)


@lru_cache(maxsize=4096)
def _taken(takes: tuple[Named, ...], own: str) -> str:
    """Return the neutral name of a parameter that a slot names by its place or its name."""
    if own.isdigit():
        return takes[int(own)].neutral if int(own) < len(takes) else ""
    return next((one.neutral for one in takes if one.own == own), "")


def _number(value: Any) -> Any:
    """Return a whole number as any other: 1 and 1.0 are the same argument."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
