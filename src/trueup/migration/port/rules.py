"""The rules of a port, as `rules.toml` and the files of users say them."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from trueup.foundation import toml
from trueup.foundation.model import TrueupError

Kind = Literal["device", "backend", "type"]


class Target(toml.Table):
    """What is written for the device in the scripts of one target."""

    device: str
    here: str
    word: str
    backend: str
    module: str
    imports: str | None = msgspec.field(default=None, name="import")

    def fill(self, text: str, name: str = "") -> str:
        """Return a rule's text with what the target has for its places."""
        for place, value in (("name", name), ("device", self.device), ("here", self.here), ("module", self.module)):
            text = text.replace(f"{{{place}}}", value)
        return text


class Name(toml.Table):
    """Names of functions and classes, and what they are called elsewhere."""

    id: str
    under: str
    names: tuple[str, ...]
    example: tuple[str, str, str]
    npu: str | None = None
    agnostic: str | None = None
    first: str | None = None
    positional: tuple[str, ...] = ()
    keyword: str | None = None
    since: str | None = None
    imports: str | None = msgspec.field(default=None, name="import")


class Switch(toml.Table):
    """An argument that says whether CUDA is used, and the one that names a device instead."""

    id: str
    calls: tuple[str, ...]
    keyword: str
    becomes: str
    example: tuple[str, str, str]
    since: str | None = None


class Sink(toml.Table):
    """Functions that take a device, and where."""

    calls: tuple[str, ...]
    keywords: tuple[str, ...]
    position: int | None = None
    kind: Kind = "device"


class Left(toml.Table):
    """Names that stay as they are, and why."""

    names: tuple[str, ...]
    reason: str
    unsupported: bool = False


class Rules(toml.Table, dict=True):
    """All rules. A name is looked for from its longest beginning on, so what stands below a name that has a rule has it too."""

    target: dict[str, Target]
    name: tuple[Name, ...]
    switch: tuple[Switch, ...]
    sink: tuple[Sink, ...]
    left: tuple[Left, ...]
    known: dict[str, str] = {}  # noqa: RUF012 - a struct copies its defaults
    """A method and an attribute of tensors, and a name of PyTorch's, that name CUDA: by the rule that changes them."""
    variable: dict[str, str] = {}  # noqa: RUF012
    """Variables of the environment, and what an NPU's are called."""
    similar: tuple[Name, ...] = ()
    """Names that become ones which do nearly the same, where that is asked for."""

    def with_similar(self) -> Rules:
        """Return the rules with those of `similar` among the names."""
        return msgspec.structs.replace(self, name=(*self.name, *self.similar), similar=())

    @functools.cached_property
    def names(self) -> dict[str, tuple[Name, str]]:
        """Return each qualified name's rule, and its name behind `under`."""
        return {f"{rule.under}.{name}": (rule, name) for rule in self.name for name in rule.names}

    @functools.cached_property
    def stays(self) -> dict[str, Left]:
        """Return each qualified name that stays."""
        return {name: left for left in self.left for name in left.names}

    def why_stays(self, qualified: str | None) -> Left | None:
        """Return the rule by which a name stays: its own, or that of the longest name it begins with."""
        while qualified:
            if qualified in self.stays:
                return self.stays[qualified]
            qualified = qualified.rpartition(".")[0]
        return None

    def sinks(self, qualified: str | None, method: str | None) -> list[Sink]:
        """Return the places of a call that take a device: of a function by its qualified name, of a method by its own."""
        return [rule for rule in self.sink if any(_fits(call, qualified, method) for call in rule.calls)]


def _fits(call: str, qualified: str | None, method: str | None) -> bool:
    if call.startswith("*."):
        wanted = call[2:]
        return method is not None and (method.startswith(wanted[:-1]) if wanted.endswith("*") else method == wanted)
    if qualified is None:
        return False
    return qualified.startswith(call[:-1]) if call.endswith(".*") else qualified == call


@functools.cache
def builtin() -> Rules:
    """Return the rules that come along."""
    return toml.checked(toml.packaged("trueup.migration.port", "rules.toml"), Rules)


class Argument(toml.Table):
    """An argument of a function becomes another text."""

    func_name: str
    arg_idx: int
    arg_new: str


class Function(toml.Table):
    """A function gets another name."""

    old_name: str
    new_name: str


class Module(toml.Table):
    """A module gets another name."""

    old_name: str
    new_name: str
    parent_module: str = ""

    @property
    def full(self) -> str:
        """Return its full name before."""
        return f"{self.parent_module}.{self.old_name}" if self.parent_module else self.old_name

    @property
    def new(self) -> str:
        """Return its full name behind."""
        return f"{self.parent_module}.{self.new_name}" if self.parent_module else self.new_name


