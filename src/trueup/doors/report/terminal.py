"""A result on a terminal: the verdict first, then what proves it, then what to do.

    DEVIATES  first culprit: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::_thnn_fused_lstm_cell_backward…)
              inputs agree (rel. L2 3e-8), outputs do not (rel. L2 2.1e-1, 3.5e6 x the expected rounding error)
              your code: centernet.py:57 in forward
              37 later calls deviate because their inputs do

      slot                                min       max       mean        l2    rel. L2
      grad_output.0  float32 [8, 32]                                              ≈3e-8
        baseline                      -0.0123    0.0119   1.02e-5     0.411
        candidate                     -0.0123    0.0119   1.02e-5     0.411

Reads without colour; every foreign string is a ``Text``, never console markup.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.analysis.remedy.advice import next_command, policy_to_try
from trueup.doors.report import result_view
from trueup.foundation.words.sentence import HEADS, evidence, operators, ranks_alike
from trueup.foundation.words.wording import clean, counted, one_line, sci, shorten, user_source

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trueup.foundation.model import Finding, Result

STEPS_SHOWN = 8
SLOTS_SHOWN = 12
UNMATCHED_SHOWN = 10
CULPRITS_SHOWN = 10
WORST_SHOWN = 5
RANKS_SHOWN = 8
COLOURS = {"deviates": "bold red", "aligned": "bold green", "inconclusive": "bold yellow"}
STATES = {"deviates": "red", "incomparable": "yellow"}


UNBOUNDED = 4096
"""Columns of a line that nobody sees on a screen."""


class Terminal(Console):
    """Standard output. A reader who leaves (``| head``) ends the printing alone: reports are saved, the exit code is the
    verdict's. A file or another program gets lines as long as they are, unless ``COLUMNS`` says how long they may be."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)
        if not self.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
            self.width = UNBOUNDED

    def on_broken_pipe(self) -> None:
        """Print no more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def render(result: Result, console: Console) -> None:
    """Print a result: verdict, culprit, losses, further culprits, unmatched calls, notes, next command."""
    _verdict(result, console)
    if result.culprit is not None:
        section(console, None, _particulars(result.culprit))
        _slots(result.culprit, console)
        _worst(result.culprit, console)
    if len(result.occurrences) > 1:
        alike = ranks_alike(result.occurrences)
        section(console, "first on each rank", _occurrences([said for _, _, said in alike[:RANKS_SHOWN]]))
        print_more(console, len(alike) - RANKS_SHOWN)
    for title, rows in (("loss", result_view.loss_rows(result)), ("gradient norm", result_view.norm_rows(result))):
        if rows:
            section(console, title, _curve(rows))
            remarks = [result_view.loss_remark(result)] if title == "loss" else result_view.partial_norms(result)
            for remark in filter(None, remarks):
                console.print(Padding(Text(remark, "dim", overflow="fold"), (0, 0, 0, 2), expand=False))
    if len(result.culprits) > 1:
        section(console, "further culprits", _findings(result.culprits[1 : CULPRITS_SHOWN + 1]))
        print_more(console, len(result.culprits) - 1 - CULPRITS_SHOWN)
    if result.unmatched:
        section(console, f"in only one run  ({len(result.unmatched):,})", _unmatched(result))
        print_more(console, len(result.unmatched) - UNMATCHED_SHOWN)
    for first, (side, line) in enumerate(result_view.policy_lines_of(result)):
        _hanging(console, Text("policy  ", "dim"), Text(f"{side}: {one_line(line)}"), first=not first)
    said = [line.strip() for line in result.sentence.splitlines()]
    for n, note in enumerate(note for note in result.notes if f"note: {one_line(note)}" not in said):
        _hanging(console, Text("note  ", "dim"), Text(one_line(note)), first=not n)
    _next(result, console)


def print_lines(console: Console, lines: Sequence[str], indent: int, style: str = "") -> None:
    """Print lines whose first word stands out and whose wrapped rest hangs under ``indent`` columns."""
    for k, line in enumerate(lines):
        if not indent:
            console.print(Text(line, style))
            continue
        head = Text(line[:indent] if k == 0 else " " * indent, style if k == 0 else "")
        _hanging(console, head, Text(line[indent:]))


def slot_table(rows: Iterable[result_view.SlotRow]) -> Table:
    """Lay out slots with their numbers under each other: one heading row a slot, one row a side."""
    table = plain_table("slot", ">min", ">max", ">mean", ">l2", ">rel. L2")
    for row in rows:
        style = STATES.get(row.state, "")
        what = Text.assemble((row.slot, style or "bold"), "  ", (row.tensor, "dim"))
        if len(row.sides) == 1:
            side = row.sides[0]
            table.add_row(what, *_cells(side.numbers), Text("equal", "dim"))
            _remarks(table, row.reason, side.remark)
            continue
        estimated = "≈" if row.method in ("sketch", "statistics") else ""
        table.add_row(what, "", "", "", "", Text(estimated + row.error, style))
        for side in row.sides:
            table.add_row(Text(f"  {side.side}"), *_cells(side.numbers))
            _remarks(table, side.remark)
        _remarks(table, row.reason)
    return table


def _verdict(result: Result, console: Console) -> None:
    lines = clean(result.sentence).splitlines() or [""]
    head = HEADS[result.verdict]
    indent = len(head) if lines[0].startswith(head) else 0
    print_lines(console, lines, indent, COLOURS[result.verdict])


def _particulars(finding: Finding) -> Table:
    """What the sentence leaves out of the first culprit."""
    before, after = (f"{seq:,}" if seq >= 0 else "absent" for seq in finding.seq)
    expected = f", {sci(finding.expected)} expected" if finding.expected and math.isfinite(finding.expected) else ""
    said = {
        "source": clean(finding.source_line or "").strip(),
        "call": f"{before} in the baseline, {after} in the candidate, level {one_line(finding.level)}",
        "rule": f"{one_line(finding.rule)}{expected}" if finding.rule else "",
    }
    return labelled((name, text) for name, text in said.items() if text)


def _slots(finding: Finding, console: Console) -> None:
    if not finding.slots:
        return
    rows = result_view.slot_rows(finding)
    telling = sorted(range(len(rows)), key=lambda k: rows[k].state == "equal")[:SLOTS_SHOWN]
    shown = [rows[k] for k in sorted(telling)]
    section(console, None, slot_table(shown))
    print_more(console, len(rows) - len(shown))
    if any(row.method == "sketch" and row.state != "equal" for row in shown):
        console.print(Text("  ≈ estimated from sketches, about ±18 %", "dim"))


def _worst(finding: Finding, console: Console) -> None:
    """Where the sides are furthest apart, of the worst slot."""
    lines = result_view.worst_lines(finding)[:WORST_SHOWN]
    if not lines:
        return
    table = plain_table("worst elements", ">baseline", ">candidate", ">difference", ">ulp")
    for slot, index, *numbers in lines:
        table.add_row(Text(f"{slot}{index}"), *numbers)
    section(console, None, table)


def _cells(numbers: Sequence[str]) -> list[str]:
    return list(numbers) if numbers else ["", "", "", ""]


def _remarks(table: Table, *remarks: str) -> None:
    for text in filter(None, remarks):
        table.add_row(Text(f"    {text}", "yellow"))


def _curve(rows: Sequence[result_view.StepRow]) -> Table:
    table = plain_table(">step", ">baseline", ">candidate", ">difference")
    lines = result_view.loss_lines(rows)
    if len(lines) > STEPS_SHOWN:
        half = STEPS_SHOWN // 2
        lines = [*lines[:half], ("…",) * 4, *lines[-half:]]
    for line in lines:
        table.add_row(*line)
    return table


def _unmatched(result: Result) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in result.unmatched[:UNMATCHED_SHOWN]:
        name = Text(one_line(finding.name), overflow="fold")
        table.add_row(Text(finding.side, "dim"), name, Text(operators(finding), overflow="fold"))
        near = ", ".join(f"{word} {name}" for word, name, _ in result_view.neighbour_lines(finding))
        if near:
            table.add_row("", Padding(Text(near, "dim", overflow="fold"), (0, 0, 0, 2), expand=False), "")
    return table


def _occurrences(lines: Sequence[str]) -> Table:
    table = Table.grid()
    for line in lines:
        table.add_row(Text(one_line(line), overflow="fold"))
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table.grid()
    for finding in findings:
        table.add_row(Text(f"{one_line(finding.name)}  ({operators(finding)})", overflow="fold"))
        mark = "" if finding.confidence == "high" else "could be rounding: "
        lines = [mark + evidence(finding)]
        if finding.source:
            lines.append(f"your code: {user_source(finding.source, finding.stack)}")
        for line in lines:
            table.add_row(Padding(Text(line, "dim", overflow="fold"), (0, 0, 0, 4), expand=False))
    return table


def _next(result: Result, console: Console) -> None:
    advice = next_command(result)
    if advice is None:
        return
    console.print()
    what, command = advice
    _hanging(console, Text("next  ", "bold"), Text(f"{what}:"))
    # soft_wrap: a command must stay one line, or it cannot be copied
    console.print(Text(" " * 6 + command, "cyan"), soft_wrap=True)
    if (remedy := policy_to_try(result)) is not None:
        text, attempt = remedy
        console.print(Text("      or see whether this policy.toml heals the run, and compare again:"), soft_wrap=True)
        for line in text.splitlines():
            console.print(Text(" " * 8 + clean(line), "dim"), soft_wrap=True)
        console.print(Text(" " * 6 + attempt, "cyan"), soft_wrap=True)


def plain_table(*columns: str) -> Table:
    """Return a table without lines; ``>`` before the name of a column: of numbers, to the right and never wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for name in columns:
        if name.startswith(">"):
            table.add_column(name[1:], justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table


def listing(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int, styles: Iterable[str] = (),
    whole: int | None = None,
) -> None:  # fmt: skip
    """Print up to ``limit`` rows of foreign text under their headings (as for `plain_table`) after an empty line, and how many more
    ``--limit`` would show; nothing where there are no rows. ``styles``: one for each row; ``whole``: the column whose words are not
    broken as long as others can give way."""
    if not rows:
        return
    table = plain_table(*columns)
    for row, style in zip(rows[:limit], styles or repeat(""), strict=False):
        table.add_row(*(Text(clean(cell)) for cell in row), style=style)
    if whole is not None:
        cells = [list(map(clean, column)) for column in zip(columns, *rows[:limit], strict=True)]
        for column, width in zip(table.columns, _widths(cells, whole, console.width), strict=True):
            column.width = width
    console.print()
    console.print(table)
    print_more_by_limit(console, len(rows), limit)


NARROWEST = 10
"""Characters that a column keeps whose words may be broken."""


def _widths(cells: Sequence[Sequence[str]], whole: int, room: int) -> list[int]:
    """Return how wide columns may be so that they stand side by side in ``room``: the widest gives way first, that of number
    ``whole`` no further than to its longest word."""
    widths = [max(map(cell_len, column)) for column in cells]
    least = [min(width, NARROWEST) for width in widths]
    least[whole] = min(room // 3, max(cell_len(word) for cell in cells[whole] for word in cell.split() or [""]))
    while sum(widths) + 2 * (len(widths) - 1) > room and widths != least:
        widest = max((n for n, width in enumerate(widths) if width > least[n]), key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def print_more_by_limit(console: Console, count: int, limit: int) -> None:
    """Say how many of ``count`` rows the option ``--limit`` left out, if it left out any."""
    print_more(console, count - limit, f" (--limit {count} shows all)")


def entry(console: Console, title: str, rows: Iterable[tuple[str, str | Text]]) -> None:
    """Print one finding after an empty line: its title, and what is said of it by label."""
    console.print()
    print_lines(console, [title], 0, "bold")
    console.print(labelled(rows))


def section(console: Console, title: str | None, body: RenderableType) -> None:
    """Print a body under its title, two columns in, after an empty line."""
    console.print()
    if title:
        console.print(Text(title, "bold"))
    console.print(Padding(body, (0, 0, 0, 2), expand=False))


def labelled(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Lay rows out without headings: a dim label, and beside it text that folds."""
    grid = Table.grid(padding=(0, 2))
    for label, text in rows:
        grid.add_row(Text(label, "dim"), text if isinstance(text, Text) else Text(text, overflow="fold"))
    return grid


def print_more(console: Console, hidden: int, rest: str = "; the report lists all", noun: str = "") -> None:
    """Say how many rows were left out, if any were, and how they are to be seen."""
    if hidden > 0:
        console.print(Text(f"  and {counted(hidden, f'more {noun}') if noun else f'{hidden:,} more'}{rest}", "dim"))


def _hanging(console: Console, head: Text, body: Text, *, first: bool = False) -> None:
    """Print ``head`` and, beside it, ``body`` wrapped under itself."""
    if first:
        console.print()
    grid = Table.grid()
    grid.add_column(width=head.cell_len, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(head, body)
    console.print(grid)


def print_next(console: Console, what: str, commands: Sequence[str]) -> None:
    """Say what to do next; a command stays on one line, or it could not be copied."""
    console.print()
    console.print(Text.assemble(("next  ", "bold"), f"{what}{':' if commands else ''}"))
    for command in commands:
        console.print(Text(" " * 6 + one_line(command), "cyan"), soft_wrap=True)


def progress(console: Console, width: int) -> Callable[..., None]:
    """Return what prints a run: its number, its name in ``width`` columns, its seconds, and styled texts that say what it gave."""
    numbers = count(1)

    def print_run(name: str, seconds: float, *said: tuple[str, str]) -> None:
        line = f"{next(numbers):4}  {shorten(one_line(name), width):<{width}}  {seconds:6.1f} s  "
        console.print(Text.assemble((line, "dim"), *said), soft_wrap=True)

    return print_run


def print_saved(directory: Path, console: Console) -> None:
    """Say where the report is; the path stays on one line, so that a terminal makes it a link."""
    console.print()
    console.print(Text.assemble(("report  ", "bold"), clean(str(directory / "index.html"))), soft_wrap=True)


def print_written(file: Path, console: Console, what: str = "rows") -> None:
    """Say where a table of rows is, or what else was written."""
    console.print()
    console.print(Text.assemble((f"{what}  ", "bold"), clean(str(file))), soft_wrap=True)
