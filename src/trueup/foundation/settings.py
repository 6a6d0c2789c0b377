"""What two runs are set to, side by side: the settings that differ, and what each may do to the numbers. Pure: it reads the
manifests of two ranks (``settings``, ``seeds``, ``environment``, ``versions``), and knows no framework."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args

from trueup.foundation import toml
from trueup.foundation.frameworks.trees import AUTOCAST, DTYPE, LIES, TIED, TRAINED, path

Group = Literal["optimizer", "scaler", "module", "data", "seed", "random", "parallel", "argument", "switch", "version", "code"]
Severity = Literal["changes", "may", "cannot"]
GROUPS: tuple[Group, ...] = get_args(Group)
SEVERITIES: tuple[Severity, ...] = ("changes", "may", "cannot")

ALWAYS: tuple[Group, ...] = ("seed", "parallel", "switch", "version", "code")  # groups of which every recorded run says something
LATER = (
    ("module", AUTOCAST), ("optimizer", "clipping"), ("optimizer", "schedule"), ("data", "samples"), ("seed", "python"),
    ("seed", "numpy"),
)  # fmt: skip
GROUP = "group "  # how the place begins of what a group of an optimizer is set to; else it is a parameter
OF_PARAMETERS = (TRAINED, TIED)  # a parameter is frozen, or another one
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
    """Return what differs between the manifests of two ranks, what changes numbers first; of two frameworks what the tables know
    of both. Schedules are compared up to ``last``, the last step that both runs made."""
    if baseline.get("framework") != candidate.get("framework"):
        return _of_frameworks(baseline, candidate, last)
    modules = [one for one in _modules(baseline, candidate) if not _unsaid(one)]
    found = [*_optimizers(baseline, candidate, last), *_scalers(baseline, candidate), *modules, *_data(baseline, candidate)]
    if any(one.name.endswith(OF_PARAMETERS) for one in modules):  # then an optimizer holds other parameters for that reason
        found = [one for one in found if (one.group, one.name) != ("optimizer", "parameters")]
    held = held_by(baseline), held_by(candidate)
    tables: list[tuple[Group, Any, Any]] = [
        ("seed", seeds_of(baseline), seeds_of(candidate)),
        ("random", held[0].get("random"), held[1].get("random")),
        ("parallel", _parallel(baseline), _parallel(candidate)),
        ("argument", *_of_one_name(held[0].get("arguments"), held[1].get("arguments"))),
        ("switch", *_of_one_device(baseline.get("environment"), candidate.get("environment"))),
        ("version", baseline.get("versions"), candidate.get("versions")),
        ("code", *_of_both(baseline.get("code"), candidate.get("code"))),
    ]
    for group, *sides in tables:
        first, second = (side if isinstance(side, Mapping) else {} for side in sides)
        if group in ALWAYS and not (first and second):  # an imported dump does not say
            continue
        unlike = _unlike(first, second)
        found += [Setting(group, "", name, *values, severity(group, name)) for name, values in unlike]
    forms = [side.get("form", 1) for side in held]
    if forms[0] != forms[1]:
        found = [one for one in found if not _later(one)]
    return sorted(found, key=lambda s: (SEVERITIES.index(s.severity), GROUPS.index(s.group)))


def _of_frameworks(baseline: Mapping[str, Any], candidate: Mapping[str, Any], last: int | None) -> list[Setting]:
    """Return what differs between two frameworks, by PyTorch's names; what one side does not say has no counterpart there."""
    from trueup.foundation.frameworks.dialect import neutral_modules, neutral_optimizers, same

    sides = []
    for manifest in (baseline, candidate):
        framework = str(manifest.get("framework", ""))
        optimizers = neutral_optimizers(list_of(held_by(manifest), "optimizers"), framework)
        sides.append({"settings": {"optimizers": optimizers, "modules": dict(neutral_modules(modules_of(manifest), framework))}})
    for first, second in zip(*(side["settings"]["optimizers"] for side in sides), strict=False):
        if len({frozenset(name for group in names_held(one) for name in group) for one in (first, second)}) > 1:
            for one in (first, second):  # their parameters have other names
                one.pop("parameters", None)
        said = [{name for group in one["groups"] for name in group} for one in (first, second)]
        for group in (*first["groups"], *second["groups"]):
            for name in said[0] ^ said[1]:
                group.pop(name, None)
    found = [*_optimizers(sides[0], sides[1], last), *_modules(sides[0], sides[1])]
    told = [one for one in found if one.name != "clipping" and ABSENT not in (one.baseline, one.candidate)]
    for one in (one for one in found if one.name == "clipping"):  # a script may clip by hand, which no manifest says
        values = ["none of its own" if value == ABSENT else value for value in (one.baseline, one.candidate)]
        told.append(dataclasses.replace(one, baseline=values[0], candidate=values[1]))
    return [one for one in told if not same(one.baseline, one.candidate)]


