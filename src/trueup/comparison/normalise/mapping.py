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
from typing import Any

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers, Stream
from trueup.foundation import toml
from trueup.foundation.frameworks.tables import layers_by_name
from trueup.foundation.model import LEVELS, PHASES, TrueupError


@dataclass(frozen=True, slots=True)
class Rename:
    """A rule for names of the candidate."""

    candidate: re.Pattern[str]
    baseline: str

    def __call__(self, name: str) -> str | None:
        """Return the baseline's name for a name that the rule is for, else None."""
        found = self.candidate.match(name)
        return None if found is None else found.expand(self.baseline) + name[found.end() :]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Calls that are not compared: those that match in all that is given."""

    scope: re.Pattern[str]
    op: re.Pattern[str]
    phase: str | None
    level: str | None


@dataclass(frozen=True, slots=True)
class SlotRule:
    """Tensors of the candidate that lie in another order, or have another name."""

    scope: re.Pattern[str]
    op: re.Pattern[str]
    slot: Rename
    permute: tuple[int, ...] | None


@dataclass(frozen=True)
class Mapping:
    """Renames and ignored calls; the first rule that matches a name holds."""

    scopes: tuple[Rename, ...] = ()
    ops: tuple[Rename, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    slots: tuple[SlotRule, ...] = ()
    modules: dict[str, str] = field(default_factory=dict)
    """Modules of the candidate, each with its name in the baseline: what these say goes before the patterns."""
    kinds: dict[str, str] = field(default_factory=dict)
    """What layer a module is, by its name in the baseline: a row of `trueup.foundation.frameworks`."""
    alone: dict[str, dict[str, str]] = field(default_factory=lambda: {"baseline": {}, "candidate": {}})
    """What layers are that only one side has, by side and name."""
    frameworks: dict[str, str] = field(default_factory=dict)
    """The framework of each side, where the file says it."""

    def scope(self, name: str) -> str:
        """Return the baseline's name for a scope of the candidate."""
        found = self.modules.get(name)
        return _renamed(name, self.scopes) if found is None else found

    def slot(self, scope: str, op: str, slot: str) -> tuple[str, tuple[int, ...] | None]:
        """Return the baseline's name for a slot of the candidate, and how its axes stand to the baseline's; None: alike.

        A gradient goes by the rule for what it is the gradient of.
        """
        plain = slot.removeprefix("grad_")
        for rule in self.slots:
            if rule.scope.fullmatch(scope) and rule.op.fullmatch(op) and (found := rule.slot(plain)) is not None:
                return slot.removesuffix(plain) + found, rule.permute
        return slot, None

    def op(self, name: str) -> str:
        """Return the baseline's name for an operator of the candidate."""
        return _renamed(name, self.ops)

    def keys(self, stream: Stream, *, candidate: bool) -> tuple[Numbers, Numbers]:
        """Return the numbers of scopes and operators by which a stream's calls are matched."""
        ops = stream.op if stream.neutral is None else stream.neutral
        if not candidate:
            return stream.scope, ops
        scopes = _translated(stream, stream.scope, self.scope) if self.scopes or self.modules else stream.scope
        if self.ops:
            told = _translated(stream, stream.op, self.op)
            ops = np.where(told == stream.op, ops, told)
        return scopes, ops

    def kept(self, stream: Stream) -> Array:
        """Tell which calls are compared."""
        kept = np.ones(len(stream), bool)
        for rule in self.ignored:
            table = stream.names.table
            at = table(rule.scope.fullmatch)[stream.scope].astype(bool) & table(rule.op.fullmatch)[stream.op].astype(bool)
            for name, numbers in ((rule.phase, stream.phase), (rule.level, stream.level)):
                at &= name is None or numbers == stream.names.number(name)
            kept &= ~at
        return kept


def _renamed(name: str, rules: tuple[Rename, ...]) -> str:
    return next((found for rule in rules if (found := rule(name)) is not None), name)


def _translated(stream: Stream, numbers: Numbers, rename: Any) -> Numbers:
    distinct, which = np.unique(numbers, return_inverse=True)
    names = [stream.names.name(number) or "" for number in distinct.tolist()]
    return np.asarray(np.array([stream.names.number(rename(name)) for name in names], np.int64)[which.reshape(-1)])


