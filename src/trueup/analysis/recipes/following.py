"""Following a recipe: the steps in order, one function each, up to the first that explains the difference.

A step says what it looked at and whether that passes by the recipe's numbers. The guide prints by hand what each module of a floor
gave, in order, and looks into the first that differs. That module may only pass a difference on, which arose between two modules or
within the guide's numbers. So the comparison names the call, and this shows the way there: on each floor the module that holds it,
after what was executed before. What to do next: record operators too, set a switch alike, or look at the call to blame.

From modules to the call: both trainings are run again with operators recorded, until the same call is named twice.

    as it was recorded       modules alone; the comparison names one of them, or nothing
    with the operators       it has to name another call than before, else no recorded operator is to blame
    once more                the same call? Else again and again, until a sequential test decides (`bisection.search`)

All modules are recorded: no recorded call made the inputs of a part, so comparing parts would blame healthy calls for their inputs.

    CAND-inside/journal.jsonl              each pair of runs; the same command goes on where it was stopped
    CAND-inside/runs/baseline, candidate   the last of them
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trueup.analysis.bisection.search import Attempt, Chosen, Found, Journal, Search
from trueup.analysis.recipes.recipe import (
    FAILS,
    OPEN,
    Outcome,
    Reading,
    Readings,
    Recipe,
    RecipeResult,
    Rung,
    Step,
    load,
    means_apart,
    relative,
    tree,
    way_to,
)
from trueup.analysis.remedy.advice import next_command
from trueup.analysis.triage.running import last_line
from trueup.comparison.result.comparing import compare
from trueup.foundation.model import Finding, Result, Status, TrueupError
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import counted, one_line, percent
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions

SIDES = ("baseline", "candidate")
INSIDE = "-inside"  # what the captures with operators are called, after the capture that led there
OPERATORS = ("both runs with operators recorded",)


def follow(
    baseline: str | Path | Capture, candidate: str | Path | Capture, recipe: str | Path | Recipe = "paddle", *,
    mapping: str | Path | None = None, metric: tuple[float, float] | None = None, every: bool = False,
) -> RecipeResult:  # fmt: skip
    """Make the steps of a recipe over two captures.

        >>> found = follow("runs/gpu", "runs/npu")          # doctest: +SKIP
        >>> found.verdict, found.deviating.name             # doctest: +SKIP
        ('deviates', 'backward')

    ``recipe`` is ``paddle`` or the path of a recipe file (docs/align.md); ``mapping`` is as of `trueup.compare`; ``metric`` is what
    the two trainings ended with (accuracy, loss), baseline's first; ``every`` goes on after a step that deviates. Raises
    TrueupError if the recipe cannot be read, the captures have different numbers of ranks, or cannot be compared at all.
    """
    known = recipe if isinstance(recipe, Recipe) else load(recipe)
    first, second = map(open_capture, (baseline, candidate))
    sizes = [_world(capture) for capture in (first, second)]
    if sizes[0] != sizes[1]:  # each rank sees other data, and gradients are means over all ranks
        raise TrueupError(
            "The runs are of different sizes and cannot be aligned.\n"
            f"  where:    {first.path} and {second.path}\n"
            "  expected: the same number of ranks, for each sees its own share of the data and gradients are means over all\n"
            f"  got:      {sizes[0]} and {sizes[1]}\n"
            "  next:     run both with the same number of ranks; one each is the simplest"
        )
    readings = Readings({step.check: step.limits for step in known.steps if step.fail})
    result = compare(first, second, mapping=mapping, see=readings.see)
    facts = Facts(result, readings, metric)
    outcomes: list[Outcome] = []
    for step in known.steps:
        stopped = not every and any(outcome.status == "DEVIATES" for outcome in outcomes)
        outcomes.append(_outcome(step, "not reached", "") if stopped else make(step, facts))
    found = RecipeResult(known.name, tuple(outcomes), result, readings.step or 0, readings.has_operators)
    return dataclasses.replace(found, advice=advice(found, (first, second), mapping))


def _world(capture: Capture) -> int:
    told = [int(manifest["world_size"]) for manifest in capture.ranks.values() if str(manifest.get("world_size", "")).isdigit()]
    return max([len(capture.ranks), *told])


Advice = tuple[str, tuple[str, ...]]


def advice(found: RecipeResult, captures: tuple[Capture, Capture], mapping: str | Path | None = None) -> Advice | None:
    """Return what to do next with its commands, or None if everything passes."""
    outcome = found.deviating
    if outcome is not None and outcome.check == "environment":
        return "set it the same on both sides, record again, and follow the recipe again", ()
    if is_wanted(found):
        options = ["--level", "module", "--level", "api", "--steps", steps_of(found), "--stop"]
        places = [f"{capture.path}{INSIDE}" for capture in captures]
        both = zip(captures, places, strict=True)
        lines = [_words("trueup", "capture", "-o", place, *options, "--", *_command(capture)) for capture, place in both]
        told = [] if mapping is None else ["--map", str(mapping)]
        pair = _words("trueup", "align", *places, "--recipe", found.recipe, *told)
        return "record operators beside the modules on both sides, and follow the recipe again", (*lines, pair)
    told_next = next_command(found.result) if outcome is not None else None
    return None if told_next is None else (told_next[0], (told_next[1],))


def further(
    found: RecipeResult, command: Sequence[str], base_command: Sequence[str] | None, again: Callable[[Path, Path], RecipeResult],
    mapping: str | Path | None = None, tell: Callable[[Attempt], None] = lambda _: None,
) -> RecipeResult | None:  # fmt: skip
    """Look for the call inside the modules by running both trainings again; None if nothing has to be recorded. Raises TrueupError
    if a command does not start, or the baseline's is unknown: a command that a capture names is never run by itself."""
    if not is_wanted(found):
        return None
    if base_command is None:
        own = (found.advice or ("", ("",)))[1][0]
        raise TrueupError(
            "The operators have to be recorded in the baseline, too.\n"
            "  expected: --base-command 'python train.py ...'\n  got:      the candidate's command alone\n"
            f"  next:     give it, or record them where the baseline runs: {own}"
        )
    return search(found, (base_command, command), mapping, again, tell)


