"""The switches: what can be switched off, and how. A TOML table, ``switches.toml`` or one of your own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.recording.adapters import ADAPTERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEE = "see docs/triage.md"
LARGEST = 1 << 20
"""Bytes that such a file may have."""
FRAMEWORKS = (*(adapter.name for adapter in ADAPTERS), "any")
GROUPS = ("GraphFusion", "UBFusion")
"""The two groups of Ascend's fusion rules."""
TEXTS = ("name", "framework", "what", "origin", "within", "device")
MEANS: dict[str, type] = {"environment": dict, "call": list, "set": dict, "adapter": dict, "rules": list}
"""How something is switched off."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A ``[[switch]]`` table."""

    name: str
    framework: str
    what: str
    """What is switched off, in words."""
    origin: str
    within: str | None = None
    device: str | None = None
    held: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)
    """``call``, ``set`` and ``adapter``: what `trueup.recording.recorder.switching` does in the process."""
    rules: tuple[str, ...] = ()
    """Lines of Ascend's fusion switch file."""


class Table:
    """All switches.

    Args:
        rows: in the order in which they are halved.
        only: names of the switches to look at; else all.

    Raises:
        TrueupError: there is no switch of a name that is asked for.
    """

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
        """Return what is set in every run."""
        return tuple(row for row in self._rows if row.held)

    def top(self, framework: str, devices: Iterable[str]) -> tuple[Switch, ...]:
        """Return the switches of a framework that are part of no other, for a run on some devices."""
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
    """Read the switches.

    Args:
        file: of the user's; else those that come along.
        only: names of the switches to look at.
        fusion_result: Ascend's ``fusion_result.json``; each rule that took effect becomes a switch.

    Raises:
        TrueupError: a file cannot be read, or is no table of switches.
    """
    ours = resources.files("trueup.analysis.triage") / "switches.toml"
    rows = _parsed(ours.read_text(encoding="utf-8") if file is None else _text(file), str(file or ours.name))
    if fusion_result is not None:
        rows += fused(_text(fusion_result), str(fusion_result))
    return Table(rows, only)


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(LARGEST + 1)
        if len(data) <= LARGEST:
            return data.decode("utf-8")
        why = f"more than {LARGEST >> 20} MB"
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
    raise TrueupError(f"{file} cannot be read.\n  expected: a text file\n  got:      {why}\n  next:     name another; {SEE}")


def _parsed(text: str, where: str) -> list[Switch]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TrueupError(f"{where} is no TOML: {error}; {SEE}") from None
    tables = content.get("switch")
    if set(content) != {"switch"} or not isinstance(tables, list) or not tables:
        raise TrueupError(f"{where} is no table of switches: expected [[switch]] and nothing else; {SEE}")
    rows = [_row(table, f"{where}, switch {number}") for number, table in enumerate(tables, 1)]
    for row in rows:
        if row.within is not None and not any(row.within == other.name for other in rows):
            raise TrueupError(f"{where}: {row.name} is within {row.within}, and there is no such switch; {SEE}")
    return rows


def _row(table: Any, where: str) -> Switch:
    if not isinstance(table, dict):
        raise TrueupError(f"{where} is no table; {SEE}")
    for key, value in table.items():
        kind = str if key in TEXTS else bool if key == "held" else MEANS.get(key)
        if kind is None or not isinstance(value, kind):
            expected = f"one of {', '.join((*TEXTS, 'held', *MEANS))}" if kind is None else f"a {kind.__name__}"
            raise TrueupError(f"{where}: {key} cannot be read: expected {expected}; {SEE}")
    missing = [key for key in ("name", "framework", "what", "origin") if not table.get(key)]
    if missing or not set(table) & set(MEANS):
        lacking = missing[0] if missing else f"one of {', '.join(MEANS)}"
        raise TrueupError(f"{where} lacks {lacking}; {SEE}")
    if table["framework"] not in FRAMEWORKS:
        raise TrueupError(f"{where}: framework {table['framework']!r} is unknown: expected one of {', '.join(FRAMEWORKS)}")
    calls = table.get("call", [])
    if not all(isinstance(call, list) and call and isinstance(call[0], str) for call in calls):
        raise TrueupError(f"{where}: call cannot be read: expected [[function, arguments ...]]; {SEE}")
    order = {key: table[key] for key in ("call", "set", "adapter") if key in table}
    environment = {str(name): str(value) for name, value in table.get("environment", {}).items()}
    return Switch(
        **{key: table[key] for key in TEXTS if key in table}, held=table.get("held", False), order=order,
        environment=environment, rules=tuple(map(str, table.get("rules", ()))),
    )  # fmt: skip


def fused(text: str, where: str) -> list[Switch]:
    """Return a switch for each fusion rule that took effect, and one for all of them, from ``fusion_result.json``.

    Raises:
        TrueupError: it is no such file.
    """
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
    """Return Ascend's fusion switch file that switches these off, None where none of them is a fusion rule."""
    rules: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for rule in (rule for switch in switches for rule in switch.rules):
        group, _, name = rule.partition(" ")
        rules.setdefault(group, {})[name] = "off"
    return json.dumps({"Switch": rules}, indent=1) if any(rules.values()) else None
