"""The three steps of a triage, in order, up to the first that explains the difference.

Step 1: float anomalies, in a run under `trueup.watch`, which also tells a loss scale that collapses. Step 3: the whole network,
call by call, against the baseline. Step 2: compiler and fusion, the run with everything switched off, and which switch makes the
difference:

    as it is, as it is again      the run's own spread
    everything off                apart from it by more than rounding and that spread? If not, the step passes
    halves of the switches        down to the fewest that, off together, bring the losses of `everything off`
    the rest off                  a check: with all but those off, the losses are those of the run as it is
    parts of the guilty switch    likewise, if the parts together do it

Losses alone are recorded there: reading a value in between keeps it from being fused, so a larger capture would change what is
looked for. If a capture of both runs shows the same difference, the first call that deviates is named too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from trueup.analysis.anomalies import overflow
from trueup.analysis.kept_runs import KeptRuns, fewest
from trueup.analysis.remedy.advice import next_command
from trueup.analysis.triage.running import Outcome, Runner, Switch, Table, Triage, Trial, load, losses_of
from trueup.comparison.result.comparing import compare
from trueup.foundation.facts.anomaly import OverflowResult
from trueup.foundation.facts.slots import SINGLE, UNIT_ROUNDOFF
from trueup.foundation.model import LEVELS, Result, Status, TrueupError
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.declared import precision_of
from trueup.foundation.words.wording import counted, short_source
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions, WatchOptions, capture_options

NAME = "compiler and fusion"
PAGE = "optimisations"
NO_LOSS = (
    "no loss was seen: nothing called backward() on a number, took a gradient of one with a tape, or asked a session's training "
    "step for one"
)

NETWORK = "whole network"
NETWORK_PAGE = "comparison"
UNASKED = (
    "no baseline was given: record one where the training is right (trueup capture -o runs/good -- COMMAND) and name it "
    "(--baseline runs/good)"
)


@dataclass
class Search:
    """The runs of this step."""

    runner: Runner
    report: Path
    as_it_is: Trial
    baseline: Mapping[int, float] | None
    again: Trial = field(init=False)
    off: Trial = field(init=False)  # with everything off
    switches: tuple[Switch, ...] = ()
    at: int = 0  # the step whose loss tells runs apart
    remarks: list[str] = field(default_factory=list)
    where: Result | None = None

    def look(self) -> Outcome:
        """Make the step."""
        before = self.as_it_is
        if not before.losses:
            return self._unknown(NO_LOSS)
        if before.framework is None:
            return self._unknown("no framework that has an adapter ran")
        self.switches = self.runner.table.top(before.framework, before.devices)
        if not self.switches:
            return self._unknown(f"there is no switch for {before.framework} on {', '.join(before.devices) or 'its device'}")
        self.again = self.runner.losses("as it is, again")
        if self.again.failed or not self.again.losses:
            return self._unknown(f"run as it is again, {self.again.failed or 'it drew no loss'}")
        failed = self._switch_all_off()
        if failed is not None:
            return self._unknown(failed)
        self._note_seen(self.off)
        found = apart(before.losses, self.off.losses, self.again.losses, 0.0)
        if not found.steps:
            return self._unknown("the runs have no step with a loss in common")
        if found.first is None:
            said = f"losses of {found.steps} steps are bitwise the same with and without {len(self.switches)} optimisations"
            return Outcome(NAME, "pass", said, tuple(self.remarks))
        return self._judge(found.first)

    def _judge(self, first: int) -> Outcome:
        """Tell rounding from more."""
        unit = self._capture_both(first)
        found = apart(self.as_it_is.losses, self.off.losses, self.again.losses, unit)
        noise = spread(self.as_it_is.losses, self.again.losses)
        if noise:
            self.remarks.append(f"two runs as it is are up to {percent(noise)} apart: set seeds (trueup.seed_all), or expect less")
        culprit = None if self.where is None else self.where.culprit
        if found.step is None and culprit is None:
            how = "the size of rounding" if not noise else "no more than the run is from its own repeat"
            if self.where is None:
                how += ", judged by losses alone"
            said = f"without {len(self.switches)} optimisations the losses move by at most {percent(found.largest)}: {how}"
            return Outcome(NAME, "pass", said, tuple(self.remarks), result=self.where, page=self._page())
        self.at = found.step if found.step is not None else found.widest if found.widest is not None else first
        one, other = self.as_it_is.losses[self.at], self.off.losses[self.at]
        if self.again.losses.get(self.at, one) != one and gap(one, self.again.losses[self.at]) > 0.1 * gap(one, other):
            return self._unknown(
                f"the losses of step {self.at} are {percent(gap(one, other))} apart with and without optimisations, and "
                f"{percent(gap(one, self.again.losses[self.at]))} from one run to the next: set seeds (trueup.seed_all)"
            )
        if culprit is not None and not tells(gap(one, other), unit):
            return self._unknown(
                f"{culprit.name} ({culprit.op}) gives something else without {len(self.switches)} optimisations, and the losses "
                f"are only {percent(gap(one, other))} apart, too near to find out which one it is: more steps may tell (--steps)"
            )
        return self._blame()

    def _blame(self) -> Outcome:
        guilty = fewest(self.switches, self._enough)
        checked = self._checked(guilty)
        while len(guilty) == 1 and (inner := self._inside(guilty[0])):
            guilty = inner
        names = [one.name for one in guilty]
        said = f"with {named(names)} off {self._became()}"
        if not checked:
            self.remarks.append("a switch alone does not tell: with the others off, and it on, the losses are between the two")
        explains, why = self._explains()
        culprit = None if self.where is None else self.where.culprit
        if culprit is not None:
            line = f", {short_source(culprit.source)}" if culprit.source else ""
            self.remarks.append(f"first call that differs: {culprit.name} ({culprit.op}){line}")
        wholes = {one.name: f" (a part of {one.within})" for one in guilty if one.within}
        self.remarks.insert(0, "; ".join(f"{one.name}: {one.what}{wholes.get(one.name, '')}" for one in guilty))
        self.remarks += [why] if why else []
        status: Status = "DEVIATES" if explains else "pass"
        return Outcome(
            NAME, status, said, tuple(dict.fromkeys(self.remarks)), tuple(line for one in guilty for line in by_hand(one)),
            tuple(names), self.where, self._page(),
        )  # fmt: skip

    def _switch_all_off(self) -> str | None:
        """Run with everything off, except a switch that the command does not survive; return why there is no such run."""
        self.off = self.runner.losses("with everything off", self.switches)
        if not self.off.failed and self.off.losses:
            return None
        first = self.off.failed or "it drew no loss"
        if len(self.switches) == 1:
            return f"with {self.switches[0].name} off {first}"
        kept = []
        for switch in self.switches:
            trial = self.runner.losses(f"without {switch.name}", [switch], 1)
            if trial.failed or not trial.losses:
                self.remarks.append(f"{switch.name} was left on: without it {trial.failed or 'no loss was drawn'}")
            else:
                kept.append(switch)
        if not kept or len(kept) == len(self.switches):
            return f"with everything off {first}"
        self.switches = tuple(kept)
        self.off = self.runner.losses("with all else off", self.switches)
        return None if not self.off.failed and self.off.losses else f"with everything off {first}"

    def _enough(self, off: tuple[Switch, ...]) -> bool:
        """Tell whether these, off together, give the losses of everything off."""
        trial = self.runner.losses(f"without {', '.join(one.name for one in off)}", off, self.at + 1)
        self._note_seen(trial)
        loss = trial.losses.get(self.at)
        return loss is not None and follows(loss, self.as_it_is.losses[self.at], self.off.losses[self.at])

    def _checked(self, guilty: Sequence[Switch]) -> bool:
        """Tell whether switching off all others leaves the losses as they are."""
        others = [one for one in self.switches if one not in guilty]
        if not others:
            return True
        trial = self.runner.losses(f"without all but {', '.join(one.name for one in guilty)}", others, self.at + 1)
        loss = trial.losses.get(self.at)
        return loss is not None and follows(loss, self.off.losses[self.at], self.as_it_is.losses[self.at])

    def _inside(self, whole: Switch) -> tuple[Switch, ...]:
        """Return the parts of a switch that explain it; none if they do not, or it has none."""
        parts = self.runner.table.parts(whole, str(self.as_it_is.framework), self.as_it_is.devices)
        if not parts:
            return ()
        if not self._enough(parts):
            if len(parts) > 1:
                self.remarks.append(f"not its parts: the {len(parts)} switches within {whole.name}, off together, change nothing")
            return ()
        return fewest(parts, self._enough)

    def _became(self) -> str:
        one, other = self.as_it_is.losses[self.at], self.off.losses[self.at]
        apart_by = gap(one, other)
        told = "" if apart_by == float("inf") else f", {percent(apart_by)} apart"
        return f"the loss of step {self.at} becomes {figure(other, one)} instead of {figure(one, other)}{told}"

    def _explains(self) -> tuple[bool, str]:
        """Tell whether switching them off leads to the baseline, and how near."""
        if self.baseline is None:
            return True, "which of the two is right a baseline would tell (--baseline)"
        right = self.baseline.get(self.at)
        if right is None:
            return True, f"the baseline has no loss of step {self.at}, so which of the two is right is not known"
        one, other = gap(self.as_it_is.losses[self.at], right), gap(self.off.losses[self.at], right)
        told = f"the run is {percent(one)} apart from the baseline's loss of step {self.at} as it is, and {percent(other)} without"
        if other <= 0.5 * one:
            return True, told
        return False, f"{told}: so it does not explain the difference from the baseline"

    def _capture_both(self, first: int) -> float:
        """Record both runs around a step and compare them; return the rounding unit of the narrowest dtype in them."""
        steps = f"{max(first - 1, 0)}:{first + 1}"
        both: tuple[tuple[str, tuple[Switch, ...]], ...] = ("everything off", self.switches), ("as it is", ())
        trials = [self.runner.capture(f"{name}, recorded", off, steps) for name, off in both]
        if any(trial.failed for trial in trials):
            self.remarks.append(f"where they part was not recorded: {next(t.failed for t in trials if t.failed)}")
            return SINGLE
        captures = [open_capture(trial.directory) for trial in trials]
        unit = rounding_unit(captures[0])
        here = losses_of(captures[1]).get(first)
        if here is None or not follows(here, self.off.losses[first], self.as_it_is.losses[first]):
            self.remarks.append(
                "where they part cannot be recorded: a run whose values are read in between does not show the difference, for what "
                "is read is not rewritten"
            )
            return unit
        try:
            self.where = compare(*captures)
        except TrueupError as error:
            self.remarks.append(f"where they part is not known: {' '.join(str(error).split())}")
            return unit
        self.where.save(self.report / PAGE)
        return unit

    def _page(self) -> str | None:
        return None if self.where is None else PAGE

    def _note_seen(self, trial: Trial) -> None:
        self.remarks += [text for text in trial.remarks if text not in self.remarks]

    def _unknown(self, why: str) -> Outcome:
        return Outcome(NAME, "could not tell", why, tuple(self.remarks), result=self.where, page=self._page())


def rounding_unit(capture: Capture) -> float:
    """Return the unit roundoff of the narrowest float dtype of forward results, or of products declared narrower."""
    found = capture.records(columns=["slot", "dtype"], phase="forward")
    slots = pc.starts_with(found["slot"].cast("string"), "output")
    names = set(found["dtype"].cast("string").filter(slots).to_pylist())
    told = [UNIT_ROUNDOFF[name] for name in names if name in UNIT_ROUNDOFF]
    manifests = list(capture.ranks.values())
    declared = precision_of(
        [manifest.get("environment", {}) for manifest in manifests],
        [map(str, manifest.get("devices", ())) for manifest in manifests],
    )
    return max([*told, declared.matmul, declared.convolution], default=0.0) or SINGLE


Losses = Mapping[int, float]

ROUNDING = 64
"""How many units of rounding of the narrowest dtype a loss may move when the same mathematics is computed in another order. Ours:
float32 classifiers and transformers moved by up to 10 of them when kernels were fused or not; sums of large terms move more."""
# What rounding may become by the first update of weights. Ours: Adam makes a full step of a gradient that is all rounding
UPDATED = 1e-3
TELLING = 16  # below so many units of rounding (and `UPDATED`) other switches move a loss as far: the guilty one is unknown
CLEAR = 0.05  # a relative distance that no rounding explains within a few steps: that of `trueup compare`'s criterion (``loss``)
NOISE = 4.0  # times further apart than a run from its repeat; the spread of two runs is itself uncertain by so much
NEAR = 0.1  # a run follows another one where it is this near to it, in shares of the distance between the two


def gap(one: float, other: float) -> float:
    """Return the relative distance of two losses; infinite where they differ and one is NaN or Inf."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


