"""What `trueup explain-log` found, on a terminal: the first error, what to do, and which lines only follow from it.

FOUND  rank 2, train.log:8812, 10:03:11: The memory of the GPU does not suffice.

line   torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
next   See whether another process holds it; then a smaller batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from trueup.doors.report.terminal import labelled, plain_table, print_lines, print_more
from trueup.foundation.words.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.knowledge import Explanation, Operators
    from trueup.migration.knowledge.explaining import Sighting
    from trueup.migration.knowledge.known import Row

NAMES = {"op": "operator"}
LATE = "The operator and the line that Python names are those that waited, and need not be those that failed."


def render(found: Explanation, limit: int, console: Console) -> None:
    """Print the conclusion, the row of the first error, and up to ``limit`` of each other kind of line."""
    print_lines(console, [f"{found.verdict}  {found.sentence}"], 0, "bold")
    if found.first is not None:
        console.print()
        console.print(labelled(_particulars(found.first)))
        for row in found.near:
            console.print()
            print_lines(console, [f"near: {row.id}"], 0, "bold")
            console.print(labelled([("line", row.hit[0]), ("why", row.cause), ("next", row.remedy)]))
    _table(console, "follows from it", found.echoes, limit)
    _table(console, "other errors", found.others, limit)
    _table(console, "no row knows", [one for one in found.unknown if one is not found.first], limit)
    _table(console, "to ignore", found.notes, limit)
    if found.remarks:
        console.print()
        print_lines(console, found.remarks, 0, "dim")


def _particulars(first: Sighting) -> list[tuple[str, str]]:
    rows = [("line", first.text)]
    if first.source:
        rows.append(("code", first.source))
    if first.names:
        rows.append(("names", ", ".join(f"{NAMES.get(name, name)} {value}" for name, value in first.names.items())))
    return rows + (_row(first.row) if first.row is not None else [])


def _row(row: Row) -> list[tuple[str, str]]:
    """Return what a row says, each part with a label."""
    said = [
        ("row", row.id), ("why", row.cause if row.role == "echo" else ""), ("late", LATE if row.late else ""), ("look", row.probe),
        ("next", row.remedy), ("check", row.check), ("guide", row.corrects), ("of", row.versions or ""), ("from", row.origin or ""),
    ]  # fmt: skip
    return [(label, text) for label, text in said if text]


def _table(console: Console, title: str, some: Sequence[Sighting], limit: int) -> None:
    if not some:
        return
    table = plain_table(title, "lines", "rank", "first")
    for one in some[:limit]:
        name = one.row.id if one.row else one.text[:60]
        table.add_row(escape(name), f"{one.count:,}", "" if one.rank is None else str(one.rank), escape(_where(one)))
    console.print()
    console.print(table)
    print_more(console, len(some) - limit, "")


def _where(one: Sighting) -> str:
    return f"{one.log}:{one.line}" + (f", {one.time}" if one.time else "")


def render_operators(found: Operators, limit: int, console: Console) -> None:
    """Print the conclusion and up to ``limit`` operators, those that were compiled late first."""
    print_lines(console, [found.sentence], 0, "bold")
    if not found.operators:
        return
    table = plain_table("operator", "parameters", "asked", "compiled", "after step 1", "steps")
    for one in found.operators[:limit]:
        steps = f"{one.first} to {one.last}" if found.steps else ""
        name = f"{one.type} (moves)" if one.moves else one.type
        table.add_row(escape(name), escape(one.parameters), f"{one.asked:,}", f"{one.compiled:,}", f"{one.late:,}", steps)
    console.print()
    console.print(table)
    print_more(console, len(found.operators) - limit, f" (--limit {len(found.operators)} shows all)")
    moved = sum(one.asked for one in found.operators if one.moves)
    if moved:
        print_lines(console, [f"{counted(moved, 'call')} only copy or change a format (TransData, Cast, ViewCopy)."], 0)
    if found.left_out:
        print_lines(console, [f"{counted(found.left_out, 'call')} of further parameters were left out."], 0, "dim")
