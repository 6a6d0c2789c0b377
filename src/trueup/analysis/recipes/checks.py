"""The steps of a recipe, one function each: what was looked at, and whether it passes by the recipe's numbers."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trueup.analysis.recipes.bisecting import tree, way_to
from trueup.analysis.recipes.found import Outcome, Rung, Status
from trueup.analysis.recipes.readings import FAILS, OPEN, Reading, Readings, percent
from trueup.analysis.recipes.recipe import Step
from trueup.foundation.model import Finding, Result
from trueup.foundation.words.wording import counted, one_line

FROM_OUTSIDE = ("input", "argument", "random")
"""Kinds of culprit that are no operator's fault: data, weights, numbers and flags, random numbers."""
NAMED = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What the steps go by."""

    result: Result
    readings: Readings
    metric: tuple[float, float] | None

    def culprits(self, phase: str | None = None, step: int | None = None) -> list[Finding]:
        """Return the comparison's culprits, of one phase and step where asked for."""
        found = self.result.culprits
        return [c for c in found if (phase is None or c.phase == phase) and (step is None or c.step == step)]


def make(step: Step, facts: Facts) -> Outcome:
    """Make a step."""
    return CHECKS[step.check](step, facts)


# --------------------------------------------------------------------------------------------------------- before the model
def _environment(step: Step, facts: Facts) -> Outcome:
    sides = [facts.result.baseline.environment, facts.result.candidate.environment]
    wrong = [
        f"{name} is {side[name]} in the {which}, and has to be {' or '.join(values)}"
        for name, values in step.must
        for which, side in zip(("baseline", "candidate"), sides, strict=True)
        if name in side and side[name] not in values
    ]
    common = [name for name in sides[0] if name in sides[1]]
    differing = [name for name in common if _plain(sides[0][name]) != _plain(sides[1][name])]
    told = [name for name in differing if name.startswith("version of ") or _any(name, step.may_differ)]
    set_once = [
        name
        for side, other in ((sides[0], sides[1]), (sides[1], sides[0]))
        for name in side
        if name not in other and name.isupper() and not _any(name, step.may_differ)
    ]  # a variable that one side sets; switches of a framework that the other is not differ in name alone
    wrong += [f"{name} differs: {sides[0][name]} and {sides[1][name]}" for name in differing if name not in told]
    remarks = [f"may differ: {one_line(name)}, {one_line(sides[0][name])} and {one_line(sides[1][name])}" for name in told]
    remarks += [f"set in one run only: {one_line(name)}" for name in set_once]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return _outcome(step, "DEVIATES", one_line(wrong[0]) + more, (*map(one_line, wrong[1:]), *remarks))
    if not common:
        return _outcome(step, "could not tell", "the captures name no switch or seed that both have", remarks)
    same = len(common) - len(differing)
    seeds = sum(name.startswith("seed of ") for name in common)
    said = f"{counted(same, 'switch', 'switches')}, versions and seeds are the same"
    return _outcome(step, "pass", said if seeds else f"{said}; no seed was recorded on both sides", remarks)


def _inputs(step: Step, facts: Facts) -> Outcome:
    found = [c for c in facts.culprits(step=facts.readings.step) if c.kind in FROM_OUTSIDE]
    if found:
        return _outcome(step, "DEVIATES", found[0].sentence, [c.sentence for c in found[1:NAMED]], scope=found[0].scope)
    outside = facts.readings.outside
    total = outside.equal + outside.alike + outside.close + outside.apart
    if not total:
        return _outcome(step, "could not tell", "no data and no weights of the first step are in both captures")
    said = f"{counted(total, 'tensor')} that come into step {facts.readings.step}: {outside.equal:,} bitwise equal"
    said += f", {outside.alike:,} the same as far as statistics tell" if outside.alike else ""
    said += f", {outside.close:,} within rounding" if outside.close else ""
    if outside.unknown:
        return _outcome(step, "could not tell", f"{outside.unknown:,} of the tensors that come in were not measured; {said}")
    if outside.apart:
        why = f"{outside.apart:,} of the tensors that come in differ by up to {percent(outside.furthest)}, more than rounding"
        return _outcome(step, "could not tell", f"{why}, and the comparison does not say since when; {said}")
    return _outcome(step, "pass", said)


