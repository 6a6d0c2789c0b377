"""``trueup capture -o DIR [options] -- COMMAND``: run a training command and record what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.cli import selection
from trueup.model import LEVELS, PHASES, TrueupError

Several = Optional[list[str]]  # noqa: UP045 - typer evaluates it on Python 3.10


def capture(
    command: Annotated[
        Several, typer.Argument(metavar="-- COMMAND...", show_default=False, help="What to run.")
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", show_default=False, help="Where the capture goes."),
    ] = None,
    level: Annotated[
        Several, typer.Option(metavar="LEVEL", help="module, api or aten, repeated; or all (the default).")
    ] = None,
    detail: Annotated[
        str, typer.Option(metavar="DETAIL", help="digest, stats or tensor: how much is kept of each tensor.")
    ] = "stats",
    steps: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="STEPS", show_default=False, help="0:3 (steps 0, 1, 2), 5: or 0,2,5; else all."),
    ] = None,
    ranks: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="RANKS", show_default=False, help="Likewise; else all."),
    ] = None,
    include: Annotated[
        Several, typer.Option(metavar="PATTERN", help="Scopes or operators to record: a glob or /expression/.")
    ] = None,
    exclude: Annotated[Several, typer.Option(metavar="PATTERN", help="Scopes or operators to leave out.")] = None,
    phase: Annotated[Several, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}; else all.")] = None,
) -> int:
    """Run a command and record what its training computes.

    The command needs no edit; python, torchrun and scripts that start workers are all followed.
    """
    if output is None or not command:
        missing = "-o DIR, where the capture goes" if output is None else "a command to run"
        example = "trueup capture -o runs/cpu -- python train.py"
        raise TrueupError(
            f"There is nothing to capture.\n  expected: {missing}\n  got:      none\n  next:     {example}"
        )
    options = {
        "directory": str(output),
        "level": selection.levels(level) or LEVELS,
        "detail": detail,
        "steps": steps,
        "ranks": ranks,
        "include": tuple(include or ()) or None,
        "exclude": tuple(exclude or ()) or None,
        "phase": selection.words(phase) or None,
    }

    from trueup.recorder import launch

    return launch.run(options, command)
