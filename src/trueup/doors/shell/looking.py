"""The commands that show: calls (`ls`), one call (`ni`), one tensor (`pt`), two tensors (`cp`)."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.text import Text

from trueup.doors.cli import selection
from trueup.doors.shell.session import NAMES, SIDES, Session, Side
from trueup.foundation.model import LEVELS, PHASES, TrueupError
from trueup.foundation.words.wording import one_line

Word = Optional[str]  # noqa: UP045 - typer evaluates it on Python 3.10
Number = Optional[int]  # noqa: UP045
Place = Optional[Path]  # noqa: UP045
Named = Annotated[Word, typer.Option("-n", "--name", metavar="NAME", show_default=False, help="The same as the argument.")]
Which = Annotated[Word, typer.Option("--side", metavar="SIDE", help="base or cand; else the candidate, then the baseline.")]
Phase = Annotated[Word, typer.Option("-p", "--phase", metavar="PHASE", help=f"{', '.join(PHASES)}.")]
Step = Annotated[Number, typer.Option("--step", metavar="N", help="One step.")]
Rank = Annotated[Number, typer.Option("--rank", metavar="N", help="One rank.")]
Level = Annotated[Word, typer.Option("-g", "--level", metavar="LEVEL", help="module, api or aten.")]

SLOT = re.compile(r"(?P<call>.+?):(?P<slot>(?:[a-z_]+\.)[^:/#]+|arguments)")
TYPES_SHOWN = 40


def ls(
    context: typer.Context,
    name: Annotated[Word, typer.Option("-n", "--name", metavar="GLOB", help="Scopes that contain this, or match it.")] = None,
    type_: Annotated[Word, typer.Option("-t", "--type", metavar="GLOB", help="Operators, likewise.")] = None,
    kernel: Annotated[Word, typer.Option("-k", "--kernel", metavar="GLOB", help="Dispatcher operators (level aten).")] = None,
    fusion: Annotated[Word, typer.Option("-f", "--fusion", metavar="PASS", hidden=True)] = None,
    phase: Phase = None,
    step: Step = None,
    rank: Rank = None,
    level: Level = None,
    side: Which = None,
    limit: Annotated[Number, typer.Option("-l", "--limit", metavar="N", min=1, help="How many to show.")] = None,
) -> int:
    """List calls by name or type: `trueup show --short`; without -n and -t count the types.

    Of both captures where types are counted, else of the one under suspicion.
    """
    from trueup.doors.report.call_list import count_types, render_list, render_types
    from trueup.doors.report.selecting import Selection, chosen_calls

    context_session: Session = context.obj
    if fusion is not None:
        raise TrueupError(
            "A capture does not hold what a compiler fused.\n  got:      -f\n"
            "  next:     `trueup triage -- COMMAND` runs with fusion on and off and names the guilty one"
        )
    op = type_ if kernel is None else kernel
    chosen = _chosen(phase, step, rank, "aten" if kernel is not None else level)
    sides = _sides(context_session, side)
    console = context_session.console
    wanted: dict[str, Any] = {**chosen, "scope": _glob(name), "op": _glob(op)}
    if name is None and op is None:
        counted = [(one, count_types(context_session.capture(one), Selection(context_session.path(one), **wanted)))
                   for one in SIDES if one in sides]  # fmt: skip
        named = [("calls" if context_session.is_alone else NAMES[one], counts) for one, counts in counted]
        render_types(named, console, limit or TYPES_SHOWN)
        return 0
    capture = context_session.capture(sides[0])
    calls, total = chosen_calls(capture, Selection(capture.path, **wanted), limit or 30)
    render_list(calls, total, console, several=len(capture.ranks) > 1)
    return 0


def ni(
    context: typer.Context,
    call: Annotated[Word, typer.Argument(metavar="CALL", show_default=False, help="A seq, or scope/op#n.")] = None,
    name: Named = None,
    graph: Annotated[Number, typer.Option("-s", "--graph", metavar="N", help="Write the calls within N as a .gv file.")] = None,
    output: Annotated[Place, typer.Option("-o", "--output", metavar="FILE", help="With -s: under this name.")] = None,
    everything: Annotated[bool, typer.Option("-a", "--all", hidden=True)] = False,  # noqa: ARG001 - everything is shown anyway
    phase: Phase = None,
    step: Step = None,
    rank: Rank = None,
    level: Level = None,
    side: Which = None,
) -> int:
    """Show a call: inputs, outputs, numbers, its neighbours, and its counterpart on the other side: `trueup show --call`."""
    from trueup.comparison.result.surroundings import Compared
    from trueup.doors.report.node_view import render_node

    session: Session = context.obj
    wanted = _given(call, name, "ni CALL")
    found, node = session.find(wanted, _sides(session, side), **_chosen(phase, step, rank, level))
    other = session.counterpart(found, node)
    judged = None
    if session.comparison is not None and not session.is_alone:
        compared = Compared(session.comparison.result.matched, node.call.rank, [node.call.step])
        judged = compared.row(compared.pair(node.call.seq, SIDES.index(found)))
    sides = (node, other) if found == "base" else (other, node)
    render_node(sides, session.console, judged=judged, alone=session.is_alone)
    if graph is not None:
        _write_graph(session, node, graph, output)
    return 0


def _write_graph(session: Session, node: Any, depth: int, output: Path | None) -> None:
    from trueup.doors.report.node_view import graph_text
    from trueup.doors.report.saving import replaced

    target = output or Path(f"call-{node.call.seq}.gv")
    with replaced(target, "a file for the graph") as temporary:
        temporary.write_text(graph_text(node, depth), "utf-8")
    session.console.print(Text(f"graph  {one_line(str(target))}    dot -Tsvg makes a picture of it"), soft_wrap=True)


def pt(
    context: typer.Context,
    tensor: Annotated[Word, typer.Argument(metavar="CALL:SLOT|FILE", show_default=False, help="A tensor, or a .npy file.")] = None,
    slot: Annotated[Word, typer.Argument(metavar="SLOT", show_default=False, hidden=True)] = None,
    name: Named = None,
    output: Annotated[Place, typer.Option("-o", "--output", metavar="FILE", help="Write it there, as .npy or .txt.")] = None,
    phase: Phase = None,
    step: Step = None,
    rank: Rank = None,
    level: Level = None,
    side: Which = None,
) -> int:
    """Print a tensor: `trueup show --tensor`."""
    from trueup.doors.report.npy import read_npy, write_npy
    from trueup.doors.report.selecting import Selection
    from trueup.doors.report.tensor_rows import render_rows, render_values, write_text
    from trueup.doors.report.tensor_view import payload_of, record_of, render_tensor

    session: Session = context.obj
    wanted = _given(tensor, name, "pt CALL:SLOT")
    if Path(wanted).is_file():
        values = read_npy(Path(wanted))
        render_values(values, session.console, one_line(wanted))
    else:
        its, given = _address(wanted)
        given = given or slot or ""
        _, node = session.find(its, _sides(session, side), **_chosen(phase, step, rank, level))
        record = record_of(node.call, given)
        exact = Selection(node.capture.path, step=node.call.step, rank=node.call.rank)
        render_tensor(node.capture, exact, str(node.call.seq), given, session.console, first=False)
        if record.get("payload_segment") is None:
            if output is not None:
                raise TrueupError(
                    f"{output} was not written: no elements of {one_line(wanted)} were kept.\n"
                    "  next:     record with --detail tensor: `run -d tensor -- COMMAND`"
                )
            return 0
        values = payload_of(node.capture, record)
    render_rows(values, session.console)
    if output is not None:
        said = write_text(values, output) if output.suffix == ".txt" else write_npy(values, output)
        session.console.print(Text(said), soft_wrap=True)
    return 0


def cp(
    context: typer.Context,
    first: Annotated[
        Word, typer.Argument(metavar="A", show_default=False, help="CALL:SLOT of the baseline (or base:CALL:SLOT), or a file.")
    ] = None,
    second: Annotated[
        Word, typer.Argument(metavar="B", show_default=False, help="The same of the candidate; left out: A's counterpart.")
    ] = None,
    name: Annotated[
        Optional[tuple[str, str]],  # noqa: UP045
        typer.Option("-n", "--name", metavar="A B", show_default=False, help="The same as the arguments."),
    ] = None,
    top: Annotated[int, typer.Option("-p", "--print", metavar="N", min=1, help="How many elements to list.")] = 20,
    save: Annotated[bool, typer.Option("-s", "--save", help="Save what is known as JSON.")] = False,
    output: Annotated[Place, typer.Option("-o", "--output", metavar="FILE", help="The same, under this name.")] = None,
    atol: Annotated[float, typer.Option("-al", "--atol", metavar="X", min=0.0, help="Close: |b - a| <= al + rl |a|.")] = 0.001,
    rtol: Annotated[float, typer.Option("-rl", "--rtol", metavar="X", min=0.0, help="Likewise.")] = 0.001,
    phase: Annotated[Word, typer.Option("--phase", metavar="PHASE", help=f"{', '.join(PHASES)}.")] = None,
    step: Step = None,
    rank: Rank = None,
    level: Level = None,
) -> int:
    """Compare two tensors, element by element: `trueup diff`.

    Returns 0 close, 1 not, 2 could not tell.
    """
    from trueup.doors.report.diff_json import to_json
    from trueup.doors.report.diff_view import render_diff, render_summary
    from trueup.doors.report.saving import replaced
    from trueup.doors.report.tensor_diff import compare_tensors
    from trueup.foundation.kernels.tolerance import Tolerance

    session: Session = context.obj
    given = name or (_given(first, None, "cp CALL:SLOT"), second)
    chosen = _chosen(phase, step, rank, level)
    operands = _operands(session, given[0], given[1], chosen)
    found = compare_tensors(*operands, Tolerance(rtol, atol), top)
    render_summary(found, session.console)
    render_diff(found, session.console)
    if save or output is not None:
        target = output or (session.results or Path()) / f"cp_{datetime.now():%Y%m%d%H%M%S}.json"
        with replaced(target, "a file for the numbers") as temporary:
            temporary.write_text(to_json(found), "utf-8")
        session.console.print(Text(f"saved  {one_line(str(target))}"), soft_wrap=True)
    return found.exit_code


def _operands(session: Session, first: str, second: str | None, chosen: dict[str, Any]) -> tuple[Any, Any]:
    """Return both sides: files, or slots of calls; one slot alone means both sides' of that call."""
    if second is not None:
        return _operand(session, first, "base", chosen), _operand(session, second, session.sides[0], chosen)
    if session.is_alone or Path(first).is_file():
        raise TrueupError(
            f"{one_line(first)} is one tensor.\n  expected: two, or a CALL:SLOT that both captures have\n"
            "  got:      one\n  next:     cp A B"
        )
    sides, call, slot = _placed(session, first)
    found, node = session.find(call, sides, **chosen)
    other = session.counterpart(found, node)
    if other is None:
        raise TrueupError(
            f"{one_line(call)} has no counterpart in the {NAMES['base' if found == 'cand' else 'cand']}.\n"
            "  expected: a call of the same name and place there\n  got:      none\n"
            "  next:     `vc` pairs calls by what they execute; or name both: cp A B"
        )
    pair = (node, other) if found == "base" else (other, node)
    return pair[0].operand(slot), pair[1].operand(slot)