# ----------------------------------------------------------------------------------------------------------------- the model
def _modules(step: Step, facts: Facts) -> Outcome:
    """Forward or backward of the first step.

    A tensor beyond the recipe's numbers may differ by rounding alone, as what cancels does, and one within them by a fault; so the
    comparison says whether anything is wrong, and where. Its culprits in the optimizer are wrong gradients, too.
    """
    readings, phase = facts.readings, step.check
    held = readings.levels(phase)
    fine = next((level for level in ("api", "aten") if level in held), None)
    entries = readings.of(phase, [level for level in ("module", fine) if level in held])
    asked = entries if phase == "backward" else [r for r in entries if r.level == "module"] or entries
    if not asked:
        return _outcome(step, "could not tell", f"the captures have no {phase} of step {readings.step} in common")
    beyond = [reading for reading in asked if reading.state == FAILS]
    found = facts.culprits(phase, readings.step) + (facts.culprits("optimizer", readings.step) if phase == "backward" else [])
    blamed = [c for c in found if beyond or c.phase != phase]
    if blamed:
        return _located(step, blamed, entries)
    if beyond:
        said = f"{_many(beyond, asked, phase)} beyond these numbers, the first, {_place(beyond[0])}: {beyond[0].figures}"
        before = facts.culprits("forward", readings.step) + facts.culprits("data", readings.step)
        if before:
            return _outcome(step, "DEVIATES", one_line(said), [f"what they are made of differs already: {before[0].sentence}"])
        doubts = readings.doubts[phase] or readings.doubts["forward"]
        if doubts:
            return _outcome(step, "could not tell", one_line(f"{doubts[0]}; {said}"))
    loss = _losses_apart(step, facts)
    if loss is not None:
        remarks = [f"it starts at: {found[0].sentence}"] if found else []
        return _outcome(step, "DEVIATES", loss, remarks, scope=found[0].scope if found else None)
    return _passed(step, facts, asked, [*_within(step, found, entries, asked), *_rounding(beyond, asked, phase)])


def _located(step: Step, culprits: Sequence[Finding], entries: Sequence[Reading]) -> Outcome:
    """Say where the call is that the comparison blames, with the way to it."""
    first = culprits[0]
    if first.kind in ("input", "overwritten"):  # it is no fault of the call that reads it
        return _outcome(step, "DEVIATES", f"what {one_line(first.scope or first.op)} got differs already", [first.sentence])
    trail = way_to(first, tree(reading for reading in entries if reading.rank == first.rank))
    ranks = {reading.rank for reading in entries}
    more = {c.rank for c in culprits if (c.scope, c.op) == (first.scope, first.op)} - {first.rank}
    said = f"{f'rank {first.rank}: ' if len(ranks) > 1 else ''}{trail.said}"
    said += f" (and on {counted(len(more), 'more rank')})" if more else ""
    return _outcome(step, "DEVIATES", one_line(said), [first.sentence], trail.rungs, first.scope)


def _within(step: Step, culprits: Sequence[Finding], entries: Sequence[Reading], asked: Sequence[Reading]) -> list[str]:
    """Say what is wrong within the numbers of the recipe, or did not leave its module."""
    inside = [reading for reading in entries if reading.state == FAILS and reading not in asked]
    why = "inside a module that passes" if inside else "within these numbers, but more than rounding"
    if inside and not culprits:
        return [one_line(f"{why}: {inside[0].scope or inside[0].op}, {inside[0].slot}: {inside[0].figures}")]
    found = [f"{why}: {c.sentence}" for c in culprits[:1]]
    if step.check == "backward" and all(reading.level == "module" for reading in asked):
        found.append("gradients of weights were not recorded: level api records them")
    return found


def _rounding(beyond: Sequence[Reading], asked: Sequence[Reading], phase: str) -> list[str]:
    if not beyond:
        return []
    return [one_line(f"{_many(beyond, asked, phase)} beyond these numbers and explained by rounding, {_worst(beyond)}")]


def _passed(step: Step, facts: Facts, asked: Sequence[Reading], remarks: Sequence[str]) -> Outcome:
    """Say that the modules pass, unless something was not measured, or is no number."""
    why = _open(step, facts, asked)
    if why is not None:
        return _outcome(step, "could not tell", one_line(why), remarks)
    said = f"{_tensors(len(asked), step.check)} of {counted(len({(r.rank, r.seqs) for r in asked}), 'call')}"
    rough = sum(not reading.exact for reading in asked)
    if any(reading.error != 0 for reading in asked):
        said += f"; {_worst([reading for reading in asked if reading.state != FAILS] or asked)}"
    else:
        said += f", the same as far as statistics tell ({rough:,} had no more)" if rough else ", all bitwise equal"
    return _outcome(step, "pass", one_line(said), remarks)


def _open(step: Step, facts: Facts, asked: Sequence[Reading]) -> str | None:
    """Say what keeps a step from passing though nothing differs: tensors not measured, or no numbers; calls of one side only."""
    open_ = [reading for reading in asked if reading.state == OPEN]
    if open_:
        return f"{len(open_):,} of {_tensors(len(asked), step.check)} were not measured, first {_place(open_[0])}"
    level = "module" if any(reading.level == "module" for reading in asked) else asked[0].level
    missing = [u for u in facts.result.unmatched if u.level == level and u.phase == step.check and u.step == facts.readings.step]
    if missing:
        verb = "exists" if len(missing) == 1 else "exist"
        return f"{counted(len(missing), 'call')} of level {level} {verb} in only one run, first {missing[0].name}"
    bad = [reading for reading in asked if reading.has_nan]
    if bad:
        return f"{len(bad):,} of {_tensors(len(asked), step.check)} hold NaN on both sides, first {_place(bad[0])}"
    return None