@dataclass(frozen=True, slots=True)
class Apart:
    """Two runs' losses, over the steps that both have."""

    steps: int
    first: int | None  # first step in which they differ at all, None: bitwise the same
    largest: float
    widest: int | None  # first step in which they are at least half as far apart as in any
    step: int | None  # first step in which they differ by more than rounding and noise explain; None: in no step
    relative: float  # how far apart they are there


def apart(one: Losses, other: Losses, again: Losses, unit: float) -> Apart:
    """Tell how far apart two runs' losses are, beside the first one's repeat and its narrowest dtype's rounding unit."""
    both = sorted(set(one) & set(other))
    gaps = {step: gap(one[step], other[step]) for step in both}
    first = next((step for step in both if gaps[step] > 0), None)
    largest = max(gaps.values(), default=0.0)
    widest = next((step for step in both if first is not None and gaps[step] >= largest / 2), None)
    noise = 0.0
    for number, step in enumerate(both):
        noise = max(noise, gap(one[step], again[step]) if step in again else 0.0)
        allowed = (0.0, UPDATED)[number] if number < 2 else CLEAR  # later on rounding has gone through the weights
        if gaps[step] > max(min(ROUNDING * unit, CLEAR), allowed, NOISE * noise):
            return Apart(len(both), first, largest, widest, step, gaps[step])
    return Apart(len(both), first, largest, widest, None, 0.0)


