"""The commands that judge: everything at once (`ac`), the comparison (`vc`) and what of it lies below a cosine (`vcs`)."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.text import Text

from trueup.doors.shell.session import NAMES, Session
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import clean

Word = Optional[str]  # noqa: UP045 - typer evaluates it on Python 3.10
Place = Optional[Path]  # noqa: UP045
FUSION = "a capture does not hold what a compiler fused: `trueup triage -- COMMAND` finds the guilty one"
COLOURS = {0: "green", 1: "bold red", 2: "yellow"}


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
    from trueup.doors.report.check_terminal import render

    against = None if session.is_alone else session.capture("base")
    head = "casts, mixed precision" if session.is_alone else "casts, mixed precision, graph similarity"
    session.console.print(Text(head, "bold"))
    try:
        found = check(session.capture(session.sides[0]), against=against)
    except TrueupError as error:
        session.console.print(Text(f"  {clean(str(error))}", COLOURS[2]))
        return 2
    render(found, limit, session.console)
    return found.exit_code


def _say(session: Session, head: str, code: int, lines: list[str], limit: int) -> None:
    session.console.print(Text(head, "bold"))
    for line in lines[:limit]:
        session.console.print(Text(f"  {clean(line)}", COLOURS[code]), soft_wrap=False)


def vc(
    context: typer.Context,
    left: Annotated[Place, typer.Option("-lt", "--left", metavar="DIR", help="Another candidate from now on.")] = None,
    right: Annotated[Place, typer.Option("-rt", "--right", metavar="DIR", help="Another baseline from now on.")] = None,
    graph: Annotated[Word, typer.Option("-g", "--graph", metavar="LEVEL", help="Level: module, api or aten; else all.")] = None,
    output: Annotated[
        Place, typer.Option("-o", "--output", metavar="DIR", help="Save the report there, and the table result_TIME.csv.")
    ] = None,
    criterion: Annotated[str, typer.Option(metavar="NAME|FILE", help="What is demanded of the candidate.")] = "default",
    mapping: Annotated[Place, typer.Option("--map", metavar="FILE", help="Which scopes and operators are which.")] = None,
) -> int:
    """Compare the two captures: `trueup compare`.

    Returns 0 aligned, 1 deviates, 2 could not tell.
    """
    from trueup.doors.cli import selection
    from trueup.doors.report.terminal import print_saved, print_written, render
    from trueup.doors.report.vector_compare import write_vector_compare

    session: Session = context.obj
    levels = selection.levels([graph] if graph else None)
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


def vcs(
    context: typer.Context,
    file: Annotated[Place, typer.Option("-f", "--file", metavar="CSV", help="A table of msaccucmp's instead.")] = None,
    cosine: Annotated[float, typer.Option("-c", "--cosine", metavar="X", min=-1.0, max=1.0, help="At or below this.")] = 0.98,
    limit: Annotated[int, typer.Option("-l", "--limit", metavar="N", min=1, help="How many calls to show.")] = 3,
) -> int:
    """List the calls with an output whose cosine is low, in order of execution: `trueup compare --cosine`.

    Returns 1 where there are any, else 2 where some could not be measured, else what the comparison says.
    """
    from trueup.doors.report.cosine_view import render_listing

    session: Session = context.obj
    if file is not None:
        from trueup.doors.report.vector_compare import read_vector_compare

        listing = read_vector_compare(file, cosine, limit)
    else:
        listing = session.compared().cosines.below(cosine, limit)
    render_listing(listing, session.console)
    if file is not None:
        return listing.exit_code
    result = session.compared().result
    session.console.print(Text.assemble(("vc says  ", "dim"), clean(result.sentence.splitlines()[0])))
    return listing.exit_code or result.exit_code
