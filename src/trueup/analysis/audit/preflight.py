"""Before a run is trusted: its settings, beside another run, beside required values, and by themselves. `preflight` reads
manifests (docs/format.md, ``settings``) and the digests of the first step: a capture of one step is enough, no tensor is read.

Hyper-parameters are also named together where they came along with a port: a script that was moved to more devices was given
another batch, and with it a learning rate, clipping or a schedule, which change the training whatever the devices do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trueup.analysis.audit.one_run import beginnings, first_step, odd, worth_a_look
from trueup.foundation import toml
from trueup.foundation.frameworks.trees import DTYPE
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import (
    ABSENT,
    GROUPS,
    SEVERITIES,
    Setting,
    aliases,
    differing,
    held_by,
    list_of,
    modules_of,
    seeds_of,
)
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.setting_sentence import BASELINE, CANDIDATE, setting_text, subject, value
from trueup.foundation.words.wording import counted


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found."""

    baseline: str
    candidate: str
    settings: tuple[Setting, ...] = ()  # what differs between the runs, what changes numbers first
    broken: tuple[str, ...] = ()  # what must hold and does not, a sentence each
    odd: tuple[str, ...] = ()  # what is odd in the candidate by itself, a sentence each
    held: int = 0  # how many required values hold
    unread: tuple[str, ...] = ()  # why something could not be told, a sentence each
    came_along: str = ""  # hyper-parameters that differ between runs of a script that was ported
    looks: tuple[str, ...] = ()  # what is right in many trainings and the cause in some, a sentence each

    @property
    def changes(self) -> tuple[Setting, ...]:
        """The settings that differ and change numbers."""
        return tuple(one for one in self.settings if one.severity == "changes")

    @property
    def verdict(self) -> Literal["clear", "differs", "could not tell"]:
        """The word; a change of numbers or a broken rule outweighs what could not be read."""
        if self.changes or self.broken or self.odd:
            return "differs"
        return "could not tell" if self.unread else "clear"

    @property
    def exit_code(self) -> int:
        """0: nothing that changes numbers; 1: something does, or a required value does not hold; 2: could not tell."""
        return {"clear": 0, "differs": 1, "could not tell": 2}[self.verdict]

    @property
    def sentence(self) -> str:
        """What a tired engineer reads first."""
        may = sum(one.severity == "may" for one in self.settings)
        rest = f"; {counted(may, 'more setting')} may" if may else ""
        if self.changes:
            further = len(self.changes) - 1
            more = f", and {counted(further, 'more setting')} that change{'s' if further == 1 else ''} numbers" if further else ""
            return setting_text(self.changes[0]) + more
        if self.broken or self.odd:
            return (*self.broken, *self.odd)[0]
        if self.unread:
            return self.unread[0]
        holds = f"{counted(self.held, 'required value')} {'holds' if self.held == 1 else 'hold'}; " if self.held else ""
        if not self.baseline:
            return f"{holds}nothing is set in a way that is odd by itself"
        return f"{holds}no setting that changes numbers differs{rest}"


def preflight(
    baseline: str | Path | None, candidate: str | Path, *, require: str | Path | None = None, name: str | None = None
) -> Preflight:  # fmt: skip
    """Compare what two runs are set to, or look at one run alone.

    Args:
        baseline: capture of the trusted run; None: look at the candidate by itself.
        candidate: capture of the run that is to be trusted; one step is enough.
        require: a TOML file of values that must hold (docs/preflight.md).
        name: what the candidate is called, if not by its path.

    Raises:
        TrueupError: a capture or the file cannot be read.
    """
    first, second = None if baseline is None else open_capture(Path(baseline)), open_capture(Path(candidate))
    sides = [(capture, _first(capture)) for capture in (first, second) if capture is not None]
    called = str(second.path) if name is None else name
    unread = [
        f"{called if capture is second else capture.path} does not say what it was set to: no step of its training ended, or an "
        "older version recorded it"
        for capture, manifest in sides if not isinstance(manifest.get("settings"), Mapping)
    ]  # fmt: skip
    if first is not None and _first(first).get("framework") != _first(second).get("framework"):
        unread.append("the runs are of two frameworks, with names of their own for each setting: trueup align compares them")
    steps = [capture.steps[-1] for capture in (first, second) if capture is not None and capture.steps]
    begun, found = first_step(second), []
    if first is not None:
        found = differing(_first(first), _first(second), min(steps, default=None))
        if not unread:
            found += beginnings(first_step(first), begun, found)
            found.sort(key=lambda one: (SEVERITIES.index(one.severity), GROUPS.index(one.group)))
    holds, broken = (0, []) if require is None else _required(Path(require), _first(second))
    return Preflight(
        "" if first is None else str(first.path), called, tuple(found), tuple(broken),
        tuple(odd(second, begun)), holds, tuple(unread), "" if first is None else came_along(found, _first(first), _first(second)),
        tuple(worth_a_look(second, begun)),
    )  # fmt: skip


def _first(capture: Capture) -> Mapping[str, Any]:
    return next((manifest for _, manifest in sorted(capture.ranks.items())), {})


# Groups that a file of required values may name
Required = Literal["optimizer", "module", "data", "seed", "argument", "switch", "version"]


