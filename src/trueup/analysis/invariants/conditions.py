"""The steps of a capture as relations look at them (what tensors hold, what calls were given, which calls were made), and what a
relation holds under, where it does not hold always, as TrainCheck (OSDI 2025) infers preconditions.

An example of a relation comes with features: the arguments of the call, the dtype, the rank, how often each call was made in the
step and in the one before, the step's place in a period. A condition is a set of values of one feature, or of two together, that
examples which hold the relation have, and no example which breaks it. Nothing is special to a relation or to a feature:

    arguments of dropout are {"p": 0.2, "training": true}   in steps with 1 call of Linear, not with 2: an evaluation runs, too
    input.weight of head/linear changes                     after steps with a call of AdamW, not after those that scaling skipped
    param.weight of embed/Embedding is equal                on ranks 2 apart, not on neighbours: tensor parallelism
    each parameter is equal                                 for those of the class LayerNorm, or without tensor_model_parallel
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from trueup.foundation.frameworks.trees import LIES, TRAINED
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import modules_of
from trueup.foundation.store import Capture
from trueup.foundation.store.declared import require_records
from trueup.foundation.words.wording import counted, in_runs

Key = tuple[str, str, str, str, int, str]  # level, phase, scope, op, ordinal, slot
PARAMETERS: Key = ("module", "forward", "", "parameters", 0, "param.")
"""What relations of all parameters are about, or of a class of them: they hold for layers, too, that no healthy run had."""
Called = tuple[str, str, str]  # level and phase, scope, op
LEVELS = ("module", "api")
ARGUMENTS = "arguments"
FEWEST = 3  # steps that a relation is learned from
COLUMNS = ["seq", "digest", "value", "dtype", "shape", "level", "phase", "scope", "op", "ordinal", "slot"]

SUPPORT = 3  # examples that a relation under a condition is learned from
EACH = 2  # examples with a value of a feature, before it is part of a condition
PAIRED = 24  # features that are tried two at a time
FEATURES = ("argument", "dtype", "rank", "apart", "period", "before", "calls", "attribute", "class", "parameter", "layer")
PERIODS = range(2, 11)  # steps: of an evaluation, a report, an accumulation
Value = str | int | float | bool | None


@dataclass(frozen=True)
class Step:
    """What one rank did in one step."""

    number: int
    rank: int
    digests: Mapping[Key, str] = field(repr=False)  # in order of execution
    arguments: Mapping[Key, str] = field(repr=False)
    calls: tuple[Called, ...] = field(repr=False)
    tensors: Mapping[Key, tuple[str, tuple[int, ...]]] = field(repr=False)  # dtype and shape
    whole: bool = True  # False: calls may lack, or be of another step
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)  # of parameters by their name

    @cached_property
    def counts(self) -> Counter[Called]:
        """How often each call was made."""
        return Counter(self.calls)

    @cached_property
    def sources(self) -> dict[str, list[Key]]:
        """By their digests the gradients that backward calls made."""
        found: dict[str, list[Key]] = {}
        for key, digest in self.digests.items():
            if key[1] == "backward" and key[5].startswith("grad_input"):
                found.setdefault(digest, []).append(key)
        return found

    @cached_property
    def order(self) -> dict[Key, int]:
        """The places of what is held."""
        return {key: n for n, key in enumerate((*self.digests, *self.arguments))}

    def given(self, key: Key) -> dict[str, Any]:
        """Return the arguments of the call that a tensor belongs to."""
        try:
            held = json.loads(self.arguments.get((*key[:5], ARGUMENTS), "{}"))
        except (ValueError, RecursionError):
            return {}
        return held if isinstance(held, dict) else {}


Ranks = dict[int, list[Step]]


def read_steps(capture: Capture, fewest: int) -> Ranks:
    """Read the steps of each rank; the first is left out where there are four or more. Raises TrueupError below ``fewest``."""
    require_records(capture)
    wanted = capture.steps[1:] if len(capture.steps) > FEWEST else capture.steps
    found = {rank: steps for rank in sorted(capture.ranks) if (steps := [
        step for number in wanted if (step := read_step(capture, rank, number)) is not None
    ])}  # fmt: skip
    there = min(map(len, found.values()), default=0)
    if there < fewest:
        raise TrueupError(
            f"The capture has too few steps.\n  where:    {capture.path}\n"
            f"  expected: at least {fewest} steps of levels module and api\n"
            f"  got:      {counted(there, 'step')}\n"
            "  next:     record them: trueup capture --steps 0:5 --level module --level api"
        )
    return found


def read_step(capture: Capture, rank: int, number: int, shift: int = 0) -> Step | None:
    """Read a step of a rank, None where it holds nothing; it is numbered ``shift`` more than in the capture."""
    rows: Mapping[str, Sequence[Any]] = capture.records(COLUMNS, rank=rank, step=number, level=LEVELS).to_pydict()
    digests: dict[Key, str] = {}
    arguments: dict[Key, str] = {}
    calls: dict[int, Called] = {}
    tensors: dict[Key, tuple[str, tuple[int, ...]]] = {}
    for seq, digest, value, dtype, shape, *held in zip(*(rows[name] for name in COLUMNS), strict=True):
        key: Key = tuple(held)
        calls.setdefault(seq, (f"{key[0]} {key[1]}", key[2], key[3]))
        if key[5] == ARGUMENTS and value is not None:
            arguments[key] = value
        elif digest is not None:
            digests[key] = digest
        if dtype is not None and shape is not None:
            tensors[key] = dtype, tuple(shape)
    made = tuple(calls[seq] for seq in sorted(calls))
    return Step(number + shift, rank, digests, arguments, made, tensors, attributes=attributes_of(capture, rank)) if calls else None


def attributes_of(capture: Capture, rank: int) -> dict[str, dict[str, str]]:
    """Return what parameters say of themselves, by their name: how they lie on the ranks, and whether they are trained."""
    found: dict[str, dict[str, str]] = {}
    for scope, module in modules_of(capture.ranks.get(rank, {})).items():
        for name, said in module.items():
            if name.endswith(LIES) and isinstance(said, str):
                told = {one.partition("=")[0]: one.partition("=")[2] or "True" for one in said.split()}
                found.setdefault(f"{scope}.{name.removesuffix(LIES)}", {}).update(told)
            elif name.endswith(TRAINED):
                found.setdefault(f"{scope}.{name.removesuffix(TRAINED)}", {})["requires_grad"] = str(bool(said))
    return found


@dataclass(frozen=True, slots=True)
class Example:
    """One case of a relation: what came out, and where."""

    relation: str
    key: Key | None  # of a tensor or arguments; None: of all calls of a step
    outcome: Any
    now: Step
    before: Step | None = None
    other: Step | None = None  # of another rank, the same step
    of: Key | None = None  # the parameter, where the relation is one of `PARAMETERS`


@dataclass(frozen=True, slots=True)
class Condition:
    """Values that some features have together."""

    features: tuple[str, ...]
    values: frozenset[tuple[Value, ...]]

    def holds(self, example: Example) -> bool:
        """Tell whether an example is one that the relation is about."""
        return tuple(feature(example, name) for name in self.features) in self.values

    def __str__(self) -> str:
        if len(self.features) == 1:
            return _spoken(self.features[0], sorted((one[0] for one in self.values), key=repr))
        one = min(self.values, key=repr)
        return " and ".join(_spoken(name, [value]) for name, value in zip(self.features, one, strict=True)) + (
            ", or other values of these" if len(self.values) > 1 else ""
        )


def feature(example: Example, name: str) -> Value:
    """Return a feature of an example; None where it has none."""
    what, _, which = name.partition(":")
    if example.of is not None and what in ("attribute", "class", "parameter", "layer"):
        return _of_parameter(example.now, example.of, what, which)
    if what == "argument" and example.key is not None:
        held = example.now.given(example.key).get(which)
        return held if isinstance(held, (str, int, float, bool)) else None
    if what == "dtype" and example.key is not None:
        return example.now.tensors.get(example.key, (None,))[0]
    if what == "rank":
        return example.now.rank
    if what == "apart":
        return None if example.other is None else abs(example.other.rank - example.now.rank)
    if what == "period":
        return example.now.number % int(which)
    step = example.before if what == "before" else example.now
    return None if step is None else step.counts[_called(which)]


def _of_parameter(now: Step, key: Key, what: str, which: str) -> Value:
    """Return what class of parameters one is in: by an attribute, its module's class, its own name, its layer's."""
    _, _, scope, op, _, slot = key
    if what == "attribute":
        held = now.attributes.get(f"{scope}.{slot.removeprefix('param.')}", {})
        return held.get(which, "True" if which == "requires_grad" else None)
    if what == "class":
        return op
    parts = slot.removeprefix("param.") if what == "parameter" else scope
    return next((one for one in reversed(parts.split(".")) if not one.isdigit()), "")


def _called(which: str) -> Called:
    phase, scope, op = which.split("\t")
    return phase, scope, op


def _spoken(name: str, values: Sequence[Value]) -> str:
    what, _, which = name.partition(":")
    spoken = ("not set" if one is None else str(one).lower() if isinstance(one, bool) else str(one) for one in values)
    said = " or ".join(spoken)
    if what == "argument":
        return f"where the argument {which} is {said}"
    if what == "attribute":
        return f"for parameters without {which}" if values == [None] else f"for parameters whose {which} is {said}"
    if what in ("class", "parameter", "layer"):
        of = {"class": "of the class", "parameter": "called", "layer": "of a layer called"}[what]
        return f"for parameters {of} {said}"
    if what == "dtype":
        return f"where it is {said}"
    if what == "rank":
        return f"on ranks {in_runs([int(one) for one in values if one is not None], ', ')}"
    if what == "apart":
        return f"on ranks that are {said} apart"
    if what == "period":
        return f"in steps {' and '.join(f'{which}n + {one}' for one in values)}"
    _, scope, op = _called(which)
    many = "no call" if values == [0] else "1 call" if values == [1] else f"{said} calls"
    return f"{'after' if what == 'before' else 'in'} steps with {many} of {f'{scope}/' if scope else ''}{op}"


def features_of(steps: Iterable[Step]) -> list[str]:
    """Return the features that all relations of some steps may depend on: calls that are not made equally often in each step,
    those that always vary together once; and periods."""
    held = list(steps)
    seen: dict[tuple[int, ...], str] = {}
    every = dict.fromkeys(one for step in held for one in step.calls)
    for called in sorted(every, key=lambda one: not one[0].startswith("module")):  # a module says more than the functions in it
        counts = tuple(step.counts[called] for step in held)
        if len(set(counts)) > 1:
            seen.setdefault(counts, "\t".join(called))
    calls = list(seen.values())
    return ["rank", "apart", *(f"{what}:{one}" for what in ("before", "calls") for one in calls), *(f"period:{n}" for n in PERIODS)]


def condition(held: Sequence[Example], broken: Sequence[Example], common: Sequence[str]) -> Condition | None:
    """Return what tells the examples that hold a relation from those that break it; None where nothing does.

    ``common``: features of `features_of`. The features of the call come first, then those; the first that is about the most
    examples wins, and one is preferred to two."""
    if len(held) < SUPPORT:
        return None
    own: dict[str, None] = {}
    if held[0].of is not None:
        every = (one.now.attributes for one in (*held, *broken))
        told = dict.fromkeys(name for attributes in every for one in attributes.values() for name in one)
        own = dict.fromkeys([*(f"attribute:{name}" for name in told), "class", "parameter", "layer"])
    elif held[0].key is not None:
        if held[0].relation != "arguments":
            own |= {f"argument:{name}": None for name in held[0].now.given(held[0].key)}
        if held[0].relation != "types":
            own["dtype"] = None
    names = [*own, *common]
    columns = {name: [feature(one, name) for one in (*held, *broken)] for name in names}
    names = [name for name in names if len(set(columns[name])) > 1]
    steps = [one.now.number for one in held]
    exceptions = len({one.now.number for one in broken})
    best = _best(((name,) for name in names), columns, steps, exceptions)
    return best or _best(combinations(names[:PAIRED], 2), columns, steps, exceptions)


def _best(
    choices: Iterable[tuple[str, ...]], columns: Mapping[str, Sequence[Value]], steps: Sequence[int], exceptions: int
) -> Condition | None:  # fmt: skip
    """``columns``: the features of examples, first of those that hold the relation, whose steps are ``steps``; ``exceptions``: in
    how many steps others break it."""
    best, most = None, SUPPORT - 1
    for names in choices:
        periodic = any(name.startswith("period:") for name in names)
        if periodic and exceptions < EACH:
            continue  # any single step is one of some period
        values = list(zip(*(columns[name] for name in names), strict=True))
        bad = set(values[len(steps) :])
        good = {value: n for value, n in Counter(values[: len(steps)]).items() if n >= EACH and value not in bad}
        if periodic:  # a place in it must have come again: ranks and runs of one step are one
            again = Counter(value for value, _ in set(zip(values, steps, strict=False)))
            good = {value: n for value, n in good.items() if again[value] >= EACH}
        if sum(good.values()) > most:
            best, most = Condition(names, frozenset(good)), sum(good.values())
    return best
