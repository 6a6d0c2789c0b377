"""``trueup reproduce CAPTURE CALL -o repro/``: a recorded call as a test that needs no Trueup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.doors.cli import selection
from trueup.foundation.model import LEVELS, PHASES

Word = Optional[str]  # noqa: UP045 - typer evaluates it on Python 3.10
Number = Optional[int]  # noqa: UP045


def reproduce(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", show_default=False, help="Capture, or folder of a report.")],
    call: Annotated[
        str, typer.Argument(metavar="CALL", show_default=False, help="A seq or scope/op#n; of a report: culprit, culprit.1 ...")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="New folder to write.")],
    device: Annotated[Word, typer.Option(metavar="DEVICE", help="Where it fails, if that is here: npu, cuda:1.")] = None,
    against: Annotated[str, typer.Option(metavar="DEVICE", help="Whose results are right.")] = "cpu",
    minimise: Annotated[bool, typer.Option("--minimise", help="Shrink it while the same failure stays.")] = False,
    context: Annotated[bool, typer.Option("--context", help="Right by itself: with the fewest calls before it.")] = False,
    seconds: Annotated[float, typer.Option(metavar="N", min=1, help="How long shrinking, or finding calls, may take.")] = 60.0,
    simulated: Annotated[bool, typer.Option("--simulated", help="npu is Trueup's simulated device.")] = False,
    imports: Annotated[str, typer.Option("--import", metavar="MODULE", help="Imported first: it makes a device known.")] = "",
    check: Annotated[bool, typer.Option(help="Run the test on both devices.")] = True,
    phase: Annotated[Word, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}, where CALL means several.")] = None,
    step: Annotated[Number, typer.Option(metavar="N", help="One step.")] = None,
    rank: Annotated[Number, typer.Option(metavar="N", help="One rank.")] = None,
    level: Annotated[Word, typer.Option(metavar="LEVEL", help="api or aten.")] = None,
) -> int:
    """Write a recorded call as a test for pytest that imports its framework and safetensors, and no Trueup.

    Exit code 0: written, 2: written, but on the device it does not fail, or it could not be written.
    """
    phase, level = selection.one(phase, PHASES, "--phase"), selection.one(level, LEVELS, "--level")

    from trueup.analysis.rerun.reproduce import reproduce as write
    from trueup.doors.cli.terminal import Terminal

    made = write(
        capture, call, output, device=device, against=against, minimise=minimise, context=context, seconds=seconds,
        simulated=simulated, imports=imports, check=check, phase=phase, step=step, rank=rank, level=level,
    )  # fmt: skip
    console = Terminal()
    console.print(made.sentence, markup=False)
    for note in made.notes:
        console.print(f"  {note}", style="dim", markup=False)
    console.print(f"  written: {made.folder} ({made.size:,} bytes of inputs)", markup=False)
    first = "trueup.simdev" if simulated else imports
    console.print(f"  next:    pytest {made.test}{f' --import {first}' if first else ''}", markup=False)
    return made.exit_code