def _unsaid(setting: Setting) -> bool:
    """Tell whether one run alone says how a weight lies: a capture of an earlier version says it of none."""
    return setting.name.endswith(LIES) and ABSENT in (setting.baseline, setting.candidate)


def _later(setting: Setting) -> bool:
    """Tell whether one side does not say what a setting is there because only a later form of captures records it."""
    added = setting.group in ("scaler", "parallel") or (setting.group, setting.name) in LATER
    return added and ABSENT in (setting.baseline, setting.candidate)


@lru_cache(maxsize=1)
def _table() -> dict[str, list[dict[str, str]]]:
    return toml.packaged("trueup.foundation", "facts", "settings.toml")


@lru_cache(maxsize=1)
def _severities() -> dict[str, list[tuple[list[str], Severity]]]:
    return {
        group: [(row["names"].split(), cast(Severity, row["severity"])) for row in rows if "severity" in row]
        for group, rows in _table().items()
    }


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


def odd_switches() -> list[dict[str, str]]:
    """Return the rows of switches that are odd by themselves: name, values, devices (beginnings of their names), says, origin."""
    return _table()["odd"]


@lru_cache(maxsize=1)
def aliases() -> dict[str, str]:
    """Return the name under which an argument of scripts is known, by each name that some framework or script gives it."""
    return {name: row["names"].split()[0] for row in _table()["alias"] for name in row["names"].split()}


def origin(group: Group, name: str) -> str:
    """Return where it is written what a setting may do to the numbers."""
    rows = _table().get(group, [])
    return next((row["origin"] for row in rows if any(fnmatch.fnmatchcase(name, one) for one in row["names"].split())), "")


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


def seeds_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seeds of a run's generators, by framework or ``python`` and ``numpy``."""
    parts = [part for part in (manifest.get("seeds"), held_by(manifest).get("seeds")) if isinstance(part, Mapping)]
    return {str(name): value for part in parts for name, value in part.items()}


