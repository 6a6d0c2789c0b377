"""``trueup replay BASE --device npu``: execute recorded calls again with the recorded inputs, and judge each by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.doors.cli import selection
from trueup.foundation.model import PHASES, TrueupError

Several = Optional[list[str]]  # noqa: UP045 - typer evaluates it on Python 3.10


def replay(
    base: Annotated[Path, typer.Argument(metavar="BASE", show_default=False, help="Capture whose calls are executed again.")],
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where: npu, cuda:1, cpu.")],
    calls: Annotated[
        Several,
        typer.Option(metavar="PATTERN", show_default=False, help="Operators or scopes (glob, /expression/), or call numbers."),
    ] = None,
    level: Annotated[Several, typer.Option(metavar="LEVEL", help="api or aten; else both, as far as recorded.")] = None,
    phase: Annotated[Several, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}; else all but collective.")] = None,
    reference: Annotated[str, typer.Option(metavar="DTYPE", help="Precision of the truth: float64 on the CPU.")] = "float64",
    dedup: Annotated[bool, typer.Option("--dedup", help="Once for each operator, dtype, shape, strides and attributes.")] = False,
    processes: Annotated[int, typer.Option("-j", metavar="N", help="Processes.", min=1)] = 1,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", show_default=False, help="Save results there; go on where it was killed."),
    ] = None,
    simulated: Annotated[bool, typer.Option("--simulated", help="npu is Trueup's simulated device.")] = False,
    judge: Annotated[
        str, typer.Option(metavar="WHICH", help="device or recorded; else what is no CPU: whose results are judged.")
    ] = "",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="After which a call is given up.", min=1)] = 300.0,
) -> int:
    """Execute each recorded call again with its recorded inputs, and compare its own error with the baseline's.

    Exit code 0: all that was judged is accurate, 1: some calls are wrong, 2: could not tell.
    """
    if reference != "float64":
        raise TrueupError(f"--reference cannot be read.\n  expected: float64\n  got:      {reference!r}\n  next:     leave it out")
    which = selection.one(judge or None, ("device", "recorded"), "--judge")

    from trueup.analysis.rerun.replay import LEVELS, Settings, run
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.replayed import render

    levels, phases = selection.levels(level) or LEVELS, selection.words(phase)
    _known(levels, LEVELS, "--level")
    _known(phases, PHASES, "--phase")
    recorded = which == "recorded" if which else device.partition(":")[0] == "cpu"
    settings = Settings(
        str(base), device, tuple(levels), phases or tuple(p for p in PHASES if p != "collective"), tuple(calls or ()), dedup,
        simulated=simulated, recorded=recorded, threads=1 if processes > 1 else 0,
    )  # fmt: skip
    found = run(settings, output, processes=processes, timeout=timeout)
    console = Terminal()
    render(found, console)
    if output is not None:
        console.print(f"  saved: {output}/replay.json, outcomes.parquet", style="dim", markup=False)
    return found.exit_code


def _known(given: tuple[str, ...], known: tuple[str, ...], option: str) -> None:
    for word in given:
        selection.one(word, known, option)
