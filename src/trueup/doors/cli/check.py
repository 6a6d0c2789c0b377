"""``trueup check CAP``: dangerous casts, is mixed precision on; beside a second capture, other dtypes and other operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def check(
    path: Annotated[Path, typer.Argument(metavar="CAP", show_default=False, help="The capture, of any framework.")],
    against: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates it on Python 3.10
        typer.Option(metavar="BASE", show_default=False, help="A second capture: other dtypes, missing and extra operators."),
    ] = None,
    step: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(metavar="N", show_default=False, help="Casts and dtypes of this step alone, repeated for several."),
    ] = None,
    rank: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(metavar="N", show_default=False, help="Of this rank alone, repeated for several."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many lines of each kind to list.")] = 10,
    json: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="Save all of it as JSON under this name."),
    ] = None,
) -> int:
    """Check what a run did with dtypes: dangerous casts, is mixed precision on, how does it differ from another run.

    Exit code 0: nothing found; 1: a dangerous cast, other dtypes or other operators; 2: could not tell.
    """
    from trueup.analysis.audit import check as judge
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.check_document import save_json
    from trueup.doors.report.check_terminal import render
    from trueup.doors.report.terminal import print_written

    result = judge(path, against=against, step=step or None, rank=rank or None)
    console = Terminal()
    render(result, limit, console)
    if json is not None:
        print_written(save_json(result, json), console)
    return result.exit_code