def tells(relative: float, unit: float) -> bool:
    """Tell whether two losses are far enough apart to see which of them a third one follows."""
    return relative > min(TELLING * unit, UPDATED)


def follows(loss: float, one: float, other: float) -> bool:
    """Tell whether a loss is ``other``, rather than ``one`` or something between the two."""
    if math.isfinite(one) and math.isfinite(other):
        return math.isfinite(loss) and abs(loss - other) <= NEAR * abs(one - other)
    return gap(loss, other) <= CLEAR


def spread(one: Losses, again: Losses) -> float:
    """Return the largest distance of a run from its repeat."""
    return max((gap(one[step], again[step]) for step in set(one) & set(again)), default=0.0)


def percent(share: float) -> str:
    """Write a relative distance: ``3.1 %``, ``2.4e-07``."""
    if not math.isfinite(share):
        return "infinitely far"
    return f"{100 * share:.3g} %" if share >= 1e-4 or share == 0 else f"{share:.2g}"


def figure(loss: float, other: float) -> str:
    """Write a loss with as many digits as tell it from another one."""
    for digits in range(6, 17):
        if f"{loss:.{digits}g}" != f"{other:.{digits}g}":
            return f"{loss:#.{digits}g}"
    return f"{loss!r}"


def named(names: Sequence[str]) -> str:
    """Write names as a sentence does: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def by_hand(switch: Switch) -> Iterator[str]:
    """Yield lines for a shell or a script that switch it off in the user's own training."""
    yield from (f"export {name}={value}" for name, value in switch.environment.items())
    for target, *arguments in switch.order.get("call", ()):
        yield f"{target}({', '.join(map(repr, arguments))})"
    yield from (f"{target} = {value!r}" for target, value in switch.order.get("set", {}).items())
    for action, argument in switch.order.get("adapter", {}).items():
        yield from _adapted(action, argument)
    if switch.rules:
        yield f"fusion_switch_file with {', '.join(switch.rules)} off (see the runs' *.fusion_switch.json)"


