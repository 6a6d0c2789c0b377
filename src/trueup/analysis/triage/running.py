"""Running the command with some switches off, and reading the result: losses, or a capture. And what all runs give, a `Triage`.

    DIR/runs/02-as-it-is-again         a capture that holds the loss curve alone
    DIR/runs/02-as-it-is-again.txt     what the command printed

The switches: what can be switched off, and how. A TOML table, ``switches.toml`` or one of your own.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from trueup.analysis.kept_runs import KeptRuns
from trueup.foundation import toml
from trueup.foundation.facts.operators import named
from trueup.foundation.model import Result, Status, TrueupError
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.columns import Overview
from trueup.foundation.words.wording import shorten
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions
from trueup.recording.registry import ADAPTERS

Word = Literal["explained", "nothing found", "could not tell"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the command."""

    name: str  # ``as it is``, ``without oneDNN`` ...
    off: tuple[str, ...]  # names of the switches that were off
    directory: Path
    losses: dict[int, float] = field(default_factory=dict)  # by step; mean over ranks and micro-batches
    seconds: float = 0.0
    failed: str = ""  # why it did not end well, in words; empty where it did
    remarks: tuple[str, ...] = ()  # switches that could not be switched off, and why; what was seen of those that were
    framework: str | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step of the triage."""

    name: str
    status: Status
    said: str  # one sentence
    remarks: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()  # what to do next: lines to type, or to write into the script
    guilty: tuple[str, ...] = ()  # names of the switches that explain the difference
    result: Result | None = None  # the comparison behind it: as it is against no optimisations, or against the baseline
    page: str | None = None  # folder, beside the report, of the step's own report


@dataclass(frozen=True)
class Triage:
    """What `triage` returns."""

    command: tuple[str, ...]
    directory: Path
    outcomes: Sequence[Outcome]
    trials: Sequence[Trial]
    baseline: str | None = None
    framework: str | None = None

    @property
    def explaining(self) -> Outcome | None:
        """The first step that explains the difference."""
        return next((one for one in self.outcomes if one.status == "DEVIATES"), None)

    @property
    def verdict(self) -> Word:
        """``explained`` if a step explains it, else ``could not tell`` if one that was made could not, else ``nothing found``."""
        if self.explaining is not None:
            return "explained"
        return "could not tell" if any(one.status == "could not tell" for one in self.outcomes) else "nothing found"

    @property
    def exit_code(self) -> int:
        """0 nothing found, 1 explained, 2 could not tell."""
        return {"nothing found": 0, "explained": 1, "could not tell": 2}[self.verdict]

    @property
    def sentence(self) -> str:
        """The conclusion."""
        first = self.explaining
        if first is not None:
            return f"EXPLAINED by {first.name}: {first.said}"
        if self.verdict == "could not tell":
            unknown = next(one for one in self.outcomes if one.status == "could not tell")
            return f"COULD NOT TELL, because {unknown.said}"
        made = ", ".join(one.name for one in self.outcomes if one.status == "pass")
        more = "" if self.baseline else "; without a baseline the network was not compared with anything"
        return f"NOTHING FOUND by {made}{more}"


FUSION_FILE = "TRUEUP_FUSION_SWITCH_FILE"  # variable with Ascend's fusion switch file, for scripts that pass it on
LAST_WORDS = 4096


class Runner:
    """Runs one command into the folder of ``kept`` for ``steps`` steps or ``timeout`` seconds (None: no limit). The held switches
    of ``table`` are set in every run; ``tell`` is called with each run."""

    def __init__(
        self, command: Sequence[str], kept: KeptRuns, table: Table, *, steps: int, timeout: float | None,
        tell: Callable[[Trial], None],
    ) -> None:  # fmt: skip
        self.command, self.table, self.steps = tuple(command), table, steps
        self.trials: list[Trial] = []
        self._kept, self._folder, self._timeout, self._tell = kept, kept.folder / "runs", timeout, tell

    def losses(self, name: str, off: Iterable[Switch] = (), steps: int | None = None) -> Trial:
        """Run it and read its losses; recording no more keeps the framework free to optimise."""
        return self._run(name, tuple(off), self._of_steps(f"0:{steps or self.steps}", level="api", include=named("loss")))

    def capture(self, name: str, off: Iterable[Switch], steps: str) -> Trial:
        """Run it and record its modules and functions in some steps; no optimizer, which magnifies rounding."""
        phases = ("forward", "recompute", "backward")
        return self._run(name, tuple(off), self._of_steps(steps, level=("module", "api"), phase=phases))

    def like(self, name: str, options: CaptureOptions) -> Trial:
        """Run it as it is and record what ``options`` say."""
        return self._run(name, (), options)

    def watch(self, name: str, options: CaptureOptions, watch: str) -> Trial:
        """Run it as it is under a watch."""
        return self._run(name, (), replace(options, steps=((0, self.steps),), stop=True), watch=watch)

    def _of_steps(self, steps: str, **more: Any) -> CaptureOptions:
        return CaptureOptions.of(steps=steps, stop=True, **more)

    def _run(self, name: str, off: tuple[Switch, ...], options: CaptureOptions, **order: Any) -> Trial:
        place = self._folder / f"{len(self.trials) + 1:02d}-{re.sub(r'[^A-Za-z0-9.]+', '-', name)[:60].strip('-')}"
        place.parent.mkdir(parents=True, exist_ok=True)
        switches = (*self.table.held(), *off)
        environment, orders = switched_off(switches, place.with_suffix(".fusion_switch.json"))
        if order.get("watch") is None:
            order["options_of"] = compiled(options)
        output = place.with_suffix(".txt")
        run = partial(
            launch.execute, place.absolute(), options, self.command, environment=environment, output=output, timeout=self._timeout,
            switches=orders, doing=f"run {len(self.trials) + 1}, {shorten(name, 40)}", **order,
        )  # fmt: skip
        asked = [options.to_json(), environment, orders, str(order)]
        code, seconds = self._kept.made(place.name, asked, [place, output], run)
        trial = self._read(name, off, place, seconds, code, output, watched="watch" in order)
        self.trials.append(trial)
        self._tell(trial)
        return trial

    def _read(
        self, name: str, off: Sequence[Switch], place: Path, seconds: float, code: int, output: Path, *, watched: bool
    ) -> Trial:
        reports = launch.reports_of(place)
        frameworks = [report["framework"] for report in reports if report.get("framework") and report.get("calls")]
        frameworks += [report["framework"] for report in reports if report.get("framework")]
        capture = None if watched else opened(place)
        manifests = [] if capture is None else list(capture.ranks.values())
        failed = self._failure(code, output, reports, watched=watched)
        return Trial(
            name, tuple(one.name for one in off), place, {} if capture is None else losses_of(capture), seconds, failed,
            tuple(_remarks(reports, [one.name for one in off])),
            str(manifests[0].get("framework")) if manifests else next(iter(frameworks), None),
            tuple(dict.fromkeys(str(device) for manifest in manifests for device in manifest.get("devices", ()))),
        )  # fmt: skip

    def _failure(self, code: int, output: Path, reports: Sequence[Mapping[str, Any]], *, watched: bool) -> str:
        failures = [str(report["failure"]) for report in reports if report.get("failure")]
        if code == launch.TIMED_OUT and self._timeout is not None:
            return f"it did not end within {self._timeout:g} s (--timeout) and was ended; it may hang: {output}"
        if code and not (watched and code == 3):  # of a watch that stopped it
            return f"{_ended(code)}{last_line(output)}" if code < 128 else f"{_ended(code)} ({output})"
        if not reports:
            return "no process of it imported a framework: python -I, -E or -S, or a PYTHONPATH set anew, hides it"
        return f"it could not be observed: {failures[0].splitlines()[0]}" if failures else ""


def switched_off(switches: Sequence[Switch], fusion: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the variables and orders that switch optimisations off; Ascend's fusion rules go to the file ``fusion``."""
    environment = {key: str(value) for switch in switches for key, value in switch.environment.items()}
    orders = [{"name": one.name, "framework": one.framework, **one.order} for one in switches]
    rules = fusion_file(switches)
    if rules is not None:
        file = fusion.absolute()
        file.write_text(rules, encoding="utf-8")
        environment[FUSION_FILE] = str(file)
        orders.append({"name": "Ascend fusion", "framework": "tensorflow", "adapter": {"fusion_switch_file": str(file)}})
    return environment, orders