class Converters(toml.Table):
    """Rules of a user, under the names that MindStudio's converter gave them."""

    ArgsModifyRule: tuple[Argument, ...] = ()
    FuncNameModifyRule: tuple[Function, ...] = ()
    ModuleNameModifyRule: tuple[Module, ...] = ()

    def __post_init__(self) -> None:
        for text in (*(one.arg_new for one in self.ArgsModifyRule), *(one.new_name for one in self.FuncNameModifyRule)):
            _expression(text)
        for module in self.ModuleNameModifyRule:
            if not all(part.isidentifier() for part in module.new_name.split(".")):
                raise ValueError(f"{module.new_name!r} is no name of a module")

    def new_name(self, qualified: str) -> str | None:
        """Return what an imported name is called by the rules for modules and functions; None for the name that it has."""
        for module in self.ModuleNameModifyRule:
            if _below(qualified, module.full) and not _below(qualified, module.new):
                return module.new + qualified[len(module.full) :]
        for function in self.FuncNameModifyRule:
            of, _, last = qualified.rpartition(".")
            if function.old_name in (last, qualified) and "." not in function.new_name:
                return f"{of}.{function.new_name}"
        return None


def _below(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


class _File(toml.Table):
    rules: Converters


class OwnName(Name, kw_only=True):
    """Names of a user's, from one version of PyTorch on and before another."""

    until: str | None = None

    def __post_init__(self) -> None:
        for text in (self.npu, self.agnostic):
            if text is not None:
                _expression(text.replace("{name}", "name").replace("{module}", "module"))


class Given(toml.Table):
    """An argument of functions, by place or name, becomes another text."""

    id: str
    calls: tuple[str, ...]
    becomes: str
    example: tuple[str, str, str]
    position: int | None = None
    keyword: str | None = None
    since: str | None = None
    until: str | None = None

    def __post_init__(self) -> None:
        _expression(self.becomes)
        if self.position is None and self.keyword is None:
            raise ValueError("expected a position or a keyword")

    def takes(self, qualified: str | None, method: str | None) -> bool:
        """Return whether a call is meant: of a function by its whole name, of a method by ``*.name``."""
        return any(_fits(call, qualified, method) for call in self.calls)


class OwnSink(Sink, kw_only=True):
    """Functions of a user's that take a device."""

    id: str
    example: tuple[str, str, str]
    since: str | None = None
    until: str | None = None


class OwnRules(toml.Table):
    """A user's file in TOML."""

    name: tuple[OwnName, ...] = ()
    argument: tuple[Given, ...] = ()
    sink: tuple[OwnSink, ...] = ()
    left: tuple[Left, ...] = ()

    def __post_init__(self) -> None:
        names: list[str] = [one.id for one in self.shown]
        known = {one.id for one in (*builtin().name, *builtin().similar)} | {one.id for one in builtin().switch}
        twice = next((name for name in names if names.count(name) > 1 or name in known), None)
        if twice is not None:
            raise ValueError(f"there are two rules {twice!r}" + (", one of them Trueup's" if twice in known else ""))

    @property
    def shown(self) -> list[OwnName | Given | OwnSink]:
        """Return the rules that have an example."""
        shown: list[OwnName | Given | OwnSink] = []
        for some in (self.name, self.argument, self.sink):
            shown += some
        return shown

    def holding(self, version: str) -> OwnRules:
        """Return those that hold for a version of PyTorch."""
        name, argument, sink = (
            tuple(one for one in some if _holds(one.since, one.until, version)) for some in (self.name, self.argument, self.sink)
        )
        return OwnRules(name, argument, sink, self.left)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Own:
    """Rules of a user: MindStudio's in JSON, or Trueup's in TOML."""

    converters: Converters = field(default_factory=Converters)
    rules: OwnRules = field(default_factory=OwnRules)

    def beside(self, known: Rules) -> Rules:
        """Return the known rules and the user's, who comes first where both say something of a name."""
        stays = {name for one in self.rules.left for name in one.names}
        names: list[Name] = []
        for one in known.name:
            kept = tuple(name for name in one.names if f"{one.under}.{name}" not in stays)
            names.append(msgspec.structs.replace(one, names=kept))
        sinks, left = (*known.sink, *self.rules.sink), (*known.left, *self.rules.left)
        return msgspec.structs.replace(known, name=(*names, *self.rules.name), sink=sinks, left=left)


def _expression(text: str) -> None:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        raise ValueError(f"{text!r} is no expression of Python") from None


def _holds(since: str | None, until: str | None, version: str) -> bool:
    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

    return (since is None or number(since) <= number(version)) and (until is None or number(version) < number(until))


def own(path: Path) -> Own:
    """Read a user's rules: TOML, or JSON ``{"rules": {"ArgsModifyRule": [...], ...}}``; raises TrueupError for anything else."""
    see, kind = "docs/port.md shows one", "TOML" if path.suffix == ".toml" else "JSON"
    text = toml.text_of(path, f"rules as {kind}", see)
    try:
        if kind == "TOML":
            return Own(rules=toml.checked(toml.parsed(text), OwnRules))
        return Own(toml.checked(msgspec.json.decode(text.encode()), _File).rules)
    except (msgspec.DecodeError, ValueError) as error:
        raise refused(path, kind, str(error)) from None


def refused(path: Path, kind: str, why: str) -> TrueupError:
    """Return the error of rules that cannot be used."""
    return TrueupError(
        f"The rules in {path} cannot be used.\n  expected: rules as {kind}\n  got:      {why}\n  next:     docs/port.md shows one"
    )