def _command(capture: Capture) -> list[str]:
    told = capture.root.get("command")
    return [str(word) for word in told] if isinstance(told, list) and told else ["COMMAND"]


def _words(*words: str) -> str:
    return " ".join(shlex.quote(one_line(word)) for word in words)


FROM_OUTSIDE = ("input", "argument", "random")  # no operator's fault: data, weights, numbers, flags, random numbers
NAMED = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What the steps go by."""

    result: Result
    readings: Readings
    metric: tuple[float, float] | None

    def culprits(self, phase: str | None = None, step: int | None = None) -> list[Finding]:
        """Return the comparison's culprits, on request of one phase and step."""
        found = self.result.culprits
        return [c for c in found if (phase is None or c.phase == phase) and (step is None or c.step == step)]


def make(step: Step, facts: Facts) -> Outcome:
    """Make a step."""
    return CHECKS[step.check](step, facts)


def _told(culprit: Finding) -> str:
    """Say what is wrong: the cause, where one is known, and where it shows."""
    return f"{culprit.cause}; first in {culprit.sentence}" if culprit.cause else culprit.sentence


def _environment(step: Step, facts: Facts) -> Outcome:
    sides = [facts.result.baseline.environment, facts.result.candidate.environment]
    wrong = [
        f"{name} is {side[name]} in the {which}, and has to be {' or '.join(values)}"
        for name, values in step.must.items()
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
        return _outcome(step, "DEVIATES", _told(found[0]), list(map(_told, found[1:NAMED])), scope=found[0].scope)
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


def _modules(step: Step, facts: Facts) -> Outcome:
    """Judge forward or backward of the first step by the comparison: a tensor beyond the recipe's numbers may differ by rounding
    alone (cancellation), one within them by a fault. The comparison's culprits in the optimizer count as wrong gradients."""
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
            remark = f"what they are made of differs already: {_told(before[0])}"
            return _outcome(step, "DEVIATES", one_line(said), [remark], scope=before[0].scope)
        doubts = readings.doubts[phase] or readings.doubts["forward"]
        if doubts:
            return _outcome(step, "could not tell", one_line(f"{doubts[0]}; {said}"))
    loss = _losses_apart(step, facts)
    if loss is not None:
        remarks = [f"it starts at: {_told(found[0])}"] if found else []
        return _outcome(step, "DEVIATES", loss, remarks, scope=found[0].scope if found else None)
    remarks = _within(step, found, entries, asked)
    if beyond:
        remarks.append(one_line(f"{_many(beyond, asked, phase)} beyond these numbers and explained by rounding, {_worst(beyond)}"))
    return _passed(step, facts, asked, remarks)


def _located(step: Step, culprits: Sequence[Finding], entries: Sequence[Reading]) -> Outcome:
    """Say which call the comparison blames, with the way to it."""
    first = culprits[0]
    if first.kind in ("input", "overwritten"):  # it is no fault of the call that reads it
        return _outcome(step, "DEVIATES", f"what {one_line(first.scope or first.op)} got differs already", [_told(first)])
    trail = way_to(first, tree(reading for reading in entries if reading.rank == first.rank))
    ranks = {reading.rank for reading in entries}
    more = {c.rank for c in culprits if (c.scope, c.op) == (first.scope, first.op)} - {first.rank}
    said = f"{f'rank {first.rank}: ' if len(ranks) > 1 else ''}{trail.said}"
    said += f" (and on {counted(len(more), 'more rank')})" if more else ""
    return _outcome(step, "DEVIATES", one_line(said), [_told(first)], trail.rungs, first.scope)


def _within(step: Step, culprits: Sequence[Finding], entries: Sequence[Reading], asked: Sequence[Reading]) -> list[str]:
    """Say what is wrong within the recipe's numbers, or did not leave its module."""
    inside = [reading for reading in entries if reading.state == FAILS and reading not in asked]
    why = "inside a module that passes" if inside else "within these numbers, but more than rounding"
    if inside and not culprits:
        return [one_line(f"{why}: {inside[0].scope or inside[0].op}, {inside[0].slot}: {inside[0].figures}")]
    found = [f"{why}: {_told(c)}" for c in culprits[:1]]
    if step.check == "backward" and all(reading.level == "module" for reading in asked):
        found.append("gradients of weights were not recorded: level api records them")
    return found


def _passed(step: Step, facts: Facts, asked: Sequence[Reading], remarks: Sequence[str]) -> Outcome:
    """Say that the modules pass, unless something was not measured or is NaN."""
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
    """Say what keeps a step from passing though nothing differs: tensors not measured or NaN; calls of one side only."""
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


def _losses_apart(step: Step, facts: Facts) -> str | None:
    """Say that the first step's losses are apart; None if they are not, or the recipe does not ask."""
    other = dict(facts.result.candidate.losses)
    before = next((loss for at, loss in facts.result.baseline.losses if at == facts.readings.step), None)
    after = other.get(facts.readings.step or 0)
    if step.loss is None or before is None or after is None:
        return None
    apart = relative(before, after)
    if apart <= step.loss:
        return None
    said = f"no module differs, but the losses of step {facts.readings.step} are {percent(apart)} apart"
    return f"{said}: {before:.6g} and {after:.6g}"


def _losses(step: Step, facts: Facts) -> Outcome:
    other = dict(facts.result.candidate.losses)
    pairs = [(at, loss, other[at]) for at, loss in facts.result.baseline.losses if at in other]
    remarks = [f"within these numbers, but more than rounding: {_told(c)}" for c in facts.culprits()[:1]]
    if len(pairs) < 2:
        had = "no step has" if not pairs else f"only step {pairs[0][0]} has"
        return _outcome(step, "could not tell", f"{had} a loss on both sides: record several, --steps 0:20", remarks)
    bad = [at for at, before, after in pairs if math.isnan(before) and math.isnan(after)]
    if bad:
        return _outcome(step, "could not tell", f"the losses of step {bad[0]} are NaN on both sides", remarks)
    mean = means_apart([pair[1:] for pair in pairs])
    said = f"losses of {counted(len(pairs), 'step')}: on average {percent(mean[0])} apart, {mean[1]:.2g} absolute"
    if min(mean) <= step.limit:
        return _outcome(step, "pass", said, remarks)
    worst = max(pairs, key=lambda pair: relative(*pair[1:]))
    said += f"; most in step {worst[0]}, {worst[1]:.6g} and {worst[2]:.6g}"
    first = facts.culprits()[:1]
    explained = [f"it starts at: {_told(c)}" for c in first] or ["no single call is to blame for certain"]
    return _outcome(step, "DEVIATES", said, explained, scope=first[0].scope if first else None)


def _metric(step: Step, facts: Facts) -> Outcome:
    if facts.metric is None:
        return _outcome(step, "not asked", "train to the end on both sides and give what you got: --metric BASE CAND")
    before, after = facts.metric
    if math.isnan(before) and math.isnan(after):
        return _outcome(step, "could not tell", "both metrics are NaN")
    apart = relative(before, after)
    said = f"{before:g} and {after:g}, {percent(apart)} apart"
    return _outcome(step, "pass" if apart <= step.limit else "DEVIATES", said)


def _outcome(
    step: Step, status: Status, said: str, remarks: Sequence[str] = (), rungs: tuple[Rung, ...] = (), scope: str | None = None
) -> Outcome:
    return Outcome(step.name, step.check, status, said, step.numbers, step.origin, tuple(remarks), rungs, scope)


def _plain(value: str) -> str:
    """Return a switch's value without the framework's name: ``torch.float32`` is ``float32``."""
    return value.removeprefix("torch.").removeprefix("paddle.")


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


CHECKS: dict[str, Callable[[Step, Facts], Outcome]] = {
    "environment": _environment, "inputs": _inputs, "forward": _modules, "backward": _modules, "losses": _losses,
    "metric": _metric,
}  # fmt: skip


def is_wanted(found: RecipeResult) -> bool:
    """Tell whether to look for the call: only modules were recorded, and something after the inputs differs."""
    first = found.deviating
    settled = first is not None and first.check in ("environment", "inputs")
    return not (found.has_operators or settled or found.result.verdict == "aligned")


def steps_of(found: RecipeResult) -> str:
    """Return the steps to record: the first, and one more whose forward reads what the optimizer wrote."""
    return f"{found.step}:{found.step + 2}"


def search(
    found: RecipeResult, commands: tuple[Sequence[str], Sequence[str]], mapping: str | Path | None,
    follow: Callable[[Path, Path], RecipeResult], tell: Callable[[Attempt], None],
) -> RecipeResult:  # fmt: skip
    """Return what ``follow`` finds over two captures with operators; if they tell no more, ``found`` (of modules alone), and why.
    ``commands`` are the two trainings, ``mapping`` is as of `trueup.compare`, ``tell`` gets each pair of runs. Raises TrueupError
    if a command does not start, or the folder holds another search."""
    captures = open_capture(found.result.baseline.path), open_capture(found.result.candidate.path)
    folder = Path(f"{captures[1].path}{INSIDE}")
    folder.mkdir(parents=True, exist_ok=True)
    ids = [str(capture.root.get("run")) for capture in captures]
    question = {"over": "inside", "commands": redacted([list(words) for words in commands]), "captures": ids}
    instead = f"remove {folder}, which keeps that search, and give the same command again"
    journal = Journal(folder / "journal.jsonl", question, instead)
    pairs = Pairs(found, captures, commands, mapping, folder / "runs", journal, tell)
    ended = Search(OPERATORS, (), pairs, journal).smallest()
    said = _said(ended, [one for one in journal.attempts if one.chosen])
    if ended.word == "found":
        return _with(follow(*(folder / "runs" / side for side in SIDES)), said)
    told = next_command(found.result)
    return dataclasses.replace(_with(found, said), advice=None if told is None else (told[0], (told[1],)))


@dataclass
class Pairs:
    """Runs both trainings with operators recorded, and asks which call the comparison names."""

    found: RecipeResult
    captures: tuple[Capture, Capture]
    commands: tuple[Sequence[str], Sequence[str]]
    mapping: str | Path | None
    folder: Path
    journal: Journal
    tell: Callable[[Attempt], None]

    def __call__(self, chosen: Chosen) -> Attempt:
        """Run both; good if a call is named that was not named before, the same as by the first pair that named one."""
        if not chosen:  # as it was recorded
            return Attempt(chosen, "bad", 0.0)
        begun = time.monotonic()
        why = self._record()
        seconds = time.monotonic() - begun
        attempt = Attempt(chosen, "skip", seconds, why) if why else self._judged(chosen, seconds)
        self.tell(attempt)
        return attempt

    def _judged(self, chosen: Chosen, seconds: float) -> Attempt:
        place = named(compare(*(self.folder / side for side in SIDES), mapping=self.mapping))
        wanted = next((one.why for one in self.journal.attempts if one.outcome == "good"), place)
        is_news = bool(place) and place != named(self.found.result)
        return Attempt(chosen, "good" if is_news and place == wanted else "bad", seconds, place)

    def _record(self) -> str:
        """Record both sides; return why that failed, if it did."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for side, capture, command in zip(SIDES, self.captures, self.commands, strict=True):
            detail = str(capture.root.get("detail", "stats"))
            options = CaptureOptions.of(level=("module", "api"), detail=detail, steps=steps_of(self.found), stop=True)
            output = self.folder / f"{side}.txt"
            into, doing = (self.folder / side).absolute(), f"recording the {side}"
            code = launch.uninterrupted(launch.execute(into, options, command, output=output, doing=doing))
            if code or not (self.folder / side).exists():
                return f"the {side}'s command ended with exit code {code}{last_line(output)}"
        return ""


def named(result: Result) -> str:
    """Name the call that a comparison blames, ``blocks.2, forward, step 0, rank 0 (paddle.Tensor.__mul__)``; empty: none."""
    call = result.culprit
    if result.verdict != "deviates" or call is None:
        return ""
    return one_line(f"{call.name} ({call.op})" if call.scope else call.name)


def _said(ended: Found, pairs: Sequence[Attempt]) -> list[str]:
    good = sum(one.outcome == "good" for one in pairs)
    cost = f"{counted(len(pairs), 'pair')} of runs, {sum(one.seconds for one in pairs) / max(len(pairs), 1):.2g} s each"
    said = {
        "found": f"verified: named by {good} of {cost}, with operators recorded",
        "could not tell": f"operators were to be recorded, and {ended.why} ({cost})",
    }.get(ended.word, f"no recorded operator is to blame for certain: it may be an autograd function or a hook ({cost})")
    return [said] if ended.steady else [said, "not every pair names this call: a sequential test decided (1 % risk)"]


def _with(found: RecipeResult, remarks: Sequence[str]) -> RecipeResult:
    """Add remarks to the step that deviates, else to the first that could not tell, else to the last."""
    unknown = (outcome for outcome in found.outcomes if outcome.status == "could not tell")
    at = found.deviating or next(unknown, found.outcomes[-1])
    outcomes = [dataclasses.replace(one, remarks=(*one.remarks, *remarks)) if one is at else one for one in found.outcomes]
    return dataclasses.replace(found, outcomes=tuple(outcomes))
