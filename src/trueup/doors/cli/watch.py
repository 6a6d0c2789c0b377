"""``trueup watch [options] -- COMMAND``: run a training command, and say which call gave the first NaN, Inf or saturated value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.doors.cli import capture, selection
from trueup.foundation.model import PHASES, TrueupError
from trueup.recording.recorder.watch_options import FRAMES

Output = Annotated[
    Optional[Path],  # noqa: UP045 - typer evaluates it on Python 3.10
    typer.Option("--output", "-o", metavar="DIR", help="Where hits are saved; else trueup-watch, or the next free of that name."),
]
StopAfter = Annotated[
    str, typer.Option("--stop-after", metavar="N", help="Stop the run after the N-th hit, with exit code 3; or never.")
]
Frames = Annotated[int, typer.Option(metavar="N", help="Calls saved before the bad one, and after it.")]
Level = Annotated[capture.Several, typer.Option(metavar="LEVEL", help="module, api (the default) or aten, repeated; or all.")]
Phase = Annotated[capture.Several, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}; else all but optimizer.")]
Budget = Annotated[str, typer.Option(metavar="SIZE", help="What each rank may write, 500MB or 2GB; later hits are only counted.")]


def watch(
    command: capture.Command = None,
    output: Output = None,
    stop_after: StopAfter = "never",
    frames: Frames = FRAMES,
    budget: Budget = "1GB",
    level: Level = None,
    phase: Phase = None,
    steps: capture.Steps = None,
    ranks: capture.Ranks = None,
    include: capture.Include = None,
    exclude: capture.Exclude = None,
    compile: capture.Compile = "off",
) -> int:
    """Run a command and watch its training for NaN, Inf and saturation.

    Nothing is written while all is well. The command needs no edit; python, torchrun and scripts that start workers are followed.
    """
    if not command:
        raise TrueupError(
            "There is nothing to watch.\n  expected: a command to run\n  got:      none\n"
            "  next:     trueup watch --stop-after 1 -- python train.py"
        )
    from trueup.recording.recorder import launch_watch
    from trueup.recording.recorder.watch_options import WatchOptions, capture_options

    options = capture_options(
        selection.levels(level), selection.words(phase) or None, tuple(include or ()) or None, tuple(exclude or ()) or None,
        steps, ranks, compile,
    )  # fmt: skip
    return launch_watch.run(output, options, WatchOptions.of(stop_after, frames, budget), command)
