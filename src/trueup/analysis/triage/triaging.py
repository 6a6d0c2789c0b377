"""The three steps of a triage, in order, up to the first that explains the difference.

Step 1: float anomalies, in a run under `trueup.watch`, which also tells a loss scale that collapses. Step 3: the whole network,
call by call, against the baseline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueup.analysis.anomalies import overflow
from trueup.analysis.kept_runs import KeptRuns
from trueup.analysis.remedy.advice import next_command
from trueup.analysis.triage import optimisations
from trueup.analysis.triage.running import Outcome, Runner, Table, Triage, Trial, load, losses_of
from trueup.comparison.result.comparing import compare
from trueup.foundation.facts.anomaly import OverflowResult
from trueup.foundation.model import LEVELS, Result, TrueupError
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import counted
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions, WatchOptions, capture_options

NETWORK = "whole network"
NETWORK_PAGE = "comparison"
UNASKED = (
    "no baseline was given: record one where the training is right (trueup capture -o runs/good -- COMMAND) and name it "
    "(--baseline runs/good)"
)


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
NAMES = (ANOMALIES, optimisations.NAME, NETWORK)


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
            search = optimisations.Search(runner, folder, as_it_is, None if before is None else losses_of(before))
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
