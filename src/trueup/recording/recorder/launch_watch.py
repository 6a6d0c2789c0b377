"""`trueup watch -- COMMAND`: run a command whose Python processes watch themselves, then say what they found."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trueup.recording.recorder import launch, summary
from trueup.recording.recorder.options import CaptureOptions
from trueup.recording.recorder.watch_options import STOPPED, WatchOptions

DIRECTORY = "trueup-watch"
NAMED = 8
"""Hits that are named at the end."""


def run(output: Path | None, options: CaptureOptions, watch: WatchOptions, command: Sequence[str]) -> int:
    """Run a command under watch.

    Returns:
        3 if the run was stopped after as many hits as were asked for, the command's own exit code if it failed, 2 if nothing was
        watched, else 0.

    Raises:
        TrueupError: the command cannot start, or the directory is not empty or cannot be written.
    """
    directory = (_free() if output is None else output).absolute()
    code = launch.execute(directory, options, command, watch=watch.to_json())
    return tell(directory, options, code)


def _free() -> Path:
    names = (Path(f"{DIRECTORY}{'' if k == 1 else f'-{k}'}") for k in range(1, 10_000))
    return next(name for name in names if not name.exists())


def tell(directory: Path, options: CaptureOptions, code: int) -> int:
    """Say on stderr what was found; return the exit code."""
    reports = summary._reports(directory)
    watched = [report for report in reports if report.get("watch") and report.get("calls")]
    stopped = (directory / "stop").exists()
    ended = f"; the command ended with exit code {code}" if code and not stopped else ""
    if not watched and not any(directory.glob("step-*")):
        why = summary._why_nothing(directory, options, reports) or summary.NO_FRAMEWORK
        _say(f"nothing was watched{ended}: {why}")
        summary._clear(directory)
        return code or 2
    for report in reports:
        if report.get("failure"):
            _say(f"note: {summary._name(report)} stopped to watch: {report['failure']}")
    _say(f"{_found(watched)}{ended}")
    for line in _hits(watched):
        _say(f"  {line}")
    for scale in dict.fromkeys(report["watch"]["loss_scale"]["said"] for report in watched):
        if scale:
            _say(scale)
    if stopped:
        return STOPPED
    if not any(report["watch"]["hits"] for report in watched) and not any(directory.glob("step-*")):
        _clear(directory)
    return code


def _found(watched: Sequence[dict[str, Any]]) -> str:
    steps = max((report["watch"]["steps"] for report in watched), default=0)
    hits = sum(report["watch"]["hits"] for report in watched)
    skipped = max((report["watch"]["transients"] for report in watched), default=0)
    ranks = f" on {len(watched)} ranks" if len(watched) > 1 else ""
    some = f"watched {steps:,} step{'s' if steps != 1 else ''}{ranks}: "
    some += f"{hits:,} hit{'s' if hits != 1 else ''}" if hits else "nothing bad"
    return some + (f"; {skipped:,} steps overflowed and were skipped by the loss scaling, as it is meant to" if skipped else "")


def _hits(watched: Sequence[dict[str, Any]]) -> list[str]:
    hits = sorted((hit["step"], hit["rank"], hit) for report in watched for hit in report["watch"]["first"])
    lines = [f"{hit['said']} ({hit['path'] or hit['tensors']})" for _, _, hit in hits]
    more = sum(report["watch"]["hits"] for report in watched) - NAMED
    return lines[:NAMED] + ([f"and {more:,} more"] if more > 0 else [])


def _clear(directory: Path) -> None:
    """Leave nothing of a run in which nothing was bad."""
    shutil.rmtree(directory / "processes", ignore_errors=True)
    with suppress(OSError):
        directory.rmdir()


def _say(text: str) -> None:
    print(f"trueup: {text}", file=sys.stderr, flush=True)
