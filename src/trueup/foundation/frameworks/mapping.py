"""What the user says about which call is which: `map.toml`.

    [[scope]]                                  # a module that has another name in the candidate, with all inside it
    candidate = "backbone.blocks"
    baseline = "encoder.layers"

    [[op]]                                     # patterns are regular expressions, \\1 is a group of theirs
    candidate = "npu::fused_(.*)"
    baseline = "aten::\\1"

    [[ignore]]                                 # calls that are not compared, on both sides
    op = "aten::detach"

    [[slot]]                                   # tensors that lie in another order, or have another name, in the candidate
    scope = "backbone(\\..*)?"
    slot = "(input|output)\\.0"
    permute = [0, 3, 1, 2]                     # the baseline's axis n is the candidate's axis permute[n]

    layer = [                                  # modules, one by one: what `trueup map` writes
        { candidate = "fc1", baseline = "head.linear", kind = "Linear" },
    ]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from trueup.foundation import toml
from trueup.foundation.frameworks.tables import layers_by_name
from trueup.foundation.model import Level, Phase, TrueupError

ALL = re.compile(".*", re.DOTALL)


class Rename(toml.Table):
    """A rule for names of the candidate."""

    candidate: re.Pattern[str]
    baseline: str

    def __post_init__(self) -> None:
        _replaces(self.candidate, self.baseline)

    def __call__(self, name: str) -> str | None:
        """Return the baseline's name for a name that the rule is for, else None."""
        return _replaced(self.candidate, self.baseline, name)


class RenameScope(Rename):
    """A rule for scopes of the candidate, and all inside them."""

    def __call__(self, name: str) -> str | None:
        """Return the baseline's name for a scope that the rule is for, else None."""
        found = re.match(rf"(?:{self.candidate.pattern})(?=\.|$)", name, re.DOTALL)
        return None if found is None else found.expand(self.baseline) + name[found.end() :]


class Calls(toml.Table):
    """Which calls: those that match in both."""

    scope: re.Pattern[str] = ALL
    op: re.Pattern[str] = ALL


class Ignored(Calls):
    """Calls that are not compared: those that match in all that is given."""

    phase: Phase | None = None
    level: Level | None = None

    def __post_init__(self) -> None:
        if (self.scope, self.op, self.phase, self.level) == (ALL, ALL, None, None):
            raise ValueError("it ignores every call; name a scope, op, phase or level")


class SlotRule(Calls, kw_only=True):
    """Tensors of the candidate that lie in another order, or have another name."""

    slot: re.Pattern[str]
    baseline: str = r"\g<0>"
    permute: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _replaces(self.slot, self.baseline)
        if self.permute is None and self.baseline == r"\g<0>":
            given = "its name in the baseline (baseline) or its axes' order (permute)"
            raise ValueError(f"it says nothing of {self.slot.pattern!r}: give {given}")
        if self.permute is not None and sorted(self.permute) != list(range(len(self.permute))):
            raise ValueError(f"permute {list(self.permute)} is no order of axes: expected each of 0 to n-1 once, as [0, 3, 1, 2]")


class Layer(toml.Table):
    """A module of both sides, or of one."""

    candidate: str | None = None
    baseline: str | None = None
    kind: str = ""
    unsure: Any = None

    def __post_init__(self) -> None:
        if self.candidate is None and self.baseline is None:
            raise ValueError("candidate and baseline are missing")
        if self.kind and self.kind not in layers_by_name():
            raise ValueError(f"kind {self.kind!r} is unknown: expected {', '.join(sorted(layers_by_name()))}")


class Map(toml.Table):
    """What a map file holds."""

    scope: tuple[RenameScope, ...] = ()
    op: tuple[Rename, ...] = ()
    ignore: tuple[Ignored, ...] = ()
    slot: tuple[SlotRule, ...] = ()
    layer: tuple[Layer, ...] = ()
    made: dict[Literal["baseline", "candidate"], str] = msgspec.field(default_factory=dict)  # the framework of each side


def _replaces(candidate: re.Pattern[str], baseline: str) -> None:
    try:
        candidate.sub(baseline, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"baseline {baseline!r} is no replacement for {candidate.pattern!r} ({error})") from None


def _replaced(candidate: re.Pattern[str], baseline: str, name: str) -> str | None:
    found = candidate.fullmatch(name)
    return None if found is None else found.expand(baseline)


@dataclass(frozen=True)
class Mapping:
    """Renames and ignored calls; the first rule that matches a name holds."""

    scopes: tuple[Rename, ...] = ()
    ops: tuple[Rename, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    slots: tuple[SlotRule, ...] = ()
    modules: dict[str, str] = field(default_factory=dict)  # candidate's module -> baseline's name; goes before the patterns
    kinds: dict[str, str] = field(default_factory=dict)  # baseline's name of a module -> its layer: a row of `tables`
    alone: dict[str, dict[str, str]] = field(default_factory=lambda: {"baseline": {}, "candidate": {}})
    """What layers are that only one side has, by side and name."""
    frameworks: dict[str, str] = field(default_factory=dict)  # the framework of each side, where the file says it

    def scope(self, name: str) -> str:
        """Return the baseline's name for a scope of the candidate."""
        found = self.modules.get(name)
        return _renamed(name, self.scopes) if found is None else found

    def slot(self, scope: str, op: str, slot: str) -> tuple[str, tuple[int, ...] | None]:
        """Return the baseline's name for a slot of the candidate, and how its axes stand to the baseline's; None: alike. A
        gradient follows the rule of the tensor that it is the gradient of."""
        plain = slot.removeprefix("grad_")
        for rule in self.slots:
            meant = rule.scope.fullmatch(scope) and rule.op.fullmatch(op)
            if meant and (found := _replaced(rule.slot, rule.baseline, plain)) is not None:
                return slot.removesuffix(plain) + found, rule.permute
        return slot, None

    def op(self, name: str) -> str:
        """Return the baseline's name for an operator of the candidate."""
        return _renamed(name, self.ops)


def _renamed(name: str, rules: tuple[Rename, ...]) -> str:
    return next((found for rule in rules if (found := rule(name)) is not None), name)


def load(path: str | Path) -> Mapping:
    """Read a mapping from a TOML file; raises TrueupError if there is no such file, or it is not one."""
    file, see = Path(path), "see docs/alignment.md"
    content = toml.read(file, "map file", see)
    try:
        read = toml.checked(content, Map)
        made = {str(side): name for side, name in read.made.items()}
        return Mapping(read.scope, read.op, read.ignore, read.slot, *_layers(read.layer), made)
    except ValueError as error:
        raise TrueupError(f"map file {file}: {error}; {see}") from None


def _layers(layers: tuple[Layer, ...]) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, str]]]:
    modules: dict[str, str] = {}
    alone: dict[str, dict[str, str]] = {"baseline": {}, "candidate": {}}
    kinds: dict[str, str] = {}
    for n, layer in enumerate(layers, 1):
        candidate, baseline = layer.candidate, layer.baseline
        if candidate is None or baseline is None:  # what it is, for the other side has none
            side = "candidate" if baseline is None else "baseline"
            alone[side][candidate or baseline or ""] = layer.kind
            continue
        if candidate in modules:
            raise ValueError(f"layer {n}: the candidate's {candidate!r} is two layers: {modules[candidate]!r} and {baseline!r}")
        modules[candidate] = baseline
        if layer.kind:
            kinds[baseline] = layer.kind
    return modules, kinds, alone
