"""Step 2: compiler and fusion. The run with everything switched off, and which switch makes the difference.

    as it is, as it is again      the run's own spread
    everything off                apart from it by more than rounding and that spread? If not, the step passes
    halves of the switches        down to the fewest that, off together, bring the losses of `everything off`
    the rest off                  a check: with all but those off, the losses are those of the run as it is
    parts of the guilty switch    likewise, if the parts together do it

Losses alone are recorded: a value that somebody reads in between is not fused away, so a capture of more would change what is
looked for. Where a capture of both runs shows the same difference, the first call that deviates is named as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc

from trueup.analysis.recipes.found import Status
from trueup.analysis.triage.bisecting import fewest
from trueup.analysis.triage.found import Outcome, Trial
from trueup.analysis.triage.losses import apart, follows, gap, spread, tells
from trueup.analysis.triage.running import Runner, losses_of
from trueup.analysis.triage.table import Switch
from trueup.analysis.triage.telling import by_hand, figure, named, percent
from trueup.comparison.measures.roundoff import SINGLE, UNIT_ROUNDOFF
from trueup.comparison.result.comparing import compare
from trueup.comparison.verdict.operands import precision_of
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import short_source

NAME = "compiler and fusion"
PAGE = "optimisations"
NO_LOSS = (
    "no loss was seen: nothing called backward() on a number, took a gradient of one with a tape, or asked a session's training "
    "step for one"
)


@dataclass
class Search:
    """The runs of this step."""

    runner: Runner
    report: Path
    as_it_is: Trial
    baseline: Mapping[int, float] | None
    again: Trial | None = None
    off: Trial | None = None
    switches: tuple[Switch, ...] = ()
    at: int = 0
    """The step whose loss tells runs apart."""
    remarks: list[str] = field(default_factory=list)
    where: Result | None = None

    # ------------------------------------------------------------------------------------------------------------- the step
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
        assert self.off is not None
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
        assert self.again is not None
        assert self.off is not None
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
        wholes = self._wholes(guilty)
        self.remarks.insert(0, "; ".join(f"{one.name}: {one.what}{wholes.get(one.name, '')}" for one in guilty))
        self.remarks += [why] if why else []
        status: Status = "DEVIATES" if explains else "pass"
        return Outcome(
            NAME, status, said, tuple(dict.fromkeys(self.remarks)), tuple(line for one in guilty for line in by_hand(one)),
            tuple(names), self.where, self._page(),
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------------- single parts
    def _switch_all_off(self) -> str | None:
        """Run with everything off; without a switch that the command does not survive. Return why there is no such run."""
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
        """Tell whether these, off together, bring the losses of everything off."""
        assert self.off is not None
        trial = self.runner.losses(f"without {', '.join(one.name for one in off)}", off, self.at + 1)
        self._note_seen(trial)
        loss = trial.losses.get(self.at)
        return loss is not None and follows(loss, self.as_it_is.losses[self.at], self.off.losses[self.at])

    def _checked(self, guilty: Sequence[Switch]) -> bool:
        """Tell whether all others, off together, leave the losses as they are."""
        assert self.off is not None
        others = [one for one in self.switches if one not in guilty]
        if not others:
            return True
        trial = self.runner.losses(f"without all but {', '.join(one.name for one in guilty)}", others, self.at + 1)
        loss = trial.losses.get(self.at)
        return loss is not None and follows(loss, self.off.losses[self.at], self.as_it_is.losses[self.at])

    def _inside(self, whole: Switch) -> tuple[Switch, ...]:
        """Return the parts of a switch that explain it; none where they do not, or it has none."""
        parts = self.runner.table.parts(whole, str(self.as_it_is.framework), self.as_it_is.devices)
        if not parts:
            return ()
        if not self._enough(parts):
            if len(parts) > 1:
                self.remarks.append(f"not its parts: the {len(parts)} switches within {whole.name}, off together, change nothing")
            return ()
        return fewest(parts, self._enough)

    def _wholes(self, guilty: Sequence[Switch]) -> dict[str, str]:
        return {one.name: f" (a part of {one.within})" for one in guilty if one.within}

    def _became(self) -> str:
        assert self.off is not None
        one, other = self.as_it_is.losses[self.at], self.off.losses[self.at]
        apart_by = gap(one, other)
        told = "" if apart_by == float("inf") else f", {percent(apart_by)} apart"
        return f"the loss of step {self.at} becomes {figure(other, one)} instead of {figure(one, other)}{told}"

    def _explains(self) -> tuple[bool, str]:
        """Tell whether that is the way to the baseline, and say how near it comes."""
        assert self.off is not None
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

    # ------------------------------------------------------------------------------------------------------------- captures
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
        assert self.off is not None
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
    """Return the unit roundoff of the narrowest float dtype that forward calls give, or of products that are declared narrower."""
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
