"""What two runs are set to, side by side: the settings that differ, and what each may do to the numbers. Pure: it reads the
manifests of two ranks (``settings``, ``seeds``, ``environment``, ``versions``), and knows no framework."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from trueup.foundation import toml
from trueup.foundation.frameworks.trees import path

Group = Literal["optimizer", "module", "data", "seed", "random", "argument", "switch", "version"]
Severity = Literal["changes", "may", "cannot"]
GROUPS: tuple[Group, ...] = ("optimizer", "module", "data", "seed", "random", "argument", "switch", "version")
SEVERITIES: tuple[Severity, ...] = ("changes", "may", "cannot")

ALWAYS: tuple[Group, ...] = ("seed", "switch", "version")  # groups of which every recorded run says something
OF_PARAMETERS = (".requires_grad", ".tied_to")  # ends of names of what a module says of a parameter: frozen, another one
DTYPE = ".dtype"
ABSENT = "not set"  # stands for a setting that one of the runs does not have


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that differs, or one that several modules have alike."""

    group: Group
    kind: str  # class of the optimizer, of the module, of the loader; else empty
    name: str
    baseline: Any
    candidate: Any
    severity: Severity
    places: tuple[str, ...] = ()  # scopes of the modules, or groups of the optimizer, that have it so
    step: int | None = None  # first step in which it differs, where that is not the first


def differing(baseline: Mapping[str, Any], candidate: Mapping[str, Any], last: int | None = None) -> list[Setting]:
    """Return what differs between the manifests of two ranks, what changes numbers first; nothing of two frameworks, whose names
    and values differ anyway. Schedules are compared up to ``last``, the last step that both runs made."""
    if baseline.get("framework") != candidate.get("framework"):
        return []
    modules = list(_modules(baseline, candidate))
    found = [*_optimizers(baseline, candidate, last), *modules, *_data(baseline, candidate)]
    if any(one.name.endswith(OF_PARAMETERS) for one in modules):  # then an optimizer holds other parameters for that reason
        found = [one for one in found if (one.group, one.name) != ("optimizer", "parameters")]
    held = held_by(baseline), held_by(candidate)
    tables: list[tuple[Group, Any, Any]] = [
        ("seed", baseline.get("seeds"), candidate.get("seeds")),
        ("random", held[0].get("random"), held[1].get("random")),
        ("argument", held[0].get("arguments"), held[1].get("arguments")),
        ("switch", baseline.get("environment"), candidate.get("environment")),
        ("version", baseline.get("versions"), candidate.get("versions")),
    ]
    for group, *sides in tables:
        first, second = (side if isinstance(side, Mapping) else {} for side in sides)
        if group in ALWAYS and not (first and second):  # an imported dump does not say
            continue
        unlike = _unlike(first, second)
        found += [Setting(group, "", name, *values, severity(group, name)) for name, values in unlike]
    return sorted(found, key=lambda s: (SEVERITIES.index(s.severity), GROUPS.index(s.group)))


@lru_cache(maxsize=1)
def _table() -> dict[str, list[dict[str, str]]]:
    return toml.packaged("trueup.foundation", "facts", "settings.toml")


@lru_cache(maxsize=1)
def _severities() -> dict[str, list[tuple[list[str], Severity]]]:
    return {group: [(row["names"].split(), cast(Severity, row["severity"])) for row in rows] for group, rows in _table().items()}


@lru_cache(maxsize=1)
def _facts() -> dict[str, dict[str, str]]:
    return {name: row for row in reversed(_table()["switch"]) if "means" in row for name in row["names"].split()}


def fact(name: str) -> dict[str, str] | None:
    """Return what is known of a variable or compile option: its default, what it does, where that is written; None if nothing
    is."""
    return _facts().get(name)


def conflicts() -> list[dict[str, str]]:
    """Return the rows of what does not go together: names, when (conditions), says, severity, origin."""
    return _table()["conflict"]


def severity(group: Group, name: str) -> Severity:
    """Return what a setting may do to the numbers; a version may."""
    for names, found in _severities().get(group, []):
        if any(fnmatch.fnmatchcase(name, one) for one in names):
            return found
    return "may"