def _adapted(action: str, argument: Any) -> Iterator[str]:
    if action == "compile_stance":
        yield f'torch.compiler.set_stance("{argument}")'
    elif action == "compile_backend":
        yield f'torch.compile(..., backend="{argument}")'
    elif action == "optimizers":
        yield f"torch.optim.Adam(..., {', '.join(f'{name}=False' for name in argument)})  # of whichever optimizer it is"
    elif action == "xla_functions":
        yield "tf.function(..., jit_compile=False), model.compile(..., jit_compile=False)"
    elif action in ("rewriter", "optimizer_options"):
        if action == "rewriter":
            yield f"tf.config.optimizer.set_experimental_options({ {name: value is True for name, value in argument.items()} })"
        numbers = NUMBERS[action]
        place = "rewrite_options" if action == "rewriter" else "optimizer_options"
        for name, value in argument.items():
            yield f"config.graph_options.{place}.{name} = {numbers.get(value, value)}  # TensorFlow 1"


# RewriterConfig.Toggle and MemOptType, OptimizerOptions.GlobalJitLevel and Level (TensorFlow 2.21)
NUMBERS = {"rewriter": {"ON": 1, "OFF": 2, "NO_MEM_OPT": 1}, "optimizer_options": {"OFF": -1, "L0": -1}}


