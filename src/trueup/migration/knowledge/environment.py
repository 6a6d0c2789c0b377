"""`environment`: the variables and options that a training runs with, on one machine or two: what holds, what does not go together,
what changes numbers, and how the host is set up. What is known of each variable is a row of ``foundation/facts/settings.toml``.

A machine is this process, a capture (its manifest says what the training ran with), a document of ``trueup env --json``, or a file
of ``NAME=value`` lines as ``env`` prints them. Only variables that are known are read, and secrets in them are masked.
"""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from trueup.foundation import toml
from trueup.foundation.model import TrueupError
from trueup.foundation.redaction import is_recorded, redacted
from trueup.foundation.redaction import recorded as recorded_of
from trueup.foundation.settings import ABSENT, SEVERITIES, Setting, Severity, conflicts, fact, severity
from trueup.foundation.store import open_capture
from trueup.foundation.words.wording import counted

PACKAGES = (
    "torch",
    "torch_npu",
    "numpy",
    "paddlepaddle",
    "paddlepaddle-gpu",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "deepspeed",
    "transformers",
)
SCHEMA = "trueup-env"
LARGEST = 4 << 20  # bytes of a file that says an environment


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable or option: the value that holds, the default (empty where it is not known), whether it was set, and what it may do
    to numbers."""

    name: str
    value: str
    default: str
    set: bool
    severity: Severity
    means: str
    origin: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """Variables that do not go together, or one that is set in a way that is seldom meant."""

    names: tuple[str, ...]
    says: str
    severity: Severity
    origin: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Something of the host that slows a training down: where that was read, what stands there, and what to do."""

    what: str
    where: str
    got: str
    remedy: str


@dataclass(frozen=True)
class Machine:
    """What one machine runs with."""

    where: str
    values: Mapping[str, str]  # of variables that are set
    versions: Mapping[str, str]
    advice: tuple[Advice, ...] = ()

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Return the variables that are set, what changes numbers first."""
        rows = [_variable(name, value) for name, value in sorted(self.values.items())]
        return tuple(sorted(rows, key=lambda one: SEVERITIES.index(one.severity)))

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Return what does not go together, what changes numbers first."""
        held = [row for row in conflicts() if all(_holds(term, self.values) for term in row["when"].split())]
        held.sort(key=lambda row: SEVERITIES.index(row["severity"]))
        return tuple(
            Conflict(tuple(row["names"].split()), row["says"], cast(Severity, row["severity"]), row["origin"]) for row in held
        )