def held_by(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a manifest says of settings; a manifest is anybody's, and what is of another kind is not there."""
    held = manifest.get("settings")
    return held if isinstance(held, Mapping) else {}


def list_of(held: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the tables of a list, of which what is no table is left out."""
    part = held.get(name)
    return [one for one in part if isinstance(one, Mapping)] if isinstance(part, list) else []


def modules_of(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what the modules are set to, by scope."""
    part = held_by(manifest).get("modules")
    return {str(s): module for s, module in part.items() if isinstance(module, Mapping)} if isinstance(part, Mapping) else {}


def _unlike(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in dict.fromkeys((*first, *second)):
        values = first.get(name, ABSENT), second.get(name, ABSENT)
        if values[0] != values[1]:
            yield str(name), values


def _optimizers(baseline: Mapping[str, Any], candidate: Mapping[str, Any], last: int | None) -> Iterator[Setting]:
    sides = [list_of(held_by(manifest), "optimizers") for manifest in (baseline, candidate)]
    classes = [", ".join(str(one.get("class", "")) for one in side) for side in sides]
    if all(sides) and len(sides[0]) != len(sides[1]):  # a run that says of none may have ended before it stepped
        yield Setting("optimizer", "", "optimizers", classes[0], classes[1], "changes")
    for first, second in zip(*sides, strict=False):
        kinds = str(first.get("class", "")), str(second.get("class", ""))
        if kinds[0] != kinds[1]:
            yield Setting("optimizer", "", "class", *kinds, "changes")
            both = set.intersection(*({name for _, name in _lives(one)} for one in (first, second)))
            yield from (one for one in _merged(_groups(first, second, "optimizer", last)) if one.name in both)
            continue
        for name in ("clipping", "schedule"):
            said = first.get(name, ABSENT), second.get(name, ABSENT)
            if said[0] != said[1]:
                yield Setting("optimizer", kinds[0], name, *said, "changes")
        yield from _merged(_groups(first, second, kinds[0], last))


def _groups(first: Mapping[str, Any], second: Mapping[str, Any], kind: str, last: int | None) -> Iterator[Setting]:
    lives = [_lives(one) for one in (first, second)]
    counts = [len(list_of(one, "groups")) for one in (first, second)]
    if counts[0] != counts[1]:  # which group is which is not known: each setting's values, whichever group has them
        for name in dict.fromkeys(name for _, name in (*lives[0], *lives[1])):
            here, there = (_distinct(begin for (_, own), ((_, begin), *_) in life.items() if own == name) for life in lives)
            if here != there:
                yield Setting("optimizer", kind, name, here, there, severity("optimizer", name))
        return
    for at, name in dict.fromkeys((*lives[0], *lives[1])):
        place = (f"group {at}",)
        one, other = (life.get((at, name)) for life in lives)
        if one is None or other is None:
            values = ABSENT if one is None else one[0][1], ABSENT if other is None else other[0][1]
            yield Setting("optimizer", kind, name, *values, severity("optimizer", name), place)
            continue
        for step in sorted({step for step, _ in (*one, *other) if last is None or step <= last}):
            values = _at(one, step), _at(other, step)
            if values[0] != values[1]:
                yield Setting("optimizer", kind, name, *values, severity("optimizer", name), place, step or None)
                break


def _lives(optimizer: Mapping[str, Any]) -> dict[tuple[int, str], list[tuple[int, Any]]]:
    """Return the values of each setting of each group with the steps from which they hold."""
    found: dict[tuple[int, str], list[tuple[int, Any]]] = {}
    changes = optimizer.get("changes")
    for at, group in enumerate(list_of(optimizer, "groups")):
        for name, value in group.items():
            found[at, name] = [(0, value)]
    for change in changes if isinstance(changes, list) else []:
        if isinstance(change, list) and len(change) == 3 and isinstance(change[0], int) and isinstance(change[2], Mapping):
            for name, value in change[2].items():
                found.setdefault((change[1], name), []).append((change[0], value))
    return found


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for one in values:
        found += [] if one in found else [one]  # a value may be a list
    return found


def _at(life: list[tuple[int, Any]], step: int) -> Any:
    return next((value for since, value in reversed(life) if since <= step), life[0][1])


def _modules(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[Setting]:
    sides = modules_of(baseline), modules_of(candidate)
    found = []
    for scope in (scope for scope in sides[0] if scope in sides[1]):
        kind = str(sides[1][scope].get("class", ""))
        for name, values in _unlike(*(_in_full(side[scope]) for side in sides)):
            found.append(Setting("module", kind, name, *values, severity("module", name), (scope,)))
    yield from _merged(map(_of_parameter, found))


def _in_full(module: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a module's settings with what is recorded of parameters only where it is not the rule: that they are trained."""
    parameters = [name.removesuffix(DTYPE) for name in module if name.endswith(DTYPE)]
    return {**{f"{name}.requires_grad": True for name in parameters}, **module}


def _of_parameter(setting: Setting) -> Setting:
    """Return a dtype as that of a parameter: all that are cast at once are one setting, whatever their modules."""
    if not setting.name.endswith(DTYPE):
        return setting
    place = path(setting.places[0], setting.name.removesuffix(DTYPE))
    return dataclasses.replace(setting, kind="parameter", name="dtype", places=(place,))


def _merged(found: Iterable[Setting]) -> Iterator[Setting]:
    """Make one of the settings that several places have alike; those of modules of several classes are of ``module``s."""
    alike: dict[str, list[Setting]] = {}
    for one in found:
        alike.setdefault(repr((one.name, one.baseline, one.candidate, one.step)), []).append(one)
    for same in alike.values():
        places = tuple(place for one in same for place in one.places)
        kinds = {one.kind for one in same}
        yield dataclasses.replace(same[0], places=places, kind=same[0].kind if len(kinds) == 1 else "module")


def _data(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[Setting]:
    """Compare data loaders: those that both runs have drop out; what is left is paired in order where equally many are left."""
    sides = [list_of(held_by(manifest), "data") for manifest in (baseline, candidate)]
    first, second = _without(*sides), _without(*sides[::-1])
    if len(first) != len(second):  # which is which is not known
        yield Setting("data", "", "loaders", _counted(sides[0], first), _counted(sides[1], second), severity("data", "loaders"))
        return
    for before, after in zip(first, second, strict=True):
        unlike = dict(_unlike(before, after))
        for name, values in unlike.items():
            if "." not in name or unlike.get(name.rpartition(".")[2]) != values:  # a sampler that only hands the loader's on
                yield Setting("data", str(after.get("class", "")), name, *values, severity("data", name))


def _without(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return what is left of some things once each is dropped that an equal one of the others stands for."""
    left = list(some)
    for one in others:
        if one in left:
            left.remove(one)
    return left


def _counted(loaders: Sequence[Any], own: Sequence[Mapping[str, Any]]) -> str:
    """Say how many loaders a run has, and which of them the other one lacks: ``2 (DataLoader 8 RandomSampler)``."""
    said = ", ".join(" ".join(str(one[name]) for name in ("class", "batch_size", "sampler") if name in one) for one in own)
    return f"{len(loaders)} ({said})" if said else str(len(loaders))
