"""Step 1: float anomalies. The run under `trueup.watch`, which also tells a loss scale that collapses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trueup.analysis.anomalies import overflow
from trueup.analysis.triage.found import Outcome
from trueup.analysis.triage.running import Runner
from trueup.foundation.model import TrueupError
from trueup.recording.recorder import summary
from trueup.recording.recorder.watch_options import WatchOptions, capture_options

NAME = "float anomalies"
PAGE = "overflow"


def look(runner: Runner, report: Path, baseline: Path | None) -> Outcome:
    """Run it under a watch and say whether it makes bad numbers.

    Args:
        runner: of the command.
        report: folder of the report; that of the hit goes into it.
        baseline: a capture; a hit that it has too explains no difference.
    """
    trial = runner.watch("under a watch", capture_options(None, None), WatchOptions.of(1).to_json())
    reports = [told for told in summary._reports(trial.directory) if told.get("watch") and told.get("calls")]
    hits = sorted(((hit["step"], hit["rank"], hit) for told in reports for hit in told["watch"]["first"]), key=lambda one: one[:2])
    scales = tuple(dict.fromkeys(text for told in reports if (text := told["watch"]["loss_scale"]["said"])))
    if hits:
        return _found(hits[0][2], scales, report, baseline)
    if trial.failed:
        return Outcome(NAME, "could not tell", f"under a watch {trial.failed}", scales)
    if not reports:
        return Outcome(NAME, "could not tell", "nothing was watched: no call of a framework that has an adapter was seen", scales)
    steps = min(max(told["watch"]["steps"] for told in reports), runner.steps)
    skipped = max(told["watch"]["transients"] for told in reports)
    meant = f"; {skipped:,} steps were skipped by the loss scaling, as it is meant to" if skipped else ""
    return Outcome(NAME, "pass", f"no NaN, Inf or saturated value in {_counted(steps, 'step')}{meant}", scales)


def _found(hit: dict[str, Any], scales: Sequence[str], report: Path, baseline: Path | None) -> Outcome:
    said = str(hit["said"])
    remarks = [f"your code: {hit['source']}"] if hit.get("source") else []
    remarks += scales
    if baseline is not None and _known(hit, baseline):
        return Outcome(NAME, "pass", f"{said}; the baseline has the same, so it explains no difference", tuple(remarks))
    page = None
    if hit.get("path"):
        from trueup.doors.report.overflow_document import save_page

        try:
            save_page(overflow(hit["path"]), report / PAGE)
            page = PAGE
        except TrueupError as error:
            remarks.append(f"its report could not be made: {str(error).splitlines()[0]}")
    advice = (f"trueup overflow {hit['path']}",) if hit.get("path") else ()
    return Outcome(NAME, "DEVIATES", said, tuple(remarks), advice, page=page)


def _known(hit: dict[str, Any], baseline: Path) -> bool:
    """Tell whether the same call is bad in the baseline, too."""
    try:
        found = overflow(baseline).anomalies
    except TrueupError:
        return False
    places = [one.place for one in found if one.matters != "harmless"]
    return any(f"{f'{at.scope}/' if at.scope else ''}{at.op}, {at.phase}" == hit["name"] for at in places)


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
