"""``trueup show CAP``: look around in a capture: its calls, its module tree, one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trueup.doors.cli import selection
from trueup.foundation.model import LEVELS, PHASES, TrueupError

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.doors.report.selecting import Selection
    from trueup.foundation.store import Capture

Word = Optional[str]  # noqa: UP045 - typer evaluates it on Python 3.10
Number = Optional[int]  # noqa: UP045


def show(
    path: Annotated[Path, typer.Argument(metavar="CAP", show_default=False, help="The capture.")],
    scope: Annotated[Word, typer.Option(metavar="GLOB", help="Scopes, with all that is inside them.")] = None,
    op: Annotated[Word, typer.Option(metavar="GLOB", help="Operators; aten:: may be left out.")] = None,
    phase: Annotated[Word, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}.")] = None,
    step: Annotated[Number, typer.Option(metavar="N", help="One step.")] = None,
    rank: Annotated[Number, typer.Option(metavar="N", help="One rank.")] = None,
    level: Annotated[Word, typer.Option(metavar="LEVEL", help="module, api or aten.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many calls to list.")] = 30,
    tree: Annotated[bool, typer.Option("--tree", help="Show the modules instead, with their calls counted.")] = False,
    short: Annotated[bool, typer.Option("--short", help="A line for each call.")] = False,
    call: Annotated[Word, typer.Option(metavar="CALL", help="One call with what stands around it: a seq or scope/op#n.")] = None,
    against: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="BASE", show_default=False, help="With --call: beside the call of that name in this capture."),
    ] = None,
    tensor: Annotated[
        Optional[tuple[str, str]],  # noqa: UP045
        typer.Option(metavar="CALL SLOT", show_default=False, help="Show one tensor: CALL is a seq or scope/op#n."),
    ] = None,
    npy: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="With --tensor: write its elements there as plain .npy."),
    ] = None,
    where: Annotated[
        Word, typer.Option(metavar="CONDITION", help="Tensors whose numbers are so: 'n_nan > 0 and l2 >= 1e3'.")
    ] = None,
    nan: Annotated[bool, typer.Option("--nan", help="Tensors with NaN; --nan --inf: with either.")] = False,
    inf: Annotated[bool, typer.Option("--inf", help="Tensors with Inf.")] = False,
    saturated: Annotated[bool, typer.Option("--saturated", help="Tensors with the dtype's largest number.")] = False,
) -> None:
    """Show what a capture holds."""
    phase, level = selection.one(phase, PHASES, "--phase"), selection.one(level, LEVELS, "--level")

    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.call_list import render_list
    from trueup.doors.report.capture_view import Selection, render_calls, render_header, render_tree
    from trueup.doors.report.conditions import read_conditions
    from trueup.doors.report.selecting import chosen_calls
    from trueup.doors.report.tensor_view import render_tensor
    from trueup.foundation.store import open_capture

    if npy is not None and tensor is None:
        raise TrueupError("--npy needs a tensor.\n  expected: --tensor CALL SLOT --npy FILE\n  got:      --npy alone\n"
                          "  next:     name the tensor")
    conditions = read_conditions(where, nan=nan, inf=inf, saturated=saturated)
    chosen = Selection(path, scope, op, phase, step, rank, level, conditions)
    capture, console = open_capture(path), Terminal()
    if tensor is not None:
        render_tensor(capture, chosen, *tensor, console, npy)
        return
    if call is not None:
        _call(capture, chosen, call, against, console)
        return
    render_header(capture, chosen, console)
    if tree:
        render_tree(capture, chosen, console)
    elif short:
        render_list(*chosen_calls(capture, chosen, limit), console, several=len(capture.ranks) > 1)
    else:
        render_calls(capture, chosen, limit, console)


def _call(capture: Capture, chosen: Selection, name: str, against: Path | None, console: Console) -> None:
    from trueup.doors.report.node_view import render_node
    from trueup.doors.report.nodes import Node, named_alike
    from trueup.doors.report.selecting import find_call
    from trueup.foundation.store import open_capture

    node = Node(capture, find_call(capture, chosen, name))
    other = None if against is None else named_alike(node, open_capture(against))
    render_node((other, node), console, alone=against is None)