def load(path: str | Path) -> Mapping:
    """Read a mapping from a TOML file.

    Raises:
        TrueupError: there is no such file, or it is not one.
    """
    file, see = Path(path), "see docs/alignment.md"
    content = toml.read(file, "map file", see)
    try:
        toml.known(content, ("scope", "op", "ignore", "slot", "layer", "made"))
        return Mapping(
            tuple(_rename(*table, r"(?=\.|$)") for table in toml.tables(content, "scope")),
            tuple(_rename(*table, r"(?!.)") for table in toml.tables(content, "op")),
            tuple(_ignored(*table) for table in toml.tables(content, "ignore")),
            tuple(_slot(*table) for table in toml.tables(content, "slot")),
            *_layers(content),
            _made(content),
        )
    except ValueError as error:
        raise TrueupError(f"map file {file}: {error}; {see}") from None


def _rename(table: dict[str, Any], at: str, end: str) -> Rename:
    toml.known(table, ("candidate", "baseline"), at)
    candidate, baseline = (toml.text(table, name, at) for name in ("candidate", "baseline"))
    pattern = _pattern(candidate, f"{at}candidate", end)
    try:
        re.sub(pattern, baseline, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"{at}baseline {baseline!r} is no replacement for {candidate!r} ({error})") from None
    return Rename(pattern, baseline)


def _slot(table: dict[str, Any], at: str) -> SlotRule:
    toml.known(table, ("scope", "op", "slot", "baseline", "permute"), at)
    slot = toml.text(table, "slot", at)
    if "baseline" not in table and "permute" not in table:
        raise ValueError(f"{at}it says nothing of {slot!r}: give its name in the baseline (baseline) or its axes' order (permute)")
    permute = table.get("permute")
    if permute is not None and (not isinstance(permute, list) or sorted(permute, key=str) != list(range(len(permute)))):
        raise ValueError(f"{at}permute {permute!r} is no order of axes: expected each of 0 to n-1 once, as [0, 3, 1, 2]")
    names = {"candidate": slot, "baseline": toml.text(table, "baseline", at, r"\g<0>")}
    return SlotRule(*_where(table, at), _rename(names, at, r"(?!.)"), None if permute is None else tuple(permute))


def _made(content: dict[str, Any]) -> dict[str, str]:
    made = content.get("made", {})
    if not isinstance(made, dict) or not all(isinstance(value, str) for value in made.values()):
        raise ValueError(f"made must name each side's framework, {{ baseline = 'torch', candidate = 'paddle' }}, not {made!r:.80}")
    toml.known(made, ("baseline", "candidate"), "made: ")
    return dict(made)


def _layers(content: dict[str, Any]) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, str]]]:
    modules: dict[str, str] = {}
    alone: dict[str, dict[str, str]] = {"baseline": {}, "candidate": {}}
    kinds: dict[str, str] = {}
    for table, at in toml.tables(content, "layer"):
        toml.known(table, ("candidate", "baseline", "kind", "unsure"), at)
        kind = toml.chosen(toml.text(table, "kind", at, ""), ("", *sorted(layers_by_name())), f"{at}kind")
        if len({"candidate", "baseline"} & table.keys()) == 1:  # what it is, for the other side has none
            side = "candidate" if "candidate" in table else "baseline"
            alone[side][toml.text(table, side, at)] = kind
            continue
        candidate, baseline = (toml.text(table, name, at) for name in ("candidate", "baseline"))
        if candidate in modules:
            raise ValueError(f"{at}the candidate's {candidate!r} is two layers: {modules[candidate]!r} and {baseline!r}")
        modules[candidate] = baseline
        if kind:
            kinds[baseline] = kind
    return modules, kinds, alone


def _ignored(table: dict[str, Any], at: str) -> Ignored:
    toml.known(table, ("scope", "op", "phase", "level"), at)
    if not table:
        raise ValueError(f"{at}it ignores every call; name a scope, op, phase or level")
    for name, words in (("phase", PHASES), ("level", LEVELS)):
        if name in table:
            toml.chosen(table[name], words, f"{at}{name}")
    return Ignored(*_where(table, at), table.get("phase"), table.get("level"))


def _where(table: dict[str, Any], at: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of scopes and of operators; one that is left out matches all."""
    scope, op = (_pattern(toml.text(table, name, at, ".*"), f"{at}{name}", "") for name in ("scope", "op"))
    return scope, op


def _pattern(text: str, at: str, end: str) -> re.Pattern[str]:
    try:
        return re.compile(f"(?:{text}){end}", re.DOTALL)
    except re.error as error:
        raise ValueError(f"{at} {text!r} is no regular expression ({error})") from None
