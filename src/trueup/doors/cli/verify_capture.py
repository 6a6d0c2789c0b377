"""``trueup verify-capture CAPTURE``: is all recorded that it takes to execute each call again?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.doors.cli import selection
from trueup.doors.cli.replay import Several


def verify_capture(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", show_default=False, help="Of detail tensor.")],
    calls: Annotated[
        Several,
        typer.Option(metavar="PATTERN", show_default=False, help="Operators or scopes (glob, /expression/), or call numbers."),
    ] = None,
    level: Annotated[Several, typer.Option(metavar="LEVEL", help="api or aten; else both, as far as recorded.")] = None,
    processes: Annotated[int, typer.Option("-j", metavar="N", help="Processes.", min=1)] = 1,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", show_default=False, help="Save results there; go on where it was killed."),
    ] = None,
    simulated: Annotated[bool, typer.Option("--simulated", help="npu is Trueup's simulated device.")] = False,
) -> int:
    """Execute each call on the device that recorded it; its results must be the recorded bits, its tensors undamaged.

    Exit code 0: all are, 1: some calls are not reproducible or some tensors are damaged, and why.
    """
    from trueup.analysis.rerun.replay import LEVELS
    from trueup.analysis.rerun.verify import verify
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.replayed import render_verification

    levels = selection.levels(level) or LEVELS
    for word in levels:
        selection.one(word, LEVELS, "--level")
    found = verify(
        capture, levels=tuple(levels), patterns=tuple(calls or ()), processes=processes, simulated=simulated, output=output
    )
    render_verification(found, Terminal())
    return found.exit_code