def _required(file: Path, manifest: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return how many required values hold, and a sentence for each that does not."""
    table = toml.read(file, "The file of required values", "docs/preflight.md says what it holds")
    held = flat(manifest)
    try:
        groups = toml.checked(table, dict[Required, dict[str, Any]])
    except ValueError as error:
        raise TrueupError(
            f"The file of required values {file} cannot be read: {error}\n"
            "  expected: tables optimizer, module, data, seed, argument, switch or version of names and values\n"
            "  next:     docs/preflight.md has an example"
        ) from None
    said = [_broken(group, name, must, held) for group, wanted in groups.items() for name, must in _dotted(wanted)]
    return said.count(""), [one for one in said if one]


def _broken(group: str, name: str, must: Any, held: Mapping[tuple[str, str], list[Any]]) -> str:
    """Say that a required value does not hold; empty where it does."""
    values = held.get((group, name), [])
    wrong = [one for one in values if one != must]
    if not values:
        return f"{group} {name} must be {value(must)}, and is {ABSENT}"
    where = f" in {counted(len(wrong), 'place')}" if len(values) > 1 else ""
    return f"{group} {name} must be {value(must)}, and is {value(wrong[0])}{where}" if wrong else ""


def _dotted(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values; TOML makes a table of a name whose dots are not quoted."""
    for name, must in table.items():
        if isinstance(must, dict):
            yield from ((f"{name}.{rest}", one) for rest, one in _dotted(must))
        else:
            yield name, must


def flat(manifest: Mapping[str, Any]) -> dict[tuple[str, str], list[Any]]:
    """Return values by group and name: ``AdamW.lr``, ``LayerNorm.eps`` and ``encoder.norm.eps``, ``torch``, ``batch_size``."""
    held = held_by(manifest)
    found: dict[tuple[str, str], list[Any]] = {}

    def put(group: str, prefix: str, values: Any) -> None:
        for name, one in (values if isinstance(values, Mapping) else {}).items():
            found.setdefault((group, f"{prefix}.{name}" if prefix else str(name)), []).append(one)

    for optimizer in list_of(held, "optimizers"):
        for group in list_of(optimizer, "groups"):
            put("optimizer", str(optimizer.get("class", "")), group)
    for scope, own in modules_of(manifest).items():
        module = {**{name.removesuffix(DTYPE): True for name in own if name.endswith(DTYPE)}, **own}  # parameters that it has
        for prefix in dict.fromkeys((str(module.get("class", "")), scope)):
            put("module", prefix, module)
    for loader in list_of(held, "data"):
        put("data", str(loader.get("class", "")), loader)
    for name, values in (
        ("seed", seeds_of(manifest)), ("argument", held.get("arguments")), ("switch", manifest.get("environment")),
        ("version", manifest.get("versions")),
    ):  # fmt: skip
        put(name, "", values)
    return found


BATCH = ("samples in a step", "global_batch_size", "batch_size")  # the surest first
RATE = "lr"
MOVED = ("devices", "world_size", "framework")
NEAR = 0.01
"""How far a learning rate may be from a rule's, relative to it."""


def came_along(settings: Sequence[Setting], baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    """Say which hyper-parameters differ between runs on other devices, or on another number of them; empty where none does."""
    if all(baseline.get(name) == candidate.get(name) for name in MOVED) and not _code_differs(settings):
        return ""
    found = {name: one for one in reversed(settings) if (name := _hyper(one))}
    told = next((one for one in settings if one.group == "argument" and _hyper(one) == RATE), None)
    if told is not None and "schedule" in found:  # what holds in the first step is what a warm-up begins with
        found[RATE] = told
    batch = next((_times(found[name]) for name in BATCH if name in found), None)
    said = [_said(name, one, batch) for name, one in sorted(found.items(), key=lambda pair: _place(pair[0]))]
    return f"hyper-parameters came along with the port: {'; '.join(said)}" if said else ""


def _code_differs(settings: Sequence[Setting]) -> bool:
    return any(one.group == "code" for one in settings)


def _place(name: str) -> int:
    return (*BATCH, RATE).index(name) if name in (*BATCH, RATE) else len(BATCH) + 1


def _hyper(setting: Setting) -> str:
    """Return the name under which a setting is a hyper-parameter, empty where it is none."""
    if setting.group == "optimizer" and setting.severity == "changes" and setting.name not in ("parameters", "optimizers"):
        return setting.name
    if setting.group == "data" and setting.name in BATCH:
        return setting.name
    if setting.group == "argument" and (name := aliases().get(setting.name.rpartition(".")[2])):
        return "" if name == "seed" else name
    return ""


def _times(setting: Setting) -> float | None:
    sides = setting.baseline, setting.candidate
    if all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in sides):
        return float(sides[1] / sides[0])
    return None


def _said(name: str, setting: Setting, batch: float | None) -> str:
    if ABSENT in (setting.baseline, setting.candidate):
        side, held = (CANDIDATE, setting.candidate) if setting.baseline == ABSENT else (BASELINE, setting.baseline)
        return f"{subject(setting)} {side} alone ({value(held)})"
    times, rule = _times(setting), ""
    if name == RATE and batch is not None and times is not None and batch != 1:
        rules = [(said, factor) for said, factor in _rules(batch) if abs(times / factor - 1) <= NEAR]
        linear = setting.baseline * batch
        rule = f", {rules[0][0]}" if rules else f"; in proportion to the batch it would be {linear:.3g}"
    often = f" ({times:.3g} times{rule})" if times is not None and times >= 1 else ""
    often = often or (f" (1/{1 / times:.3g} of it{rule})" if times else "")
    return f"{subject(setting)} {value(setting.baseline)} to {value(setting.candidate)}{often}"


def _rules(batch: float) -> Iterator[tuple[str, float]]:
    """Yield by what a learning rate follows the batch: Goyal et al. 2017; Krizhevsky 2014, and for Adam Malladi et al. 2022."""
    yield "in proportion to the batch", batch
    yield "by the root of the batch", math.sqrt(batch)
