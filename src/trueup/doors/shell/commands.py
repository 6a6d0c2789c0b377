"""The commands, in the order in which `help` lists them.

Those that judge: everything at once (`ac`), the comparison (`vc`), its calls below a cosine (`vcs`). Those that show: calls (`ls`),
one call (`ni`), one tensor (`pt`), two tensors (`cp`). And `run`: the training once more, under capture.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.text import Text

from trueup.doors.cli import options
from trueup.doors.cli.options import File, Number, Rank, Step, Word, Words
from trueup.doors.shell.session import NAMES, SIDES, Session, Side
from trueup.foundation.model import LEVELS, PHASES, TrueupError
from trueup.foundation.store.layout import read_root
from trueup.foundation.words.wording import clean, one_line

Pair = Optional[tuple[str, str]]  # noqa: UP045 - typer evaluates it on Python 3.10
Named = Annotated[Word, typer.Option("-n", "--name", metavar="NAME", help="The same as the argument.")]
Which = Annotated[Word, typer.Option("--side", metavar="SIDE", help="base or cand; else the candidate, then the baseline.")]
Phase = Annotated[Word, typer.Option("-p", "--phase", metavar="PHASE", help=f"{', '.join(PHASES)}.")]
Level = Annotated[Word, typer.Option("-g", "--level", metavar="LEVEL", help="module, api or aten.")]

app = typer.Typer(add_completion=False, rich_markup_mode=None)

SLOT = re.compile(r"(?P<call>.+?):(?P<slot>(?:[a-z_]+\.)[^:/#]+|arguments)")
TYPES_SHOWN = 40


FUSION = "a capture does not hold what a compiler fused: `trueup triage -- COMMAND` finds the guilty one"
COLOURS = {0: "green", 1: "bold red", 2: "yellow"}


@app.command("ac")
def ac(
    context: typer.Context,
    limit: Annotated[int, typer.Option("-l", "--limit", metavar="N", min=1, help="Lines for each check.")] = 3,
    compare: Annotated[bool, typer.Option("-c", "--compare", help="Compare the two captures first.")] = False,
) -> int:
    """Check everything: comparison, fusion, overflow, dangerous casts, mixed precision, graph similarity.

    Returns 1 where anything was found, else 2 where something could not be told.
    """
    session: Session = context.obj
    codes = [_comparison(session, compare, limit)]
    _say(session, "fusion", 2, [FUSION], 1)
    codes += [_overflow(session, "overflow" if session.is_alone else f"overflow, {NAMES[side]}", session.path(side), limit)
              for side in session.sides if session.path(side) not in session.overflows]  # fmt: skip
    for path in session.overflows[:1]:  # what follows it begins with what it left
        codes.append(_overflow(session, f"overflow, {clean(path.name)}", path, limit))
    if later := [clean(path.name) for path in session.overflows[1:]]:
        names = ", ".join(later[:limit]) + (", …" if len(later) > limit else "")
        said = f"  {len(later):,} later steps were saved, too ({names}): weights may have carried it there"
        session.console.print(Text(said, "dim"))
    codes.append(_check(session, limit))
    return 1 if 1 in codes else 2 if 2 in codes else 0


def _comparison(session: Session, wanted: bool, limit: int) -> int:
    if session.is_alone:
        _say(session, "comparison", 2, ["there is one capture only"], limit)
        return 0
    if session.comparison is None and not wanted:
        _say(session, "comparison", 2, ["not made yet: `ac -c`, or `vc`"], limit)
        return 0
    comparison = session.compare() if wanted else session.compared()
    result = comparison.result
    _say(session, "comparison", result.exit_code, result.sentence.splitlines(), max(limit, 4))
    return result.exit_code


def _overflow(session: Session, head: str, path: Path, limit: int) -> int:
    from trueup.analysis.anomalies import overflow

    try:
        found = overflow(path)
    except TrueupError as error:
        _say(session, head, 2, str(error).splitlines(), limit)
        return 2
    lines = [anomaly.sentence.splitlines()[0] for anomaly in found.anomalies[:limit]] or found.sentence.splitlines()[:1]
    _say(session, head, found.exit_code, lines, limit)
    if len(found.anomalies) > limit:
        session.console.print(Text(f"  and {len(found.anomalies) - limit:,} more: trueup overflow {found.path}", "dim"))
    return found.exit_code


def _check(session: Session, limit: int) -> int:
    """Say which casts destroy numbers, which dtypes products have, and which operators only one run executes: `trueup check`."""
    from trueup.analysis.audit import check
    from trueup.doors.report.audit import render_check

    against = None if session.is_alone else session.capture("base")
    head = "casts, mixed precision" if session.is_alone else "casts, mixed precision, graph similarity"
    session.console.print(Text(head, "bold"))
    try:
        found = check(session.capture(session.sides[0]), against=against)
    except TrueupError as error:
        session.console.print(Text(f"  {clean(str(error))}", COLOURS[2]))
        return 2
    render_check(found, limit, session.console)
    return found.exit_code


def _say(session: Session, head: str, code: int, lines: list[str], limit: int) -> None:
    session.console.print(Text(head, "bold"))
    for line in lines[:limit]:
        session.console.print(Text(f"  {clean(line)}", COLOURS[code]), soft_wrap=False)


@app.command("vc")
def vc(
    context: typer.Context,
    left: Annotated[File, typer.Option("-lt", "--left", metavar="DIR", help="Another candidate from now on.")] = None,
    right: Annotated[File, typer.Option("-rt", "--right", metavar="DIR", help="Another baseline from now on.")] = None,
    graph: Annotated[Word, typer.Option("-g", "--graph", metavar="LEVEL", help="Level: module, api or aten; else all.")] = None,
    output: Annotated[
        File, typer.Option("-o", "--output", metavar="DIR", help="Save the report there, and the table result_TIME.csv.")
    ] = None,
    criterion: Annotated[str, typer.Option(metavar="NAME|FILE", help="What is demanded of the candidate.")] = "default",
    mapping: Annotated[File, typer.Option("--map", metavar="FILE", help="Which scopes and operators are which.")] = None,
) -> int:
    """Compare the two captures: `trueup compare`.

    Returns 0 aligned, 1 deviates, 2 could not tell.
    """
    from trueup.doors.report.slot_pairs import write_vector_compare
    from trueup.doors.report.terminal import print_saved, print_written, render

    session: Session = context.obj
    levels = options.levels([graph] if graph else None)
    if left is not None:
        session.replace("cand", left)
    if right is not None:
        session.replace("base", right)
    found = session.compare(level=levels, criterion=criterion, mapping=mapping)
    render(found.result, session.console)
    if output is not None:
        print_saved(found.result.save(output), session.console)
    folder = output or session.results
    if folder is not None:
        folder = folder if output is not None else folder / f"{datetime.now():%Y%m%d%H%M%S}"
        print_written(write_vector_compare(found.result, found.cosines, folder), session.console)
    return found.result.exit_code


@app.command("vcs")
def vcs(
    context: typer.Context,
    file: Annotated[File, typer.Option("-f", "--file", metavar="CSV", help="A table of msaccucmp's instead.")] = None,
    cosine: Annotated[float, typer.Option("-c", "--cosine", metavar="X", min=-1.0, max=1.0, help="At or below this.")] = 0.98,
    limit: Annotated[int, typer.Option("-l", "--limit", metavar="N", min=1, help="How many calls to show.")] = 3,
) -> int:
    """List the calls with an output whose cosine is low, in order of execution: `trueup compare --cosine`.

    Returns 1 where there are any, else 2 where some could not be measured, else what the comparison says.
    """
    from trueup.doors.report.node_view import render_listing

    session: Session = context.obj
    if file is not None:
        from trueup.doors.report.slot_pairs import read_vector_compare

        listing = read_vector_compare(file, cosine, limit)
    else:
        listing = session.compared().cosines.below(cosine, limit)
    render_listing(listing, session.console)
    if file is not None:
        return listing.exit_code
    result = session.compared().result
    session.console.print(Text.assemble(("vc says  ", "dim"), clean(result.sentence.splitlines()[0])))
    return listing.exit_code or result.exit_code


@app.command("ls")
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
    from trueup.analysis.selecting import Selection, chosen_calls
    from trueup.doors.report.capture_view import count_types, render_list, render_types

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
    how = "raise -l, or choose with -n, -t, -p"
    render_list(calls, total, console, several=len(capture.ranks) > 1, how=how)
    return 0


@app.command("ni")
def ni(
    context: typer.Context,
    call: Annotated[Word, typer.Argument(metavar="CALL", help="A seq, or scope/op#n.")] = None,
    name: Named = None,
    graph: Annotated[Number, typer.Option("-s", "--graph", metavar="N", help="Write the calls within N as a .gv file.")] = None,
    output: Annotated[File, typer.Option("-o", "--output", metavar="FILE", help="With -s: under this name.")] = None,
    everything: Annotated[bool, typer.Option("-a", "--all", hidden=True)] = False,  # noqa: ARG001 - everything is shown anyway
    phase: Phase = None,
    step: Step = None,
    rank: Rank = None,
    level: Level = None,
    side: Which = None,
) -> int:
    """Show a call: inputs, outputs, numbers, its neighbours, and its counterpart on the other side: `trueup show --call`."""
    from trueup.comparison.result.evidence import Compared
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


@app.command("pt")
def pt(
    context: typer.Context,
    tensor: Annotated[Word, typer.Argument(metavar="CALL:SLOT|FILE", help="A tensor, or a .npy file.")] = None,
    slot: Annotated[Word, typer.Argument(metavar="SLOT", hidden=True)] = None,
    name: Named = None,
    output: Annotated[File, typer.Option("-o", "--output", metavar="FILE", help="Write it there, as .npy or .txt.")] = None,
    phase: Phase = None,
    step: Step = None,
    rank: Rank = None,
    level: Level = None,
    side: Which = None,
) -> int:
    """Print a tensor: `trueup show --tensor`."""
    from trueup.analysis.selecting import Selection
    from trueup.doors.report.capture_view import payload_of, read_npy, record_of, render_tensor, write_npy
    from trueup.doors.report.node_view import render_rows, render_values, write_text

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


@app.command("cp")
def cp(
    context: typer.Context,
    first: Annotated[Word, typer.Argument(metavar="A", help="CALL:SLOT of the baseline (or base:CALL:SLOT), or a file.")] = None,
    second: Annotated[Word, typer.Argument(metavar="B", help="The same of the candidate; left out: A's counterpart.")] = None,
    name: Annotated[Pair, typer.Option("-n", "--name", metavar="A B", help="The same as the arguments.")] = None,
    top: Annotated[int, typer.Option("-p", "--print", metavar="N", min=1, help="How many elements to list.")] = 20,
    save: Annotated[bool, typer.Option("-s", "--save", help="Save what is known as JSON.")] = False,
    output: Annotated[File, typer.Option("-o", "--output", metavar="FILE", help="The same, under this name.")] = None,
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
    from trueup.doors.report.diff import compare_tensors, document, render_diff, render_summary
    from trueup.doors.report.saving import save_json
    from trueup.foundation.kernels.metrics import Tolerance

    session: Session = context.obj
    given = name or (_given(first, None, "cp CALL:SLOT"), second)
    chosen = _chosen(phase, step, rank, level)
    operands = _operands(session, given[0], given[1], chosen)
    found = compare_tensors(*operands, Tolerance(rtol, atol), top)
    render_summary(found, session.console)
    render_diff(found, session.console)
    if save or output is not None:
        target = output or (session.results or Path()) / f"cp_{datetime.now():%Y%m%d%H%M%S}.json"
        session.console.print(Text(f"saved  {one_line(str(save_json(document(found), target)))}"), soft_wrap=True)
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
    from trueup.analysis.selecting import Selection
    from trueup.doors.report.capture_view import operand, read_address

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
    words = {"phase": options.one(phase, PHASES, "-p"), "level": options.one(level, LEVELS, "-g")}
    return {**words, "step": step, "rank": rank}


def _sides(session: Session, side: str | None) -> tuple[Side, ...]:
    chosen = options.one(side, SIDES, "-s")
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


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    command: Annotated[Words, typer.Argument(metavar="-- COMMAND...", help="What to run.")] = None,
    output: Annotated[
        File, typer.Option("-o", "--output", metavar="DIR", help="Where the capture goes; else beside the old one.")
    ] = None,
    side: Annotated[Word, typer.Option("--side", metavar="SIDE", help="Which it becomes: base, or cand (the default).")] = None,
    detail: Annotated[Word, typer.Option("-d", "--detail", metavar="DETAIL", help="digest, stats, tensor; else as before.")] = None,
    steps: Annotated[Word, typer.Option("--steps", metavar="STEPS", help="0:3 and so on; else as before.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Run a command without capture, and keep the captures.")] = False,
) -> int:
    """Run a training again under capture, and look at that from now on: `trueup capture`.

    Without a command it says which one recorded the capture, to be typed: what a file says is not executed.
    """
    session: Session = context.obj
    chosen: Side = options.one(side, ("base", "cand"), "--side") or "cand"  # type: ignore[assignment]
    if plain and command:
        return _plain(command)
    before = session.baseline if session.is_alone else session.path(chosen)
    if not command:
        told = " ".join(map(shlex.quote, session.command)) or "COMMAND"
        raise TrueupError(
            "There is nothing to run.\n  expected: run -- COMMAND\n  got:      no command\n"
            f"  next:     run -- {one_line(told)}    (that recorded it, says its manifest: read it before you run it)"
        )
    target = output or _beside(before)
    code = _captured(read_root(before), target, command, detail, steps)
    if code == 0:
        session.replace(chosen, target)
        session.console.print(Text(f"{NAMES[chosen]} is {one_line(str(target))} now", "bold"))
    return code


def _plain(command: list[str]) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise TrueupError(
            f"{one_line(command[0])} cannot be started: {error.strerror}.\n  next:     check its name and path"
        ) from None


def _captured(before: dict[str, Any], target: Path, command: list[str], detail: str | None, steps: str | None) -> int:
    """Capture with the options of the capture before, but for what was asked for."""
    from trueup.recording.recorder import launch

    told = before.get("config")
    config = told if isinstance(told, dict) else {}
    kept = {name: config.get(name) for name in ("include", "exclude", "compile")}
    ranges = config.get("steps")
    known = ",".join(f"{a}:{'' if b is None else b}" for a, b in ranges) if ranges and _are_ranges(ranges) else None
    levels = config.get("levels")
    options: dict[str, Any] = {
        "directory": str(target),
        "level": tuple(levels) if isinstance(levels, list) else None,
        "detail": detail or config.get("detail") or "stats",
        "steps": steps or known,
        **{name: tuple(value) if isinstance(value, list) else value for name, value in kept.items() if value},
    }
    return launch.run(options, command)


def _are_ranges(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _beside(path: Path) -> Path:
    """Return the first of ``path-2``, ``path-3`` ... that does not exist."""
    number = 2
    while os.path.lexists(found := path.with_name(f"{path.name}-{number}")):
        number += 1
    return found
