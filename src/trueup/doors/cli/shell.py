"""``trueup shell BASE [CAND]``: look around in two captures, command by command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def shell(
    baseline: Annotated[Path, typer.Argument(metavar="BASE", show_default=False, help="Capture of the trusted run.")],
    candidate: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates it on Python 3.10
        typer.Argument(metavar="CAND", show_default=False, help="Capture of the run under suspicion."),
    ] = None,
    command: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--command", "-c", metavar="LINE", show_default=False, help="Run this instead of a prompt; or several."),
    ] = None,
) -> int:
    """Look around in one capture or two: ac, vc, vcs, ls, ni, pt, cp, run, help, exit.

    Exit code of --command: 0, or as the commands that they stand for: 1 deviates, 2 could not tell, or a line that cannot be run.
    """
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.shell import run

    return run(baseline, candidate, Terminal(), command or ())
