"""From modules to the call: both trainings run again with operators recorded, until the same call is named twice.

    as it was recorded       modules alone; the comparison names one of them, or nothing
    with the operators       it has to name another call than before, else no recorded operator is to blame
    once more                the same call? Else again and again, until a sequential test decides (`bisection.search`)

All modules are recorded: no recorded call made the inputs of a part, so comparing parts would blame healthy calls for their inputs.

    CAND-inside/journal.jsonl              each pair of runs; the same command goes on where it was stopped
    CAND-inside/runs/baseline, candidate   the last of them
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trueup.analysis.bisection.search import Attempt, Chosen, Found, Journal, Search
from trueup.analysis.recipes.recipe import RecipeResult
from trueup.analysis.remedy.advice import next_command
from trueup.analysis.triage.running import last_line
from trueup.comparison.result.comparing import compare
from trueup.foundation.model import Result
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import counted, one_line
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions

SIDES = ("baseline", "candidate")
INSIDE = "-inside"  # what the captures with operators are called, after the capture that led there
OPERATORS = ("both runs with operators recorded",)


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
