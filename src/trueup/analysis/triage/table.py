"""The switches: what can be switched off, and how. A TOML table, ``switches.toml`` or one of your own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import field

from trueup.foundation import toml
from trueup.foundation.model import TrueupError
from trueup.recording.registry import ADAPTERS

SEE = "see docs/triage.md"
Framework: Any = Literal[(*(adapter.name for adapter in ADAPTERS), "any")]
GROUPS = ("GraphFusion", "UBFusion")  # the two groups of Ascend's fusion rules
MEANS = ("environment", "call", "set", "adapter", "rules")  # how something is switched off


class Switch(toml.Table):
    """A ``[[switch]]`` table."""

    name: str
    framework: Framework
    what: str  # what is switched off, in words
    origin: str
    within: str | None = None
    device: str | None = None
    held: bool = False
    environment: dict[str, str | int | float] = field(default_factory=dict)
    call: tuple[Any, ...] = ()  # ``[function, arguments ...]`` each; like ``set`` and ``adapter`` for `engine.switching`
    set: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    rules: tuple[str, ...] = ()  # lines of Ascend's fusion switch file

    def __post_init__(self) -> None:
        if not any(getattr(self, name) for name in MEANS):
            raise ValueError(f"one of {', '.join(MEANS)} is missing")
        if not all(isinstance(call, list) and call and isinstance(call[0], str) for call in self.call):
            raise ValueError("call must be [[function, arguments ...]]")

    @property
    def order(self) -> dict[str, Any]:
        """What is done in the process."""
        return {name: value for name in ("call", "set", "adapter") if (value := getattr(self, name))}


class Table:
    """All switches in the order of halving, or ``only`` some; raises TrueupError for an unknown name."""

    def __init__(self, rows: Sequence[Switch], only: Sequence[str] = ()) -> None:
        names = {row.name for row in rows}
        for name in only:
            if name not in names:
                raise TrueupError(
                    f"There is no switch {name}.\n  expected: one of {', '.join(dict.fromkeys(row.name for row in rows))}\n"
                    f"  got:      {name}\n  next:     correct --switch, or leave it out to look at all"
                )
        self._rows, self._only = rows, tuple(only)

    def held(self) -> tuple[Switch, ...]:
        """Return the switches that are set in every run."""
        return tuple(row for row in self._rows if row.held)

    def top(self, framework: str, devices: Iterable[str]) -> tuple[Switch, ...]:
        """Return a framework's switches that are part of no other, for a run on some devices."""
        rows = self._of(framework, devices)
        if self._only:
            return tuple(row for row in rows if row.name in self._only)
        return tuple(row for row in rows if row.within is None)

    def parts(self, whole: Switch, framework: str, devices: Iterable[str]) -> tuple[Switch, ...]:
        """Return the parts of a switch."""
        return tuple(row for row in self._of(framework, devices) if row.within == whole.name)

    def _of(self, framework: str, devices: Iterable[str]) -> list[Switch]:
        kinds = {device.split(":")[0].lower() for device in devices}
        mine = [row for row in self._rows if row.framework in (framework, "any") and not row.held]
        return [row for row in mine if row.device is None or row.device.lower() in kinds or row.name in self._only]


def load(file: Path | None = None, only: Sequence[str] = (), fusion_result: Path | None = None) -> Table:
    """Read the switches, a user's or Trueup's, and each rule that took effect in Ascend's ``fusion_result.json``; ``only`` has the
    names to look at. Raises TrueupError if a file cannot be read, or is no table of switches."""
    ours = "switches.toml"
    table = toml.packaged(__package__, ours) if file is None else toml.read(file, "table of switches", SEE)
    rows = _parsed(table, str(file or ours))
    if fusion_result is not None:
        rows += fused(toml.text_of(fusion_result, "a text file", f"name another; {SEE}"), str(fusion_result))
    return Table(rows, only)


class _Switches(toml.Table):
    switch: tuple[Switch, ...] = ()

    def __post_init__(self) -> None:
        if not self.switch:
            raise ValueError("it holds no switches: tables, each headed [[switch]]")
        names = {row.name for row in self.switch}
        for row in self.switch:
            if row.within is not None and row.within not in names:
                raise ValueError(f"{row.name} is within {row.within}, and there is no such switch")


def _parsed(content: dict[str, Any], where: str) -> list[Switch]:
    try:
        return list(toml.checked(content, _Switches).switch)
    except ValueError as error:
        raise TrueupError(f"table of switches {where}: {error}; {SEE}") from None


def fused(text: str, where: str) -> list[Switch]:
    """Return a switch for each rule of ``fusion_result.json`` that took effect, and one for all; raises TrueupError on others."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise TrueupError(f"{where} is no JSON: {error}; {SEE}") from None
    found: dict[tuple[str, str], None] = {}
    for graph in content if isinstance(content, list) else [content]:
        for key, group in (("graph_fusion", GROUPS[0]), ("ub_fusion", GROUPS[1])):
            rules = graph.get(key, {}) if isinstance(graph, dict) else {}
            for name, times in rules.items() if isinstance(rules, dict) else ():
                if isinstance(times, dict) and _count(times.get("effect_times")) > 0:
                    found[group, str(name)] = None
    if not found:
        raise TrueupError(
            f"{where} names no fusion rule that took effect.\n  expected: graph_fusion and ub_fusion with effect_times\n"
            f"  got:      none\n  next:     give the fusion_result.json of the run; {SEE}"
        )
    whole = Switch("fusion rules that took effect", "any", "Ascend's fusion rules", where, rules=tuple(map(" ".join, found)))
    said = "a fusion rule of Ascend's graph engine"
    return [whole, *(Switch(name, "any", said, where, whole.name, rules=(f"{group} {name}",)) for group, name in found)]


def _count(value: Any) -> int:
    return int(value) if str(value).isdigit() else 0


def fusion_file(switches: Iterable[Switch]) -> str | None:
    """Return Ascend's fusion switch file that switches these off, None if none of them is a fusion rule."""
    rules: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for rule in (rule for switch in switches for rule in switch.rules):
        group, _, name = rule.partition(" ")
        rules.setdefault(group, {})[name] = "off"
    return json.dumps({"Switch": rules}, indent=1) if any(rules.values()) else None
