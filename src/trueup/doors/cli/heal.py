"""``trueup heal CAPTURE -- COMMAND``: a policy for the call that overflowed, and the step run again with it: healed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.foundation.model import TrueupError


def heal(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", show_default=False, help="A capture of the run that overflowed.")],
    command: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer evaluates it on Python 3.10
        typer.Argument(metavar="-- COMMAND...", show_default=False, help="The same training."),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", show_default=False, help="For policy.toml and runs; else CAPTURE-healed."),
    ] = None,
    policy: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="Verify this policy; else the suggested rules."),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs at most; each adds a rule for what overflows then.")] = 4,
) -> int:
    """Find a policy with which the step that overflowed does not, and verify it by running that step again.

    The command ends when the step was recorded. Exit code 0: healed; 1: not healed; 2: could not tell.
    """
    if not command:
        example = "trueup heal runs/npu -- python train.py"
        raise TrueupError(f"There is nothing to run.\n  expected: the training's command\n  got:      none\n  next:     {example}")

    from trueup.analysis.remedy.healing import heal as run
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.healing import render

    found = run(path, command, output, policy=policy, rounds=rounds)
    render(found, Terminal())
    return found.exit_code
