"""What `trueup capture -- COMMAND` says at the end: what was captured, by whom, and which options selected nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.foundation.model import TrueupError
from trueup.foundation.store.policy_uses import policy_lines
from trueup.recording.adapters import ADAPTERS, listed
from trueup.recording.recorder.options import CaptureOptions, in_ranges
from trueup.recording.recorder.seen import ranges_text, sentence

if TYPE_CHECKING:
    from trueup.foundation.store import Capture

Report = dict[str, Any]

NAMES, TITLES = listed([adapter.name for adapter in ADAPTERS]), listed([adapter.title for adapter in ADAPTERS])
NO_FRAMEWORK = (
    f"no process of the command imported {TITLES}\n"
    f"  expected: a Python process that imports {NAMES}, started with the environment of the command\n"
    "  got:      none\n"
    "  next:     name the training command; python -I, -E or -S, or a PYTHONPATH set anew, hides a process from Trueup"
)


def tell(directory: Path, options: CaptureOptions, code: int) -> int:
    """Say on stderr what was captured.

    Returns:
        ``code`` if the command failed, else 2 if nothing was captured, else 0; 2 also if the capture failed and the run was to
        stop then.
    """
    reports = _reports(directory)
    capture = _capture(directory)
    ended = f"; the command ended with exit code {code}" if code else ""
    if capture is None and any(directory.glob("rank-*/step-*/records-*")):
        _say(f"what was captured into {directory} cannot be opened{ended}; nothing of it was removed\n"
             f"  next:     trueup show {directory} says why")  # fmt: skip
        return code or 2
    if capture is None or not capture.rows or _only_losses(capture, reports):
        why = _why_nothing(directory, options, reports) or (NO_FRAMEWORK.splitlines()[0] if code else NO_FRAMEWORK)
        _say(f"nothing was captured into {directory}{ended}: {why}")
        _clear(directory)
        return _exit_code(options, reports, capture, code) or 2
    ranks = f", {len(capture.ranks)} ranks" if len(capture.ranks) > 1 else ""
    steps = f"{len(capture.steps)} step{'s' if len(capture.steps) != 1 else ''}"
    _say(f"captured {capture.rows:,} slots over {steps}{ranks} into {directory}{ended}")
    for text in policy_lines(capture.ranks.values()):
        _say(f"policy: {text}")
    for text in [*_unused(options, reports), *_remarks(reports), *capture.problems]:
        _say(f"note: {text}")
    return _exit_code(options, reports, capture, code)


def _exit_code(options: CaptureOptions, reports: Sequence[Report], capture: Capture | None, code: int) -> int:
    """Return the command's own exit code, or 2 where it was to stop with its capture and that failed."""
    if options.on_error == "continue":
        return code
    told = any(report.get("failure") for report in reports)
    # A process that could not leave its last report (the disk is full) has left a manifest that was never finished.
    untold = not code and capture is not None and any(m.get("status") != "complete" for m in capture.ranks.values())
    return 2 if told or untold else code


def _say(text: str) -> None:
    print(f"trueup: {text}", file=sys.stderr, flush=True)


def _capture(directory: Path) -> Capture | None:
    if not directory.is_dir() or not any(directory.iterdir()):
        return None
    from trueup.foundation.store import open_capture

    try:
        return open_capture(directory)
    except TrueupError:
        return None


def _reports(directory: Path) -> list[Report]:
    reports = []
    for path in sorted((directory / "processes").glob("*.json")):
        with suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    return reports


def _clear(directory: Path) -> None:
    """Leave nothing in the way of the next attempt: what was empty before, and holds nothing now, is removed."""
    for name in ("processes", "rank-*", "unranked-*"):
        for folder in directory.glob(name):
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        (directory / "manifest.json").unlink(missing_ok=True)
        directory.rmdir()


def _only_losses(capture: Capture, reports: Sequence[Report]) -> bool:
    """Tell whether no option selected a call: the loss curve alone, which is always kept, is no capture."""
    told = [r for r in reports if r.get("calls") and not r.get("displaced")]
    return len(told) == len(capture.ranks) and not any(r.get("selected", True) for r in told)


def _why_nothing(directory: Path, options: CaptureOptions, reports: Sequence[Report]) -> str:
    if not directory.is_dir():
        return "the directory was removed, or replaced, while the command ran"
    said = [*_unused(options, reports), *(f"{_name(r)} failed: {r['failure']}" for r in reports if r.get("failure"))]
    said += [f"{_name(r)} was killed before its first flush, or could not write its report" for r in reports if _killed(r)]
    if not said:
        said = [f"{_name(r)}: {r['why']}" for r in reports if r.get("why")][:8]
    if not said and reports:
        said = [f"{_name(r)} is a launcher, and nothing that it started imported {TITLES}" for r in reports[:1]]
    return "; ".join(said)


def _unused(options: CaptureOptions, reports: Sequence[Report]) -> list[str]:
    """Return the options that selected nothing in any process that trained."""
    trained = [r for r in reports if r.get("role") in ("run", "child") and "unused" in r]
    said = []
    ranks = sorted({r["process_rank"] for r in trained if r.get("process_rank") is not None})
    if options.ranks is not None and ranks:
        missing = [r for r in options.ranks if not any(in_ranges(rank, (r,)) for rank in ranks)]
        if missing:
            were = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            said.append(f"ranks {ranges_text(tuple(missing))} selected nothing: {were} ran")
        trained = [r for r in trained if in_ranges(r["process_rank"] or 0, options.ranks)]
    first = trained[0]["unused"] if trained else {}
    return said + [sentence(option, first[option]) for option in first if all(option in r["unused"] for r in trained)]


def _remarks(reports: Iterable[Report]) -> list[str]:
    """Return what is to be said of single processes; those that had nothing to record are counted."""
    said, quiet = [], Counter[str]()
    for report in reports:
        if _killed(report):
            continue  # its rank, if it has one, reads as interrupted
        if report.get("failure"):
            said.append(f"{_name(report)} failed to capture: {report['failure']}")
        elif report.get("displaced"):
            said.append(f"what {_name(report)} recorded before its ranks started is not part of the capture")
        elif not report.get("calls"):
            quiet[_kind(report)] += 1
    if quiet:
        counted = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in quiet.items())
        said.append(f"nothing to record in {counted}")
    return said


def _killed(report: Report) -> bool:
    """Tell whether a process left no last report."""
    return report.get("state") == "running" and report.get("role") == "run"


def _kind(report: Report) -> str:
    kind = str(report.get("role", "run"))
    return {"run": "other process", "child": "worker without process group"}.get(kind, kind)


def _name(report: Report) -> str:
    return f"process {report.get('pid')} ({' '.join(map(str, report.get('argv', [])[:3]))})"
