"""A recipe: the steps of an alignment in order, each with its numbers and their origin (a TOML table); what a comparison measured
in the first step, in columns: each tensor that a call made, and the number from outside; the way from the model down to the call
that the comparison names; and the result of following it: an outcome for each step, and the comparison behind them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import field as held
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import field

from trueup.comparison.graph.streams import NONE, Array, distinct
from trueup.comparison.limits import apply
from trueup.comparison.measures.measure import DIGEST, STATISTICS, TENSOR
from trueup.comparison.verdict.judged import Part, Verdicts, only_modules
from trueup.foundation import toml
from trueup.foundation.facts.criteria import Limit
from trueup.foundation.facts.criteria import parse as parse_limit
from trueup.foundation.facts.slots import is_weight
from trueup.foundation.model import Finding, Result, Status, TrueupError, VerdictWord
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.wording import percent

RECIPES = ("paddle",)  # recipes that come along

Check = Literal["environment", "inputs", "forward", "backward", "losses", "metric"]
# Optional keys of a check's step, besides name, check and origin
KEYS: dict[Check, tuple[str, ...]] = {
    "environment": ("must", "may_differ"), "inputs": (), "forward": ("fail", "loss"), "backward": ("fail", "loss"),
    "losses": ("limit",), "metric": ("limit",),
}  # fmt: skip

SEE = "see docs/align.md"

PHASES = ("forward", "backward")
COLUMNS = tuple("rank before_seq seq level phase scope op ordinal slot state error before after scale bound exact nan".split())
NEAR_ZERO = 1e-3  # of the root mean square: a smaller mean is left by cancellation; its relative difference tells nothing
FLOAT32 = 2.0**-24  # unit roundoff, of which the criterion grants some to what comes in
PASSES, OPEN, FAILS = range(3)  # states of a tensor, the worse the larger


class Step(toml.Table):
    """A ``[[step]]`` table."""

    name: str
    check: Check
    origin: str
    fail: tuple[dict[str, Any], ...] = ()
    loss: toml.Positive | None = None  # most that the losses of the first step may be apart, relative
    limit: toml.Positive = math.inf
    must: dict[str, tuple[str, ...]] = field(default_factory=dict)
    may_differ: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = KEYS[self.check]
        for key in ("fail", "loss", "limit", "must", "may_differ"):
            if key not in keys and getattr(self, key) not in ((), {}, None, math.inf):
                raise ValueError(f"{key!r} is unknown: expected {', '.join(('name', 'check', 'origin', *keys))}")
        if "limit" in keys and math.isinf(self.limit):
            raise ValueError("limit is missing")
        if "fail" in keys and not self.limits:
            raise ValueError("it has no [[step.fail]] table, so nothing could fail")

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What fails the step."""
        return tuple(parse_limit(table, f"fail {n}: ") for n, table in enumerate(self.fail, 1))

    @property
    def numbers(self) -> str:
        """Say the step's numbers in words."""
        if self.check in ("losses", "metric"):
            return f"at most {self.limit:.3g}"
        tables = [" and ".join(f"{name} {side} {number:g}" for name, side, number in limit.conditions) for limit in self.limits]
        loss = [] if self.loss is None else [f"losses more than {self.loss:.3g} apart"]
        return "; or ".join([*tables, *loss])


@dataclass(frozen=True, slots=True)
class Recipe:
    """Steps in the order in which they are made."""

    name: str
    steps: tuple[Step, ...]


def load(recipe: str | Path) -> Recipe:
    """Load a recipe by name or from a file of the same form; raises TrueupError if there is none or it is malformed."""
    if str(recipe) in RECIPES:
        return _parse(toml.packaged(__package__, f"{recipe}.toml"), str(recipe))
    path = Path(recipe)
    if not path.is_file():
        raise TrueupError(
            f"recipe {str(recipe)!r} is unknown\n  expected: {', '.join(RECIPES)}, or the path of a recipe file\n"
            f"  got:      {recipe}\n  next:     {SEE}"
        )
    return _parse(toml.read(path, "recipe file", SEE), str(path))


class _Recipe(toml.Table):
    name: str
    step: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not self.step:
            raise ValueError("it holds no steps: tables, each headed [[step]]")
        if len({step.name for step in self.step}) < len(self.step):
            raise ValueError("two steps have the same name")