def compiled(options: CaptureOptions) -> dict[str, Any]:
    """Return the options for each framework that compiles; by default the capture would switch compiling off."""
    through = replace(options, compile="through").to_json()
    return {adapter.name: through for adapter in ADAPTERS if "compile" not in adapter.lacks}


def losses_of(capture: Capture) -> dict[int, float]:
    """Return the losses of a capture by step, as every report tells them."""
    overview = Overview(capture)
    overview.add_the_rest(())
    return overview.losses


def opened(place: Path) -> Capture | None:
    """Return the capture of a run that may have recorded none."""
    try:
        return open_capture(place)
    except TrueupError:
        return None


def _ended(code: int) -> str:
    if code > 128:
        try:
            return f"it was killed by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"it ended with exit code {code}"


def last_line(output: Path) -> str:
    """Return a command's last line, and where the rest is: ``: no such file (runs/1.txt)``."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - LAST_WORDS))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return f": {redacted(lines[-1])[:200]} ({output})" if lines else ""


def _remarks(reports: Iterable[Mapping[str, Any]], off: Sequence[str]) -> list[str]:
    said: dict[str, None] = {}
    for report in reports:
        for told in (report.get("switches") or {}).values():
            for name in off:
                if name in told.get("failed", {}):
                    said[f"{name} could not be switched off: {told['failed'][name]}"] = None
                for seen in told.get("seen", {}).get(name, ()):
                    said[f"{name}: {seen}"] = None
    return list(said)


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
    environment: dict[str, str | int | float] = msgspec.field(default_factory=dict)
    call: tuple[Any, ...] = ()  # ``[function, arguments ...]`` each; like ``set`` and ``adapter`` for `engine.replacing`
    set: dict[str, Any] = msgspec.field(default_factory=dict)
    adapter: dict[str, Any] = msgspec.field(default_factory=dict)
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
