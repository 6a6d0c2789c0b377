"""Step 3: the whole network, call by call, against the baseline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from trueup.analysis.remedy.advice import next_command
from trueup.analysis.triage.found import Outcome
from trueup.analysis.triage.running import Runner
from trueup.comparison.result.comparing import compare
from trueup.foundation.model import LEVELS, Result, TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.recording.recorder.options import CaptureOptions

NAME = "whole network"
PAGE = "comparison"
UNASKED = (
    "no baseline was given: record one where the training is right (trueup capture -o runs/good -- COMMAND) and name it "
    "(--baseline runs/good)"
)


def look(runner: Runner, report: Path, baseline: Path | None) -> Outcome:
    """Record what the baseline recorded and compare."""
    if baseline is None:
        return Outcome(NAME, "not asked", UNASKED)
    before = open_capture(baseline)
    trial = runner.like("recorded like the baseline", options_of(before, runner.steps))
    if trial.failed:
        return Outcome(NAME, "could not tell", f"recorded like the baseline {trial.failed}")
    try:
        result = compare(before, trial.directory)
    except TrueupError as error:
        return Outcome(NAME, "could not tell", f"the two cannot be compared: {' '.join(str(error).split())}")
    result.save(report / PAGE)
    return outcome(result)


def outcome(result: Result) -> Outcome:
    """Say what a comparison found."""
    first, *rest = [line.strip() for line in result.sentence.splitlines()] or [""]
    said = first.split("  ", 1)[-1].strip()
    told = next_command(result)
    advice = () if told is None else (told[1],)
    status = {"aligned": "pass", "deviates": "DEVIATES"}.get(result.verdict, "could not tell")
    notes = tuple(rest) if rest else tuple(result.notes[:3])
    return Outcome(NAME, status, said, notes, advice, result=result, page=PAGE)  # type: ignore[arg-type]


def options_of(baseline: Capture, steps: int) -> CaptureOptions:
    """Return the options that record what a baseline did; up to its last step, ``steps`` of them where it has none."""
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
