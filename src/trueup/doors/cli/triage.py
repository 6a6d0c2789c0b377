"""``trueup triage -- COMMAND``: float anomalies, compiler and fusion, whole network, up to the step that explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.doors.cli import capture, selection
from trueup.foundation.model import TrueupError

MayFile = Optional[Path]  # noqa: UP045 - typer evaluates it on Python 3.10


def triage(
    command: capture.Command = None,
    baseline: Annotated[
        MayFile, typer.Option(metavar="CAPTURE", show_default=False, help="A capture of the training where it is right.")
    ] = None,
    output: Annotated[
        MayFile,
        typer.Option("--output", "-o", metavar="DIR", show_default=False, help="For runs and report; else trueup-triage."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of a run, which then ends.")] = 10,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Ends a run that takes longer; 0: never.")] = 3600.0,
    switch: Annotated[
        capture.Several, typer.Option(metavar="NAME", show_default=False, help="Only this optimisation, repeated for several.")
    ] = None,
    switches: Annotated[
        MayFile, typer.Option(metavar="FILE", show_default=False, help="A table of switches of your own (docs/triage.md).")
    ] = None,
    fusion_result: Annotated[
        MayFile, typer.Option(metavar="FILE", show_default=False, help="Ascend's fusion_result.json: its rules become switches.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Make all three steps, also after one that explains it.")] = False,
) -> int:
    """Find out whether a training is wrong by a float anomaly, by the compiler or fusion, or by an operator.

    The command is run some ten times, N steps each. Exit code 0: nothing found, 1: explained, 2: could not tell.
    """
    if not command:
        example = "trueup triage --baseline runs/gpu -- python train.py"
        raise TrueupError(f"There is nothing to run.\n  expected: the training's command\n  got:      none\n  next:     {example}")

    from trueup.analysis.triage import triage as run
    from trueup.analysis.triage.table import load
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.terminal import print_saved
    from trueup.doors.report.triage_document import save
    from trueup.doors.report.triage_terminal import Progress, render

    console = Terminal()
    table = load(switches, selection.words(switch), fusion_result)
    tell = Progress(console).tell
    found = run(command, output, baseline=baseline, steps=steps, timeout=timeout or None, table=table, every=every, tell=tell)
    render(found, console)
    print_saved(save(found), console)
    return found.exit_code
