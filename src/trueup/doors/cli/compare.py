"""``trueup compare BASE CAND``: line two captures up, print the verdict, leave a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.doors.cli import selection


def compare(
    baseline: Annotated[Path, typer.Argument(metavar="BASE", show_default=False, help="Capture of the trusted run.")],
    candidate: Annotated[
        Path, typer.Argument(metavar="CAND", show_default=False, help="Capture of the run under suspicion.")
    ],
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates it on Python 3.10
        typer.Option("--output", "-o", metavar="DIR", show_default=False, help="Save the report there."),
    ] = None,
    csv: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="Write a row per tensor as CSV, in ptdbg's columns."),
    ] = None,
    xlsx: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="The same as an Excel workbook, coloured."),
    ] = None,
    level: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="LEVEL", help="module, api or aten, repeated; else whatever both captures hold."),
    ] = None,
    criterion: Annotated[str, typer.Option(metavar="NAME|FILE", help="What is demanded of the candidate.")] = "default",
    repeat: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(metavar="BASE2", show_default=False, help="A second baseline run: differences of this size count as noise."),
    ] = None,
    more: Annotated[Optional[list[Path]], typer.Argument(metavar="BASE3", hidden=True)] = None,  # noqa: UP045
    reference: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FP64", show_default=False, help="The run in float64: the distance from it decides."),
    ] = None,
    cosine: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="X", show_default=False, min=-1, max=1, help="List the calls with an output of that cosine or less."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="With --cosine: how many.")] = 10,
    mapping: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--map", metavar="FILE", show_default=False, help="Which scopes and operators are which; calls to ignore."),
    ] = None,
) -> int:
    """Compare two captures and name the first call that made them differ.

    Exit code 0: aligned, 1: deviates, 2: could not tell.
    """
    chosen = selection.levels(level)
    if more and not repeat:
        raise typer.BadParameter(f"expected two captures, got {len(more) + 2}: repeats of BASE follow --repeat", param_hint="CAND")

    from trueup.comparison.result.comparing import compare as compare_captures
    from trueup.comparison.result.cosines import Cosines
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.cosine_view import render_listing
    from trueup.doors.report.spreadsheet import write_csv, write_xlsx, xlsxwriter
    from trueup.doors.report.terminal import print_saved, print_written, render

    if xlsx is not None:
        xlsxwriter()  # said before the comparison, not after
    repeats = [*(repeat or ()), *(more or ())]
    cosines = None if cosine is None else Cosines()
    result = compare_captures(
        baseline, candidate, level=chosen, criterion=criterion, mapping=mapping, repeat=repeats, reference=reference,
        see=None if cosines is None else cosines.see,
    )  # fmt: skip
    console = Terminal()
    render(result, console)
    if cosine is not None and cosines is not None:
        console.print()
        render_listing(cosines.below(cosine, limit), console)
    if output is not None:
        print_saved(result.save(output), console)
    for file, write in ((csv, write_csv), (xlsx, write_xlsx)):
        if file is not None:
            print_written(write(result, file), console)
    return result.exit_code