def _parallel(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how the ranks of a run stand together: their number, and the groups in which they communicate."""
    held = manifest.get("parallel")
    world = manifest.get("world_size")
    return ({"ranks": world} if isinstance(world, int) else {}) | (dict(held) if isinstance(held, Mapping) else {})


def _of_both(first: Any, second: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what both sides name: two scripts of other names are no settings of each other."""
    sides = [side if isinstance(side, Mapping) else {} for side in (first, second)]
    both = sides[0].keys() & sides[1].keys()
    found = [{name: value for name, value in side.items() if name in both} for side in sides]
    return found[0], found[1]


def _of_one_device(first: Any, second: Any) -> tuple[Any, Any]:
    """Return switches without those of a device that one run does not have (it sets none named ``npu.``), where they are off: on
    a device that is not there, nothing is on either."""
    sides = [side if isinstance(side, Mapping) else {} for side in (first, second)]
    kinds = [{str(name).partition(".")[0] for name in side} for side in sides]

    def alike(name: str, value: Any, other: set[str]) -> bool:
        kind, dot, _ = str(name).partition(".")
        return bool(dot) and kind not in other and value in (False, "False")

    kept = [{n: v for n, v in side.items() if not alike(n, v, other)} for side, other in zip(sides, reversed(kinds), strict=True)]
    return kept[0], kept[1]


def _of_one_name(first: Any, second: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments with those that the sides call differently (``lr``, ``learning_rate``) under the baseline's name."""
    sides = [dict(side) if isinstance(side, Mapping) else {} for side in (first, second)]
    known = {alias: name for name in sides[0] if (alias := aliases().get(_last(name))) and name not in sides[1]}
    found = {known.get(aliases().get(_last(name), ""), name) if name not in sides[0] else name: v for name, v in sides[1].items()}
    return sides[0], found


def _last(name: Any) -> str:
    return str(name).rpartition(".")[2]


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
        yield from _parameters(first, second, kinds[0])
        for name in ("clipping", "schedule"):
            said = first.get(name, ABSENT), second.get(name, ABSENT)
            if said[0] != said[1]:
                yield Setting("optimizer", kinds[0], name, *said, "changes")
        yield from _merged(_groups(first, second, kinds[0], last))


def names_held(optimizer: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, by group; empty where they are not known."""
    held = optimizer.get("parameters")
    good = isinstance(held, list) and all(isinstance(group, list) for group in held)
    return [[str(one) for one in group] for group in held] if good and isinstance(held, list) else []


def _parameters(first: Mapping[str, Any], second: Mapping[str, Any], kind: str) -> Iterator[Setting]:
    """Say which parameters the optimizer of one side alone has."""
    held = [[name for group in names_held(one) for name in group] for one in (first, second)]
    alone = [sorted(set(mine) - set(others)) for mine, others in (held, held[::-1])]
    if all(held) and any(alone):
        values = [f"{len(mine):,}" + (f", with {_some(own)}" if own else "") for mine, own in zip(held, alone, strict=True)]
        yield Setting("optimizer", kind, "parameters", values[0], values[1], "changes")


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _scalers(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[Setting]:
    sides = [
        [one for one in list_of(held_by(manifest), "scalers") if one.get("enabled") is not False]
        for manifest in (baseline, candidate)
    ]
    classes = [", ".join(str(one.get("class", "")) for one in side) or ABSENT for side in sides]
    if len(sides[0]) != len(sides[1]):
        yield Setting("scaler", "", "scalers", classes[0], classes[1], "changes")
        return
    for first, second in zip(*sides, strict=True):
        for name, values in _unlike(first, second):
            yield Setting("scaler", str(second.get("class", "")), name, *values, severity("scaler", name))


def _groups(first: Mapping[str, Any], second: Mapping[str, Any], kind: str, last: int | None) -> Iterator[Setting]:
    """Compare the settings of groups; where parameters moved between them, what each parameter is updated with."""
    lives = [_lives(one) for one in (first, second)]
    names = [names_held(one) for one in (first, second)]
    both = set().union(*names[0]) & set().union(*names[1])
    if both and len({tuple(frozenset(group) & both for group in side) for side in names}) > 1:
        lives = [_lives_of_parameters(one, both) for one in (first, second)]
    elif len(list_of(first, "groups")) != len(list_of(second, "groups")):
        # Which group is which is not known: each setting's values, whichever group has them.
        for name in dict.fromkeys(name for _, name in (*lives[0], *lives[1])):
            here, there = (_distinct(begin for (_, own), ((_, begin), *_) in life.items() if own == name) for life in lives)
            if here != there:
                here, there = (here[0], there[0]) if len(here) == 1 == len(there) else (here, there)
                yield Setting("optimizer", kind, name, here, there, severity("optimizer", name))
        return
    for place, name in dict.fromkeys((*lives[0], *lives[1])):
        one, other = (life.get((place, name)) for life in lives)
        # How many they are: which ones is known, or nobody knows what flat buffers hold.
        if name == "parameters" and (both or any(life == [(0, None)] for life in (one, other))):
            continue
        if one is None or other is None:
            values = ABSENT if one is None else one[0][1], ABSENT if other is None else other[0][1]
            yield Setting("optimizer", kind, name, *values, severity("optimizer", name), (place,))
            continue
        for step in sorted({step for step, _ in (*one, *other) if last is None or step <= last}):
            values = _at(one, step), _at(other, step)
            if values[0] != values[1]:
                yield Setting("optimizer", kind, name, *values, severity("optimizer", name), (place,), step or None)
                break


Lives = dict[tuple[str, str], list[tuple[int, Any]]]
"""Values of a setting with the steps from which they hold, by place (`GROUP` and its number, or a parameter) and name."""


def _lives(optimizer: Mapping[str, Any]) -> Lives:
    found: Lives = {}
    changes = optimizer.get("changes")
    for at, group in enumerate(list_of(optimizer, "groups")):
        for name, value in group.items():
            found[f"{GROUP}{at}", name] = [(0, value)]
    for change in changes if isinstance(changes, list) else []:
        if isinstance(change, list) and len(change) == 3 and isinstance(change[0], int) and isinstance(change[2], Mapping):
            for name, value in change[2].items():
                found.setdefault((f"{GROUP}{change[1]}", name), []).append((change[0], value))
    return found


def _lives_of_parameters(optimizer: Mapping[str, Any], wanted: Container[str]) -> Lives:
    """Return the same of each parameter."""
    of = {f"{GROUP}{at}": group for at, group in enumerate(names_held(optimizer))}
    lives = _lives(optimizer).items()
    return {(one, name): life for (place, name), life in lives for one in of.get(place, ()) if one in wanted}


def values_by_step(manifest: Mapping[str, Any], kind: str, place: str, name: str) -> list[tuple[int, Any]]:
    """Return the values of a setting of an optimizer of that class, in a place (``group 0``), with the steps from which they hold;
    none where the run has several such optimizers."""
    held = [one for one in list_of(held_by(manifest), "optimizers") if one.get("class") == kind]
    lives = _lives(held[0]) if len(held) == 1 else {}
    return lives.get((place, name), [])


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
        held = [_in_full(side[scope]) for side in sides]
        if held[0].get("class") != held[1].get("class"):  # then it has other attributes, too
            held = [{name: value for name, value in one.items() if name in held[0] and name in held[1]} for one in held]
        for name, values in _unlike(*held):
            if name.endswith(DTYPE) and ABSENT in values:  # a parameter that one run alone has: it is trained, or frozen, there
                continue
            found.append(Setting("module", kind, name, *values, severity("module", name), (scope,)))
    yield from _merged(map(_of_parameter, found))


def _in_full(module: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a module's settings with what is recorded of parameters only where it is not the rule: that they are trained."""
    parameters = [name.removesuffix(DTYPE) for name in module if name.endswith(DTYPE)]
    return {**{f"{name}{TRAINED}": True for name in parameters}, **module}


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
