"""What `trueup assess` found, on a terminal: a sentence, and each operator that the device lacks with its line and what to do.

    Of 36 operators on Ascend A2 (PyTorch 2.13.0), 32 have a kernel, 3 are made of others, 1 goes through the CPU.

    CPU fallback  aten::huber_loss  train.py:20, 1 call
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from trueup.doors.report.terminal import labelled, plain_table, print_lines, print_more
from trueup.foundation.words.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.assess import Assessment

QUIET = ("kernel", "composite")
"""Grades of operators that are counted and not listed."""


def render(found: Assessment, limit: int, console: Console) -> None:
    """Print the conclusion, up to ``limit`` operators that need a hand, and the lines that a device is slow at."""
    print_lines(console, [found.sentence], 0, "bold")
    listed = [one for one in found.operators if one.grade not in QUIET]
    for one in listed[:limit]:
        console.print()
        more = f" and {counted(len(one.places) - 1, 'other line')}" if len(one.places) > 1 else ""
        rows = [("where", f"{one.places[0]}{more}, {counted(one.calls, 'call')}")] if one.places else []
        rows += [("why", one.why), ("next", one.remedy)]
        print_lines(console, [f"{one.grade}: {one.name}"], 0, "bold")
        console.print(labelled(rows))
    print_more(console, len(listed) - limit, f" (--limit {len(listed)} shows all)")
    if found.dynamic:
        _table(console, ("shapes that change", "how"), found.dynamic, limit)
        print_lines(console, ["A device that compiles for shapes compiles for each. Pad the data, or drop the last batch."], 0)
    if found.reads:
        _table(console, ("reads a number", "times in a step"), [(place, f"{often:.3g}") for place, often in found.reads], limit)
        print_lines(console, ["The host waits for the device there. Read seldom: not in each step."], 0)
    console.print()
    for source in found.sources:
        print_lines(console, [f"table    {source.repository}, commit {source.commit[:12]}{source.commit[40:]}"], 9, "dim")


def _table(console: Console, head: tuple[str, str], rows: Sequence[tuple[str, str]], limit: int) -> None:
    table = plain_table(*head)
    for place, text in rows[:limit]:
        table.add_row(escape(place), escape(text))
    console.print()
    console.print(table)
    print_more(console, len(rows) - limit, "")