def _tensors(count: int, phase: str) -> str:
    return counted(count, "gradient" if phase == "backward" else "tensor")


def _many(some: Sequence[Reading], asked: Sequence[Reading], phase: str) -> str:
    return f"{len(some):,} of {_tensors(len(asked), phase)} {'is' if len(some) == 1 else 'are'}"


def _worst(readings: Sequence[Reading]) -> str:
    worst = max(readings, key=lambda reading: -1.0 if math.isnan(reading.error) else reading.error)
    return f"the worst, {_place(worst)}: {worst.figures}"


def _place(reading: Reading) -> str:
    return f"{reading.scope or reading.op} {reading.slot}"


# ------------------------------------------------------------------------------------------------------------------ the run
def _losses_apart(step: Step, facts: Facts) -> str | None:
    """Say that the first step's losses are apart, None where they are not, or the recipe does not ask."""
    other = dict(facts.result.candidate.losses)
    before = next((loss for at, loss in facts.result.baseline.losses if at == facts.readings.step), None)
    after = other.get(facts.readings.step or 0)
    if step.loss is None or before is None or after is None:
        return None
    apart = _relative(before, after)
    if apart <= step.loss:
        return None
    said = f"no module differs, but the losses of step {facts.readings.step} are {percent(apart)} apart"
    return f"{said}: {before:.6g} and {after:.6g}"


def _losses(step: Step, facts: Facts) -> Outcome:
    other = dict(facts.result.candidate.losses)
    pairs = [(at, loss, other[at]) for at, loss in facts.result.baseline.losses if at in other]
    remarks = [f"within these numbers, but more than rounding: {c.sentence}" for c in facts.culprits()[:1]]
    if len(pairs) < 2:
        had = "no step has" if not pairs else f"only step {pairs[0][0]} has"
        return _outcome(step, "could not tell", f"{had} a loss on both sides: record several, --steps 0:20", remarks)
    bad = [at for at, before, after in pairs if math.isnan(before) and math.isnan(after)]
    if bad:
        return _outcome(step, "could not tell", f"the losses of step {bad[0]} are NaN on both sides", remarks)
    relative = sum(_relative(before, after) for _, before, after in pairs) / len(pairs)
    absolute = sum(_apart(before, after) for _, before, after in pairs) / len(pairs)
    said = f"losses of {counted(len(pairs), 'step')}: on average {percent(relative)} apart, {absolute:.2g} absolute"
    if min(relative, absolute) <= step.limit:
        return _outcome(step, "pass", said, remarks)
    worst = max(pairs, key=lambda pair: _relative(*pair[1:]))
    said += f"; most in step {worst[0]}, {worst[1]:.6g} and {worst[2]:.6g}"
    first = facts.culprits()[:1]
    explained = [f"it starts at: {c.sentence}" for c in first] or ["no single call is to blame for certain"]
    return _outcome(step, "DEVIATES", said, explained, scope=first[0].scope if first else None)


def _metric(step: Step, facts: Facts) -> Outcome:
    if facts.metric is None:
        return _outcome(step, "not asked", "train to the end on both sides and give what you got: --metric BASE CAND")
    before, after = facts.metric
    if math.isnan(before) and math.isnan(after):
        return _outcome(step, "could not tell", "both metrics are NaN")
    apart = _relative(before, after)
    said = f"{before:g} and {after:g}, {percent(apart)} apart"
    return _outcome(step, "pass" if apart <= step.limit else "DEVIATES", said)


# ------------------------------------------------------------------------------------------------------------------- figures
def _outcome(
    step: Step, status: Status, said: str, remarks: Sequence[str] = (), rungs: tuple[Rung, ...] = (), scope: str | None = None
) -> Outcome:
    return Outcome(step.name, step.check, status, said, step.numbers, step.origin, tuple(remarks), rungs, scope)


def _plain(value: str) -> str:
    """Return a switch's value without the framework's name: ``torch.float32`` is ``float32``."""
    return value.removeprefix("torch.").removeprefix("paddle.")


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _apart(before: float, after: float) -> float:
    """Distance of two numbers; Inf where one is NaN and the other is not."""
    if math.isnan(before) and math.isnan(after):
        return 0.0
    apart = abs(after - before)
    return math.inf if math.isnan(apart) else apart


def _relative(before: float, after: float) -> float:
    apart = _apart(before, after)
    return 0.0 if apart == 0 else apart / abs(before) if before else math.inf


CHECKS: dict[str, Callable[[Step, Facts], Outcome]] = {
    "environment": _environment, "inputs": _inputs, "forward": _modules, "backward": _modules, "losses": _losses,
    "metric": _metric,
}  # fmt: skip
