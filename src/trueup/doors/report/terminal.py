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

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.analysis.remedy.advice import next_command, policy_to_try
from trueup.doors.report.facts import (
    SlotRow,
    StepRow,
    loss_lines,
    loss_rows,
    neighbour_lines,
    norm_rows,
    policy_lines_of,
    slot_rows,
    worst_lines,
)
from trueup.foundation.words.sentence import HEADS, evidence, operators
from trueup.foundation.words.wording import clean, counted, one_line, sci, short_source

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from trueup.foundation.model import Finding, Result

STEPS_SHOWN = 8
UNMATCHED_SHOWN = 10
CULPRITS_SHOWN = 10
WORST_SHOWN = 5
RANKS_SHOWN = 8
COLOURS = {"deviates": "bold red", "aligned": "bold green", "inconclusive": "bold yellow"}
STATES = {"deviates": "red", "incomparable": "yellow"}


def render(result: Result, console: Console) -> None:
    """Print a result: verdict, culprit, losses, further culprits, unmatched calls, notes, next command."""
    _verdict(result, console)
    if result.culprit is not None:
        _section(console, None, _particulars(result.culprit))
        _slots(result.culprit, console)
        _worst(result.culprit, console)
    if len(result.occurrences) > 1:
        _section(console, "first on each rank", _occurrences(result))
        _more(console, len(result.occurrences) - RANKS_SHOWN)
    for title, rows in (("loss", loss_rows(result)), ("gradient norm", norm_rows(result))):
        if rows:
            _section(console, title, _curve(rows))
    if len(result.culprits) > 1:
        _section(console, "further culprits", _findings(result.culprits[1 : CULPRITS_SHOWN + 1]))
        _more(console, len(result.culprits) - 1 - CULPRITS_SHOWN)
    if result.unmatched:
        _section(console, f"in only one run  ({len(result.unmatched):,})", _unmatched(result))
        _more(console, len(result.unmatched) - UNMATCHED_SHOWN)
    for first, (side, line) in enumerate(policy_lines_of(result)):
        _hanging(console, Text("policy  ", "dim"), Text(f"{side}: {one_line(line)}"), first=not first)
    for note in result.notes:
        _hanging(console, Text("note  ", "dim"), Text(one_line(note)), first=note is result.notes[0])
    _next(result, console)


def print_lines(console: Console, lines: Sequence[str], indent: int, style: str = "") -> None:
    """Print lines whose first word stands out and whose wrapped rest hangs under ``indent`` columns."""
    for k, line in enumerate(lines):
        head = Text(line[:indent] if k == 0 else " " * indent, style if k == 0 else "")
        _hanging(console, head, Text(line[indent:]))


def slot_table(rows: Iterable[SlotRow]) -> Table:
    """Lay out slots with their numbers under each other: one heading row a slot, one row a side."""
    table = _plain_table("slot", *("min", "max", "mean", "l2", "rel. L2"))
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
    expected = f", {sci(finding.expected)} expected" if finding.expected else ""
    facts = {
        "source": clean(finding.source_line or "").strip(),
        "call": f"{before} in the baseline, {after} in the candidate, level {one_line(finding.level)}",
        "rule": f"{one_line(finding.rule)}{expected}" if finding.rule else "",
    }
    grid = Table.grid(padding=(0, 2))
    for name, text in facts.items():
        if text:
            grid.add_row(Text(name, "dim"), Text(text, overflow="fold"))
    return grid


def _slots(finding: Finding, console: Console) -> None:
    if not finding.slots:
        return
    rows = slot_rows(finding)
    _section(console, None, slot_table(rows))
    if any(row.method == "sketch" and row.state != "equal" for row in rows):
        console.print(Text("  ≈ estimated from sketches, about ±18 %", "dim"))


def _worst(finding: Finding, console: Console) -> None:
    """Where the sides are furthest apart, of the worst slot."""
    lines = worst_lines(finding)[:WORST_SHOWN]
    if not lines:
        return
    table = _plain_table("worst elements", "baseline", "candidate", "difference", "ulp")
    for slot, index, *numbers in lines:
        table.add_row(Text(f"{slot}{index}"), *numbers)
    _section(console, None, table)


def _cells(numbers: Sequence[str]) -> list[str]:
    return list(numbers) if numbers else ["", "", "", ""]


def _remarks(table: Table, *remarks: str) -> None:
    for text in filter(None, remarks):
        table.add_row(Text(f"    {text}", "yellow"))


def _curve(rows: Sequence[StepRow]) -> Table:
    table = _plain_table("step", "baseline", "candidate", "difference")
    table.columns[0].justify = "right"
    lines = loss_lines(rows)
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
        near = ", ".join(f"{word} {name}" for word, name, _ in neighbour_lines(finding))
        if near:
            table.add_row("", Padding(Text(near, "dim", overflow="fold"), (0, 0, 0, 2)), "")
    return table


def _occurrences(result: Result) -> Table:
    table = Table.grid()
    for one in result.occurrences[:RANKS_SHOWN]:
        table.add_row(Text(one_line(one.sentence), overflow="fold"))
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table.grid()
    for finding in findings:
        table.add_row(Text(f"{one_line(finding.name)}  ({operators(finding)})", overflow="fold"))
        mark = "" if finding.confidence == "high" else "could be rounding: "
        lines = [mark + evidence(finding)]
        if finding.source:
            lines.append(f"your code: {short_source(finding.source)}")
        for line in lines:
            table.add_row(Padding(Text(line, "dim", overflow="fold"), (0, 0, 0, 4)))
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


def _plain_table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _section(console: Console, title: str | None, body: RenderableType) -> None:
    console.print()
    if title:
        console.print(Text(title, "bold"))
    console.print(Padding(body, (0, 0, 0, 2)))


def _more(console: Console, count: int) -> None:
    if count > 0:
        console.print(Text(f"  and {counted(count, 'more', 'more')}; the report lists all", "dim"))


def _hanging(console: Console, head: Text, body: Text, *, first: bool = False) -> None:
    """Print ``head`` and, beside it, ``body`` wrapped under itself."""
    if first:
        console.print()
    grid = Table.grid()
    grid.add_column(width=head.cell_len, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(head, body)
    console.print(grid)


def print_saved(directory: Path, console: Console) -> None:
    """Say where the report is; the path stays on one line, so that a terminal makes it a link."""
    console.print()
    console.print(Text.assemble(("report  ", "bold"), clean(str(directory / "index.html"))), soft_wrap=True)


def print_written(file: Path, console: Console) -> None:
    """Say where a table of rows is."""
    console.print()
    console.print(Text.assemble(("rows  ", "bold"), clean(str(file))), soft_wrap=True)