def _parse(content: dict[str, Any], where: str) -> Recipe:
    try:
        read = toml.checked(content, _Recipe)
        return Recipe(read.name, read.step)
    except ValueError as error:
        raise TrueupError(f"recipe file {where}: {error}; {SEE}") from None


def apart(before: float, after: float) -> float:
    """Return the distance of two numbers; Inf where one is NaN and the other is not."""
    if math.isnan(before) and math.isnan(after):
        return 0.0
    distance = abs(after - before)
    return math.inf if math.isnan(distance) else distance


def relative(before: float, after: float) -> float:
    """Return the distance relative to the baseline's number."""
    distance = apart(before, after)
    return 0.0 if distance == 0 else distance / abs(before) if before else math.inf


def means_apart(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return how far numbers of several steps are apart on average: relative, absolute. The smaller one counts."""
    return sum(relative(*pair) for pair in pairs) / len(pairs), sum(apart(*pair) for pair in pairs) / len(pairs)


RungStatus = Literal["pass", "DEVIATES", "could not tell"]

COUNTED: tuple[Status, ...] = ("pass", "DEVIATES", "could not tell")  # made steps; a metric that was not given is none


@dataclass(frozen=True, slots=True)
class Rung:
    """A module on the way down to the call to blame; siblings that were executed before it stand above it."""

    depth: int
    name: str
    status: RungStatus
    said: str  # the figures of its worst tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step of the recipe."""

    name: str
    check: str
    status: Status
    said: str  # one sentence: what was looked at and found; of a step that could not be made, why
    limit: str  # the numbers of the recipe, in words
    origin: str  # where they come from
    remarks: tuple[str, ...] = ()
    rungs: tuple[Rung, ...] = ()  # the way from the top to the call that is to blame
    scope: str | None = None  # the module of the call that is to blame; empty for one outside all modules, None where no call is


@dataclass(frozen=True)
class RecipeResult:
    """What `follow` returns."""

    recipe: str
    outcomes: Sequence[Outcome]
    result: Result  # the comparison: the report shows it
    step: int = 0  # the first step that both runs hold, of which forward and backward were looked at
    has_operators: bool = True  # whether both runs hold operators beside modules, so that the way down does not end at a module
    advice: tuple[str, tuple[str, ...]] | None = None  # what to do next, and the commands for it

    @property
    def verdict(self) -> VerdictWord:
        """``deviates`` if a step or the comparison does, ``aligned`` if both say so of all that was asked, else ``inconclusive``. A
        recipe's numbers are wide and its steps see the first step's tensors and losses; the comparison sees the rest."""
        made = [outcome.status for outcome in self.outcomes if outcome.status in COUNTED]
        if "DEVIATES" in made or self.result.verdict == "deviates":
            return "deviates"
        passes = bool(made) and set(made) == {"pass"} and self.result.verdict == "aligned"
        return "aligned" if passes else "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 aligned, 1 deviates, 2 could not tell."""
        return {"aligned": 0, "deviates": 1, "inconclusive": 2}[self.verdict]

    @property
    def deviating(self) -> Outcome | None:
        """The first step that deviates."""
        return next((outcome for outcome in self.outcomes if outcome.status == "DEVIATES"), None)


@dataclass(frozen=True, slots=True)
class Reading:
    """A tensor on both sides."""

    rank: int
    seqs: tuple[int, int]  # execution numbers of the call in the baseline and in the candidate
    level: str
    phase: str
    scope: str
    op: str
    ordinal: int
    slot: str
    state: int  # by the numbers of the recipe: `PASSES`, `FAILS` or `OPEN`, where the captures do not tell
    error: float  # relative L2 error; NaN where it was not measured
    means: tuple[float, float]
    scale: float  # root mean square of the baseline's elements
    is_bound: bool = False  # whether another tool's statistics are all that is known, so that the error is at least so much
    exact: bool = False  # whether all bytes were compared, or their digests
    has_nan: bool = False  # whether both sides hold NaN

    @property
    def figures(self) -> str:
        """Say the figures that the recipe asks about: ``mean 0.438 and 0.45 (2.7 % apart), tensor 17 % off``."""
        if self.error == 0:
            return f"{'equal' if self.exact else 'the same statistics'}, mean {self.means[0]:.3g}"
        said = [self._mean] if not any(map(math.isnan, self.means)) else []
        said += [] if math.isnan(self.error) else [f"tensor {'at least ' if self.is_bound else ''}{percent(self.error)} off"]
        return ", ".join(said) or "not measured"

    @property
    def _mean(self) -> str:
        before, after = self.means
        if max(abs(before), abs(after)) < NEAR_ZERO * self.scale:
            return f"mean near zero ({before:.1e} and {after:.1e}, elements of about {self.scale:.1e})"
        apart = f" ({percent(abs(after - before) / abs(before))} apart)" if before else ""
        return f"mean {before:.3g} and {after:.3g}{apart}" if before != after else f"the same mean {before:.3g}"


@dataclass
class Outside:
    """What came into the first step from outside: data and weights."""

    equal: int = 0
    close: int = 0  # not bitwise equal, and within the rounding that the criterion grants to what comes in
    alike: int = 0  # of which statistics are all that is known, and they are the same
    apart: int = 0  # further apart than rounding
    furthest: float = 0.0  # relative L2 error of the one that is furthest apart
    unknown: int = 0


@dataclass
class Readings:
    """Gathers entries during a comparison: pass `see` to `trueup.compare`. Checks that ``limits`` lacks are not looked at."""

    limits: dict[str, tuple[Limit, ...]]
    step: int | None = None  # the first step that both runs hold
    outside: Outside = held(default_factory=Outside)
    # By phase: what that step leaves unexplained
    doubts: dict[str, list[str]] = held(default_factory=lambda: {phase: [] for phase in PHASES})
    _parts: list[dict[str, Array]] = held(default_factory=list)
    _names: Sequence[str] = ()

    def see(self, part: Part) -> None:
        """Take what was measured and judged of a part."""
        errors = part.verdicts.errors
        candidate = errors.streams[1]
        if not len(candidate):
            return
        self.step = int(candidate.steps[0]) if self.step is None else min(self.step, int(candidate.steps[0]))
        here = candidate.step[errors.calls[1][errors.pair]] == self.step
        if not here.any():
            return
        names = candidate.names
        self._names = names.names
        phase = candidate.phase[errors.calls[1][errors.pair]]
        for name in PHASES:
            limits = self.limits.get(name)
            chosen = np.flatnonzero(here & errors.outputs & (phase == names.number(name)))
            if limits is None or not len(chosen):
                continue
            applied = apply(limits, errors)
            call, (before, after) = errors.calls[1][errors.pair[chosen]], (side[chosen] for side in errors.slots)
            baseline = errors.streams[0]
            self._parts.append({
                "rank": np.full(len(chosen), candidate.rank), "level": candidate.level[call],
                "before_seq": baseline.seq[errors.calls[0][errors.pair[chosen]]], "seq": candidate.seq[call],
                "phase": phase[chosen], "scope": candidate.scope[call], "op": candidate.op[call],
                "ordinal": candidate.ordinal[call], "slot": errors.names[chosen],
                "state": np.where(applied.fails[chosen], FAILS, np.where(applied.open[chosen], OPEN, PASSES)),
                "error": errors.relative[chosen], "before": baseline.mean[before], "after": candidate.mean[after],
                "bound": errors.method[chosen] == STATISTICS, "exact": np.isin(errors.method[chosen], (DIGEST, TENSOR)),
                "nan": (baseline.number("n_nan")[before] > 0) & (candidate.number("n_nan")[after] > 0),
                "scale": baseline.l2[before] / np.sqrt(np.maximum(baseline.numel[before], 1)),
            })  # fmt: skip
        self._look_outside(part.verdicts, here & (phase == names.number("forward")))
        for name, found in self.doubts.items():
            found += _doubts(part, name) if part.step == self.step else []

    def _look_outside(self, verdicts: Verdicts, here: Array) -> None:
        """Count the tensors of the outermost modules, and all weights, that no recorded call made."""
        errors = verdicts.errors
        candidate = errors.streams[1]
        read = here & errors.inputs & (candidate.producer[errors.slots[1]] < 0)
        if only_modules(candidate):  # what is computed between modules was made by no recorded call either
            outermost = (candidate.parents == NONE) & (candidate.level == candidate.names.number("module"))
            read &= outermost[errors.calls[1][errors.pair]] | candidate.names.table(is_weight)[errors.names]
        error = errors.relative[read]
        known = errors.method[read] != STATISTICS
        limit = verdicts.criterion.input_units * FLOAT32
        self.outside.equal += int(np.count_nonzero((error == 0) & known))
        self.outside.alike += int(np.count_nonzero((error == 0) & ~known))
        self.outside.close += int(np.count_nonzero((error > 0) & (error <= limit)))
        self.outside.apart += int(np.count_nonzero(error > limit))
        self.outside.furthest = max([self.outside.furthest, *error[error > limit].tolist()])
        self.outside.unknown += int(np.count_nonzero(np.isnan(error)))

    def of(self, phase: str, levels: Sequence[str]) -> list[Reading]:
        """Return the entries of a phase at some levels, in order of execution, one rank after the other."""
        wanted = [self._names.index(level) for level in levels if level in self._names]
        if phase not in self._names:
            return []
        columns = self._columns
        chosen = np.isin(columns["level"], wanted) & (columns["phase"] == self._names.index(phase))
        order = np.flatnonzero(chosen)[np.lexsort((columns["seq"][chosen], columns["rank"][chosen]))]
        return [self._at(n) for n in order.tolist()]

    def levels(self, phase: str) -> set[str]:
        """Return the levels that have entries of a phase."""
        if phase not in self._names:
            return set()
        here = self._columns["level"][self._columns["phase"] == self._names.index(phase)]
        return {self._names[k] for k in distinct(here).tolist()}

    @property
    def has_operators(self) -> bool:
        """Whether there are entries of operators, beside modules."""
        return bool({"api", "aten"} & (self.levels("forward") | self.levels("backward")))

    @cached_property
    def _columns(self) -> dict[str, Array]:
        if not self._parts:
            return {name: np.empty(0) for name in COLUMNS}
        return {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}

    def _at(self, n: int) -> Reading:
        c, name = {key: values[n] for key, values in self._columns.items()}, self._names
        return Reading(
            int(c["rank"]), (int(c["before_seq"]), int(c["seq"])), name[int(c["level"])], name[int(c["phase"])],
            name[int(c["scope"])], name[int(c["op"])], int(c["ordinal"]), name[int(c["slot"])], int(c["state"]),
            float(c["error"]), (float(c["before"]), float(c["after"])), float(c["scale"]), bool(c["bound"]), bool(c["exact"]),
            bool(c["nan"]),
        )  # fmt: skip


def _doubts(part: Part, phase: str) -> list[str]:
    """Say what the comparison could not explain in a phase of a part: differences that came in unseen, calls not compared."""
    errors = part.verdicts.errors
    candidate = errors.streams[1]
    unseen = [(judged.call.candidate, slot, judged.call.slots[slot].relative) for judged, slot in part.unexplained]
    found = [
        f"{slot} of {call.key} differs (rel. L2 {error:.2g}), and no compared call made that difference"
        for call, slot, error in unseen if call.phase == phase
    ]  # fmt: skip
    alone = [(side, call) for side, call in part.uncovered if call.phase == phase]
    found += [f"{call.key} is only in the {side}, and nothing compared shows what it did" for side, call in alone]
    for pair, why in part.verdicts.incomparable.items():
        call = candidate.row(int(errors.calls[1][pair]))
        found += [f"{call.key} was not compared: {in_words(why)}"] if call.phase == phase else []
    unsure = [suspect.judged.call.candidate for suspect in part.suspects if not suspect.certain and suspect.phase == phase]
    return found + [f"{call.key} differs by more than is expected, and it could be rounding" for call in unsure]


WORDS: dict[int, RungStatus] = {PASSES: "pass", FAILS: "DEVIATES", OPEN: "could not tell"}
SIBLINGS = 4  # modules before the one that differs that are shown on each floor; more are counted


@dataclass
class Node:
    """A module, or a call outside modules."""

    name: str
    own: list[Reading] = held(default_factory=list)
    children: dict[str, Node] = held(default_factory=dict)

    def state(self) -> int:
        """Return whether it differs: its own tensors if it has any, else all inside it."""
        found = [reading.state for reading in self.own] or [child.state() for child in self.children.values()]
        return max(found, default=PASSES)

    def worst(self) -> Reading | None:
        """Return its own tensor that differs most, else the first one inside that differs."""
        if self.own:
            return max(self.own, key=lambda reading: (reading.state, -1.0 if math.isnan(reading.error) else reading.error))
        found = [worst for child in self.children.values() if (worst := child.worst()) is not None]
        return next((reading for reading in found if reading.state == FAILS), next(iter(found), None))

    def first(self, side: int) -> int:
        """Return the first execution number of its calls on a side."""
        return min([*(r.seqs[side] for r in self.own), *(child.first(side) for child in self.children.values())])


@dataclass(frozen=True)
class Trail:
    """The way down to a call."""

    rungs: tuple[Rung, ...]
    said: str  # where it is: a module and its figures, or the modules that it stands between


def tree(readings: Iterable[Reading]) -> Node:
    """Put the tensors of one rank into the modules that made them; calls of finer levels are leaves."""
    root = Node("")
    for reading in readings:
        node = root
        for part in reading.scope.split(".") if reading.scope else []:
            node = node.children.setdefault(part, Node(part))
        if reading.level != "module":
            short = f"{reading.op.rpartition('.')[2]}#{reading.ordinal}"
            node = node.children.setdefault(_leaf(reading), Node(short))
        node.own.append(reading)
    return root


def way_to(culprit: Finding, root: Node) -> Trail:
    """Return the floors from the model ``root`` (of the culprit's rank) down to a call that the comparison found, each with what
    was executed before it. ``seq`` of a side that lacks the call is -1."""
    side = 1 if culprit.seq[1] >= 0 else 0
    steps = culprit.scope.split(".") if culprit.scope else []
    steps += [_leaf(culprit)] if culprit.level != "module" else []
    rungs: list[Rung] = []
    node, depth = root, 0
    for depth, name in enumerate(steps):
        inner = node.children.get(name)
        if inner is None:
            before, after = _around(node, culprit.seq[side], side)
            here = Rung(depth, culprit.op.rpartition(".")[2], "DEVIATES", _found(culprit))
            return Trail((*rungs, *_shown(before, depth), here), _between(culprit, before, after))
        before, _ = _around(node, inner.first(side), side)
        rungs += [*_shown(before, depth), _rung(inner, depth, FAILS)]  # the comparison says so, whatever its own figures are
        node = inner
    if culprit.phase == "optimizer":  # which gradient it was is in the comparison's sentence; the worst of them may be rounding
        return Trail(tuple(rungs), f"{culprit.scope or culprit.op}: what the optimizer made of its gradients")
    worst = node.worst()
    where = culprit.scope or culprit.op
    return Trail(tuple(rungs), where if worst is None else f"{where}, {worst.op.rpartition('.')[2]} {worst.slot}: {worst.figures}")


def _leaf(call: Reading | Finding) -> str:
    return f"{call.op}#{call.ordinal}"


def _around(node: Node, place: int, side: int) -> tuple[list[Node], list[Node]]:
    """Split the children into those executed before a place and the rest."""
    children = sorted(node.children.values(), key=lambda child: child.first(side))
    before = [child for child in children if child.first(side) < place]
    return before, children[len(before) :]


def _between(culprit: Finding, before: list[Node], after: list[Node]) -> str:
    inside = f" of {culprit.scope}" if culprit.scope else ""
    ends = f"between {before[-1].name} and {after[0].name}" if before and after else ""
    alone = f" (only in the {'candidate' if culprit.seq[1] >= 0 else 'baseline'})" if min(culprit.seq) < 0 else ""
    ends = ends or (f"after {before[-1].name}" if before else f"before {after[0].name}" if after else "in the model")
    return f"{ends}{inside}: {culprit.op.rpartition('.')[2]}{alone}, {_found(culprit)}"


def _found(culprit: Finding) -> str:
    return f"tensor {percent(culprit.error_out)} off"


def _shown(before: list[Node], depth: int) -> list[Rung]:
    hidden, shown = before[:-SIBLINGS], before[-SIBLINGS:]
    counted = [Rung(depth, f"{len(hidden)} before", WORDS[max(child.state() for child in hidden)], "")] if hidden else []
    return counted + [_rung(child, depth, child.state()) for child in shown]


def _rung(node: Node, depth: int, state: int) -> Rung:
    worst = node.worst()
    return Rung(depth, node.name, WORDS[state], "" if worst is None else worst.figures)
