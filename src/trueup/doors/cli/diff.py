"""``trueup diff A B``: two tensors, of captures or ``.npy`` files: how far apart, where, and whether that is close."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from trueup.doors.cli import selection
from trueup.foundation.model import LEVELS, PHASES, TrueupError

Word = Optional[str]  # noqa: UP045 - typer evaluates it on Python 3.10
Number = Optional[int]  # noqa: UP045


def diff(
    baseline: Annotated[
        str, typer.Argument(metavar="BASE:CALL:SLOT", show_default=False, help="CALL is a seq or scope/op#n; or a .npy file.")
    ],
    candidate: Annotated[
        str, typer.Argument(metavar="CAND:CALL:SLOT", show_default=False, help="Likewise; a capture alone: the same CALL and SLOT.")
    ],
    rtol: Annotated[float, typer.Option(metavar="X", help="Close: |b - a| <= atol + rtol |a|.")] = 1e-5,
    atol: Annotated[float, typer.Option(metavar="X", help="Likewise.")] = 1e-8,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many of the worst elements to list.")] = 10,
    phase: Annotated[Word, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}, where CALL means several.")] = None,
    step: Annotated[Number, typer.Option(metavar="N", help="One step.")] = None,
    rank: Annotated[Number, typer.Option(metavar="N", help="One rank.")] = None,
    level: Annotated[Word, typer.Option(metavar="LEVEL", help="module, api or aten.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Compare two tensors element by element.

    Exit code 0: within the tolerance, 1: not, 2: could not tell.
    """
    phase, level = selection.one(phase, PHASES, "--phase"), selection.one(level, LEVELS, "--level")
    for option, value in (("--rtol", rtol), ("--atol", atol)):
        if not 0 <= value < float("inf"):
            raise TrueupError(
                f"{option} cannot be used.\n  expected: a number of at least 0\n  got:      {value}\n  next:     correct it"
            )

    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.diff_json import to_json
    from trueup.doors.report.diff_view import render_diff
    from trueup.doors.report.operands import operand, read_address
    from trueup.doors.report.selecting import Selection
    from trueup.doors.report.tensor_diff import compare_tensors
    from trueup.foundation.kernels.tolerance import Tolerance

    chosen = Selection(Path(), phase=phase, step=step, rank=rank, level=level)
    first = read_address(baseline)
    second = read_address(candidate, like=first)
    found = compare_tensors(operand(first, chosen), operand(second, chosen), Tolerance(rtol, atol), top)
    if as_json:
        typer.echo(to_json(found), nl=False)
    else:
        render_diff(found, Terminal())
    return found.exit_code