@dataclass(frozen=True)
class Environments:
    """One machine, or two side by side. ``differences`` are settings of which other values hold."""

    machines: tuple[Machine, ...]
    differences: tuple[Setting, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return 0 where all goes together and nothing that changes numbers differs, else 1."""
        changes = any(one.severity == "changes" for one in self.differences)
        return 1 if changes or any(machine.conflicts for machine in self.machines) else 0

    @property
    def sentence(self) -> str:
        """Return the conclusion in a sentence."""
        found = [conflict for machine in self.machines for conflict in machine.conflicts]
        if len(self.machines) == 2:
            changes = [one for one in self.differences if one.severity == "changes"]
            if changes:
                one = changes[0]
                more = f", and {counted(len(changes) - 1, 'more such setting')}" if len(changes) > 1 else ""
                return f"{one.name} is {one.baseline} in the first and {one.candidate} in the second, which changes numbers{more}."
            may = sum(one.severity == "may" for one in self.differences)
            rest = f"; {counted(may, 'setting')} may change them" if may else ""
            return f"Nothing that changes numbers differs{rest}."
        if found:
            more = f" ({counted(len(found) - 1, 'more conflict')})" if len(found) > 1 else ""
            return f"{found[0].says[0].upper()}{found[0].says[1:]}.{more}"
        count = len(self.machines[0].values)
        return f"{counted(count, 'known variable')} set, and nothing conflicts." if count else "No known variable is set."

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        machines = [
            {
                "where": one.where,
                "values": dict(one.values),
                "versions": dict(one.versions),
                "variables": [asdict(variable) for variable in one.variables],
                "conflicts": [asdict(conflict) for conflict in one.conflicts],
                "advice": [asdict(advice) for advice in one.advice],
            }
            for one in self.machines
        ]
        differences = [
            {"group": one.group, "name": one.name, "first": one.baseline, "second": one.candidate, "severity": one.severity}
            for one in self.differences
        ]
        head = {"schema": SCHEMA, "schema_version": 1, "sentence": self.sentence, "exit_code": self.exit_code}
        return {**head, "machines": machines, "differences": differences}


def environments(given: Sequence[str] = ()) -> Environments:
    """Say what one machine or two run with.

    Args:
        given: none: this process; one or two: captures, documents of ``trueup env --json``, files of ``NAME=value`` lines.

    Raises:
        TrueupError: there are more than two, or one cannot be read.
    """
    if len(given) > 2:
        raise TrueupError(f"Too many machines.\n  expected: at most two\n  got:      {len(given)}\n  next:     trueup env A B")
    machines = tuple(_machine(Path(one)) for one in given) or (this_machine(os.environ),)
    if len(machines) < 2:
        return Environments(machines)
    return Environments(machines, tuple(_differences(*machines)))


def _differences(first: Machine, second: Machine) -> list[Setting]:
    """Return the variables of which other values hold, defaults included, and other versions; what changes numbers first.

    Switches of a framework are compared where both sides say some: a file of variables knows none.
    """
    found = []
    both = all(any(not _VARIABLE.fullmatch(name) for name in machine.values) for machine in (first, second))
    for name in sorted(name for name in {*first.values, *second.values} if both or _VARIABLE.fullmatch(name)):
        values = first.values.get(name, ABSENT), second.values.get(name, ABSENT)
        if _holding(name, values[0]) != _holding(name, values[1]):
            found.append(Setting("switch", "", name, values[0], values[1], severity("switch", name)))
    for name in sorted({*first.versions, *second.versions}) if first.versions and second.versions else ():
        values = first.versions.get(name, ABSENT), second.versions.get(name, ABSENT)
        if values[0] != values[1]:
            found.append(Setting("version", "", name, values[0], values[1], "may"))
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def this_machine(environment: Mapping[str, str]) -> Machine:
    """Return what this process runs with, without importing a framework."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Machine("this process", _known(environment), versions, tuple(_advice()))


def _machine(path: Path) -> Machine:
    if path.is_dir():
        capture = open_capture(path)
        manifest = next((one for _, one in sorted(capture.ranks.items())), {})
        held, versions = (manifest.get(name) for name in ("environment", "versions"))
        values = {str(name): str(value) for name, value in held.items()} if isinstance(held, Mapping) else {}
        return Machine(str(path), values, {str(k): str(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {})
    text = toml.text_of(
        path, "a capture, JSON of trueup env, or lines of NAME=value", "trueup env --json FILE on that machine", LARGEST
    )
    if text.lstrip().startswith("{"):
        return _of_document(path, text)
    lines = (re.fullmatch(r"(?:export |declare -x )?([A-Za-z_]\w*)=(.*)", line.strip()) for line in text.splitlines())
    values = {found[1]: found[2].strip("\"'") for found in lines if found}
    if not values:
        raise _refused(path, "no line of NAME=value")
    return Machine(str(path), _known(values), {})


def _of_document(path: Path, text: str) -> Machine:
    try:
        document = json.loads(text)
        first = document["machines"][0]
        if document["schema"] != SCHEMA:
            raise ValueError
        tables = [{str(name): str(value) for name, value in first[part].items()} for part in ("values", "versions")]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise _refused(path, "JSON of another kind") from None
    return Machine(str(path), _known(tables[0]), tables[1])


def _refused(path: Path, got: str) -> TrueupError:
    return TrueupError(
        f"An environment cannot be read.\n  where:    {path}\n  expected: a capture, JSON of trueup env, or lines of NAME=value\n"
        f"  got:      {got}\n"
        "  next:     on that machine: trueup env --json env.json, or env > env.txt"
    )


def _known(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are known, with secrets masked."""
    own = {
        name: redacted(value, name)[:500] for name, value in environment.items() if fact(name) is not None and not is_recorded(name)
    }
    return dict(sorted({**recorded_of(environment), **own}.items()))


def _variable(name: str, value: str) -> Variable:
    row = fact(name) or {}
    return Variable(name, value, _default(name), True, severity("switch", name), row.get("means", ""), row.get("origin", ""))


def _default(name: str) -> str:
    return str((fact(name) or {}).get("default", ""))


def _holding(name: str, value: Any) -> str:
    """Return the value that holds: the default where none is set."""
    return _default(name) if value in (None, ABSENT) else str(value)


_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*|FLAGS_\w+")  # a switch that a capture records has another name: cudnn.allow_tf32
_TERM = re.compile(r"(?P<not>!)?(?P<name>\w+)(?:(?P<than><=?)(?P<other>\w+)|(?P<unlike>!)?=(?P<glob>.*))?")


def _holds(term: str, values: Mapping[str, str]) -> bool:
    """Return whether a condition holds: ``NAME``, ``!NAME``, ``NAME=glob``, ``NAME!=glob``, ``A<B``, ``A<=B``."""
    found = _TERM.fullmatch(term)
    if found is None:
        raise ValueError(term)
    name = found["name"]
    if found["than"]:
        numbers = [_number(values.get(one, _default(one))) for one in (name, found["other"])]
        if numbers[0] is None or numbers[1] is None or not {name, found["other"]} & values.keys():
            return False
        return numbers[0] < numbers[1] or (found["than"] == "<=" and numbers[0] == numbers[1])
    if found["glob"] is not None:
        value = values.get(name)
        if value is None:
            return bool(found["unlike"]) and "*" in found["glob"][:1]  # what must hold something and is not set does not hold it
        return fnmatch.fnmatchcase(value, found["glob"]) != bool(found["unlike"])
    return (name in values) != bool(found["not"])


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text) else None


def _advice() -> list[Advice]:
    """Return what of this host slows a training down, as far as it can be read."""
    return [
        one
        for one in (_governor(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")), _pillow(), _shared(Path("/dev/shm")))
        if one
    ]


def _governor(file: Path) -> Advice | None:
    try:
        got = file.read_text("utf-8").strip()[:40]
    except (OSError, UnicodeDecodeError):
        return None
    if got == "performance":
        return None
    return Advice("CPU governor", str(file), got, "cpupower frequency-set -g performance; in the BIOS Power Policy = Performance")


def _pillow() -> Advice | None:
    names = {name.lower() for name in ("Pillow-SIMD", "Pillow") if _installed(name)}
    if names != {"pillow"} or platform.machine() not in ("x86_64", "AMD64"):
        return None
    return Advice(
        "Pillow",
        "installed packages",
        "Pillow without SIMD",
        "where loading pictures is slow: pip install pillow-simd in its place",
    )


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _shared(folder: Path) -> Advice | None:
    try:
        held = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    size = held.f_blocks * held.f_frsize
    if size >= 1 << 30:
        return None
    remedy = "docker run --shm-size=16g: workers of data loaders hand over batches there"
    return Advice("shared memory", str(folder), f"{size / 2**20:,.0f} MB", remedy)
