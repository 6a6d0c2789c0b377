"""`run`: the training once more, under capture."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.text import Text

from trueup.doors.cli import selection
from trueup.doors.shell.session import NAMES, Session, Side
from trueup.foundation.model import TrueupError
from trueup.foundation.store.manifest import read_root
from trueup.foundation.words.wording import one_line

Several = Optional[list[str]]  # noqa: UP045 - typer evaluates it on Python 3.10
Word = Optional[str]  # noqa: UP045


def run(
    context: typer.Context,
    command: Annotated[Several, typer.Argument(metavar="-- COMMAND...", show_default=False, help="What to run.")] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", metavar="DIR", show_default=False, help="Where the capture goes; else beside the old one."),
    ] = None,
    side: Annotated[Word, typer.Option("--side", metavar="SIDE", help="Which it becomes: base, or cand (the default).")] = None,
    detail: Annotated[Word, typer.Option("-d", "--detail", metavar="DETAIL", help="digest, stats, tensor; else as before.")] = None,
    steps: Annotated[Word, typer.Option("--steps", metavar="STEPS", help="0:3 and so on; else as before.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Run a command without capture, and keep the captures.")] = False,
) -> int:
    """Run a training again under capture, and look at that from now on: `trueup capture`.

    Without a command it says which one recorded the capture, to be typed: what a file says is not executed.
    """
    session: Session = context.obj
    chosen: Side = selection.one(side, ("base", "cand"), "--side") or "cand"  # type: ignore[assignment]
    if plain and command:
        return _plain(command)
    before = session.baseline if session.is_alone else session.path(chosen)
    if not command:
        told = " ".join(map(shlex.quote, session.command)) or "COMMAND"
        raise TrueupError(
            "There is nothing to run.\n  expected: run -- COMMAND\n  got:      no command\n"
            f"  next:     run -- {one_line(told)}    (that recorded it, says its manifest: read it before you run it)"
        )
    target = output or _beside(before)
    code = _captured(read_root(before), target, command, detail, steps)
    if code == 0:
        session.replace(chosen, target)
        session.console.print(Text(f"{NAMES[chosen]} is {one_line(str(target))} now", "bold"))
    return code


def _plain(command: list[str]) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise TrueupError(
            f"{one_line(command[0])} cannot be started: {error.strerror}.\n  next:     check its name and path"
        ) from None


def _captured(before: dict[str, Any], target: Path, command: list[str], detail: str | None, steps: str | None) -> int:
    """Capture with the options of the capture before, but for what was asked for."""
    from trueup.recording.recorder import launch

    told = before.get("config")
    config = told if isinstance(told, dict) else {}
    kept = {name: config.get(name) for name in ("include", "exclude", "compile")}
    ranges = config.get("steps")
    known = ",".join(f"{a}:{'' if b is None else b}" for a, b in ranges) if ranges and _are_ranges(ranges) else None
    levels = config.get("levels")
    options: dict[str, Any] = {
        "directory": str(target),
        "level": tuple(levels) if isinstance(levels, list) else None,
        "detail": detail or config.get("detail") or "stats",
        "steps": steps or known,
        **{name: tuple(value) if isinstance(value, list) else value for name, value in kept.items() if value},
    }
    return launch.run(options, command)


def _are_ranges(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _beside(path: Path) -> Path:
    """Return the first of ``path-2``, ``path-3`` ... that does not exist."""
    number = 2
    while os.path.lexists(found := path.with_name(f"{path.name}-{number}")):
        number += 1
    return found
