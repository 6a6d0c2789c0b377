"""``trueup overflow CAPTURE``: the first call that made NaN, Inf or saturated numbers, with what led to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def overflow(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", show_default=False, help="A capture of detail stats or tensor.")],
    would_overflow: Annotated[
        Optional[str],  # noqa: UP045 - typer evaluates it on Python 3.10
        typer.Option(metavar="DTYPE", help="Of a healthy run: what fp16, bf16, fp8_e4m3 or fp8_e5m2 could not hold."),
    ] = None,
    step: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(metavar="N", show_default=False, help="Only this step, repeated for several."),
    ] = None,
    rank: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(metavar="N", show_default=False, help="Only this rank, repeated for several."),
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Execute bad calls and their readers again in float64: tells whether they matter.")
    ] = False,
    against: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="BASE", show_default=False, help="A trusted capture: whether its calls give the same tells, too."),
    ] = None,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", show_default=False, help="Save index.html and overflow.json there."),
    ] = None,
    json: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="Save overflow.json under this name."),
    ] = None,
) -> int:
    """Find the first call of a run that overflowed, and say whether it matters.

    Exit code 0: clean, or harmless; 1: found; 2: could not tell.
    """
    from trueup.analysis.anomalies import overflow as judge
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.overflow_document import save_json, save_page
    from trueup.doors.report.overflow_terminal import render
    from trueup.doors.report.terminal import print_saved, print_written

    result = judge(path, would_overflow=would_overflow, step=step or None, rank=rank or None, replay=replay, against=against)
    console = Terminal()
    render(result, console)
    if html is not None:
        print_saved(save_page(result, html), console)
    if json is not None:
        print_written(save_json(result, json), console)
    return result.exit_code