def look_at_the_network(runner: Runner, report: Path, baseline: Path | None) -> Outcome:
    """Record what the baseline recorded, and compare."""
    if baseline is None:
        return Outcome(NETWORK, "not asked", UNASKED)
    before = open_capture(baseline)
    trial = runner.like("recorded like the baseline", options_of(before, runner.steps))
    if trial.failed:
        return Outcome(NETWORK, "could not tell", f"recorded like the baseline {trial.failed}")
    try:
        result = compare(before, trial.directory)
    except TrueupError as error:
        return Outcome(NETWORK, "could not tell", f"the two cannot be compared: {' '.join(str(error).split())}")
    result.save(report / NETWORK_PAGE)
    return outcome(result)


def outcome(result: Result) -> Outcome:
    """Say what a comparison found."""
    first, *rest = [line.strip() for line in result.sentence.splitlines()] or [""]
    said = first.split("  ", 1)[-1].strip()
    told = next_command(result)
    advice = () if told is None else (told[1],)
    status = {"aligned": "pass", "deviates": "DEVIATES"}.get(result.verdict, "could not tell")
    notes = tuple(rest) if rest else tuple(result.notes[:3])
    return Outcome(NETWORK, status, said, notes, advice, result=result, page=NETWORK_PAGE)  # type: ignore[arg-type]


def options_of(baseline: Capture, steps: int) -> CaptureOptions:
    """Return the options that record what a baseline did, up to its last step, or ``steps`` steps if it has none."""
    last = max(baseline.steps, default=steps - 1)
    until = ((min(baseline.steps, default=0), last + 1),)
    try:
        told = CaptureOptions.from_json(json.dumps(baseline.root.get("config")))
    except (KeyError, TypeError, ValueError, AttributeError):  # an imported dump, or one of another version
        levels = tuple(level for level in LEVELS if level in baseline.levels) or LEVELS
        return CaptureOptions.of(level=levels, steps=f"{until[0][0]}:{last + 1}", stop=True)
    bounded = told.steps is not None and all(end is not None for _, end in told.steps)
    return replace(
        told, steps=told.steps if bounded else until, stop=True, shadow=None, inputs_from=None, force=None, on_error="continue"
    )


ANOMALIES = "float anomalies"
ANOMALIES_PAGE = "overflow"
SavePage = Callable[[OverflowResult, Path], Path]


def look_for_anomalies(runner: Runner, report: Path, baseline: Path | None, save_page: SavePage | None = None) -> Outcome:
    """Run it under a watch and say whether it makes bad numbers; a hit that the baseline has too explains nothing. ``save_page``
    writes the report of a hit into a folder."""
    trial = runner.watch("under a watch", capture_options(None, None), WatchOptions.of(1).to_json())
    reports = [told for told in launch.reports_of(trial.directory) if told.get("watch") and told.get("calls")]
    hits = sorted(((hit["step"], hit["rank"], hit) for told in reports for hit in told["watch"]["first"]), key=lambda one: one[:2])
    scales = tuple(dict.fromkeys(text for told in reports if (text := told["watch"]["loss_scale"]["said"])))
    if hits:
        return _found(hits[0][2], scales, report, baseline, save_page)
    if trial.failed:
        return Outcome(ANOMALIES, "could not tell", f"under a watch {trial.failed}", scales)
    if not reports:
        return Outcome(ANOMALIES, "could not tell", "nothing was watched: no call of a framework with an adapter was seen", scales)
    steps = min(max(told["watch"]["steps"] for told in reports), runner.steps)
    skipped = max(told["watch"]["transients"] for told in reports)
    meant = f"; {skipped:,} steps were skipped by the loss scaling, as it is meant to" if skipped else ""
    return Outcome(ANOMALIES, "pass", f"no NaN, Inf or saturated value in {counted(steps, 'step')}{meant}", scales)