def _operand(session: Session, text: str, side: Side, chosen: dict[str, Any]) -> Any:
    from trueup.doors.report.operands import operand, read_address
    from trueup.doors.report.selecting import Selection

    if Path(text).is_file() or Path(text.partition(":")[0]).is_dir():
        return operand(read_address(text), Selection(Path(), **chosen))
    sides, call, slot = _placed(session, text)
    _, node = session.find(call, sides if len(sides) == 1 else (side,), **chosen)
    return node.operand(slot)


def _placed(session: Session, text: str) -> tuple[tuple[Side, ...], str, str]:
    """Take ``[base:|cand:]CALL:SLOT`` apart: the captures to look in, the call, the slot."""
    sides = session.sides
    for one in SIDES:
        if text.startswith(f"{one}:"):
            sides, text = (one,), text.removeprefix(f"{one}:")
    call, slot = _address(text)
    if not slot:
        raise TrueupError(
            f"{one_line(text)} names no tensor.\n  expected: CALL:SLOT, such as 41:output.0\n  got:      no slot\n"
            f"  next:     ni {one_line(text)} lists its slots"
        )
    return sides, call, slot


def _address(text: str) -> tuple[str, str]:
    """Take ``CALL:SLOT`` apart; an operator's name may hold colons, too."""
    match = SLOT.fullmatch(text)
    return (match["call"], match["slot"]) if match else (text, "")


def _chosen(phase: str | None, step: int | None, rank: int | None, level: str | None) -> dict[str, Any]:
    """Return the options that choose among calls, checked."""
    words = {"phase": selection.one(phase, PHASES, "-p"), "level": selection.one(level, LEVELS, "-g")}
    return {**words, "step": step, "rank": rank}


def _sides(session: Session, side: str | None) -> tuple[Side, ...]:
    chosen = selection.one(side, SIDES, "-s")
    if chosen is None:
        return session.sides
    session.path(chosen)  # type: ignore[arg-type]  # said if it is not there
    return (chosen,)  # type: ignore[return-value]


def _given(argument: str | None, option: str | None, usage: str) -> str:
    found = argument if argument is not None else option
    if found:
        return found
    raise TrueupError(f"A name is missing.\n  expected: {usage}\n  got:      none\n  next:     ls -n TEXT, ls -t TYPE find calls")


def _glob(text: str | None) -> str | None:
    """Return a pattern: what has no wildcard may stand anywhere in a name."""
    return text if text is None or any(c in text for c in "*?[") else f"*{text}*"
