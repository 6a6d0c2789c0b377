"""``trueup shadow-report CAP``: what a shadow run found, from its capture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def shadow_report(
    path: Annotated[Path, typer.Argument(metavar="CAP", show_default=False, help="Capture of a shadow run.")],
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many operators to list.")] = 20,
) -> int:
    """Say which calls of a shadow run are wrong by themselves, and how large the errors of each operator are.

    Exit code 0: nothing wrong, 1: wrong, 2: could not tell.
    """
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.shadow_view import render
    from trueup.recording.execution.shadow_result import open_result

    result = open_result(path)
    render(result, limit, Terminal())
    return result.exit_code