def _found(
    hit: dict[str, Any], scales: Sequence[str], report: Path, baseline: Path | None, save_page: SavePage | None
) -> Outcome:  # fmt: skip
    said = str(hit["said"])
    remarks = [f"your code: {hit['source']}"] if hit.get("source") else []
    remarks += scales
    if baseline is not None and _known(hit, baseline):
        return Outcome(ANOMALIES, "pass", f"{said}; the baseline has the same, so it explains no difference", tuple(remarks))
    page = None
    if hit.get("path") and save_page is not None:
        try:
            save_page(overflow(hit["path"]), report / ANOMALIES_PAGE)
            page = ANOMALIES_PAGE
        except TrueupError as error:
            remarks.append(f"its report could not be made: {str(error).splitlines()[0]}")
    advice = (f"trueup overflow {hit['path']}",) if hit.get("path") else ()
    return Outcome(ANOMALIES, "DEVIATES", said, tuple(remarks), advice, page=page)


def _known(hit: dict[str, Any], baseline: Path) -> bool:
    """Tell whether the same call is bad in the baseline, too."""
    try:
        found = overflow(baseline).anomalies
    except TrueupError:
        return False
    places = [one.place for one in found if one.matters != "harmless"]
    return any(f"{f'{at.scope}/' if at.scope else ''}{at.op}, {at.phase}" == hit["name"] for at in places)


STEPS = 10
TIMEOUT = 3600.0
DIRECTORY = "trueup-triage"
NAMES = (ANOMALIES, NAME, NETWORK)


def triage(
    command: Sequence[str], output: str | Path | None = None, *, baseline: str | Path | None = None, steps: int = STEPS,
    timeout: float | None = TIMEOUT, table: Table | None = None, every: bool = False,
    tell: Callable[[Trial], None] = lambda _: None, save_page: SavePage | None = None,
) -> Triage:  # fmt: skip
    """Run a command with and without what optimises it, and say which step explains that its training is wrong.

    Args:
        command: the training; it is run some ten times, ``steps`` steps each.
        output: for the runs and the report; else ``trueup-triage``, or the next free of that name.
        baseline: a capture of the training where it is right.
        steps: after how many a run ends.
        timeout: seconds after which a run is ended; None: never.
        table: the switches; else those that come along (`trueup.analysis.triage.running.load`).
        every: make all steps, also after one that explains it.
        tell: called with each run that was made.
        save_page: writes what a float anomaly is into a folder beside the report.

    Raises:
        TrueupError: the command cannot start, the baseline is no capture, or ``output`` holds something.
    """
    before = None if baseline is None else open_capture(baseline)
    asked = ["triage", None if before is None else str(before.path), steps, timeout, every]
    with _kept(output, command, asked) as kept:
        folder = kept.folder
        runner = Runner(command, kept, table or load(), steps=steps, timeout=timeout, tell=tell)
        as_it_is = runner.losses("as it is")
        outcomes: list[Outcome] = []

        def made(place: Path | None) -> Sequence[Callable[[], Outcome]]:
            search = Search(runner, folder, as_it_is, None if before is None else losses_of(before))
            return (
                lambda: look_for_anomalies(runner, folder, place, save_page),
                search.look,
                lambda: look_at_the_network(runner, folder, place),
            )

        if as_it_is.failed:
            outcomes.append(Outcome(NAMES[0], "could not tell", f"run as it is, {as_it_is.failed}", as_it_is.remarks))
            outcomes += [Outcome(name, "not reached", "the command does not run") for name in NAMES[1:]]
        else:
            for name, look in zip(NAMES, made(None if before is None else Path(before.path)), strict=True):
                explained = next((one.name for one in outcomes if one.status == "DEVIATES"), None)
                if explained is not None and not every:
                    outcomes.append(Outcome(name, "not reached", f"{explained} explains it; --all goes on"))
                else:
                    outcomes.append(look())
    named = None if before is None else str(before.path)
    return Triage(tuple(redacted(command)), folder, outcomes, runner.trials, named, as_it_is.framework)


def _kept(output: str | Path | None, command: Sequence[str], asked: list[Any]) -> KeptRuns:
    """Return where the runs go: the folder that is named, else the first of our own that is free or holds a triage that goes on."""
    if output is not None:
        return KeptRuns(Path(output), command, asked)
    for k in range(1, 10_000):
        with suppress(TrueupError):
            return KeptRuns(Path(f"{DIRECTORY}{'' if k == 1 else f'-{k}'}"), command, asked)
    raise TrueupError(f"{DIRECTORY} and all names like it are taken\n  next:     name a folder with -o")
