"""What overflowed, on a terminal: the sentence first, then the call in numbers, what led to it, what to do.

    FOUND  crf, forward, step 0, rank 0 (torch.Tensor.add): overflow: of clean inputs up to 6.2e4 (float16) it made 2 +Inf of …
           accuracy-relevant: the next step reads weights that are bad because of it
           your code: bert_crf/bert_crf.py:44 in partition

      slot        tensor               min      max     mean       l2   bad
      input.0     float16 [8, 7]     58112    62048    60102    4.5e5
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.doors.report.facts import numbers
from trueup.doors.report.terminal import print_lines
from trueup.foundation.model import TensorStats
from trueup.foundation.words.anomaly_sentence import HEADS, counts
from trueup.foundation.words.wording import clean, counted, number, one_line, short_source, shorten

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from trueup.foundation.facts.anomaly import Anomaly, OverflowResult, SlotNumbers

FURTHER, NOTES, SLOTS = 10, 6, 12
COLOURS = {"found": "bold red", "clean": "bold green", "harmless": "bold green", "inconclusive": "bold yellow"}


def render(result: OverflowResult, console: Console) -> None:
    """Print a result."""
    lines = clean(result.sentence).splitlines()
    print_lines(console, lines, len(HEADS[result.verdict]), COLOURS[result.verdict])
    first = result.first
    if first is not None:
        _slots(first, console)
        if first.led:
            _section(console, "what led to it, nearest first", _led(first))
        if first.policy:
            _section(console, "a policy.toml that runs the call in a wider dtype", Text(first.policy.rstrip(), "cyan"))
    if result.scale_history:
        _section(console, "loss scale", Text(result.scale_history))
    if len(result.anomalies) > 1:
        _section(console, "further findings", _further(result.anomalies[1 : FURTHER + 1]))
        more = len(result.anomalies) - 1 - FURTHER
        if more > 0:
            console.print(Text(f"  and {more:,} more; overflow.json lists all", "dim"))
    if result.notes:
        _section(console, "notes", Text("\n".join(one_line(note) for note in result.notes[:NOTES])))
    _next(result, console)


def _next(result: OverflowResult, console: Console) -> None:
    first, head = result.first, "next  "
    what = "whether the clean numbers are the right ones:" if first and first.matters == "harmless" else "whether it matters:"
    for said, command in ((what, first.run_next if first else ""), ("whether the policy heals it:", result.try_next)):
        if command:
            if head.strip():
                console.print()
            console.print(Text.assemble((head, "bold"), said))
            console.print(Text(" " * 6 + command, "cyan"), soft_wrap=True)
            head = " " * 6


def _slots(first: Anomaly, console: Console) -> None:
    shown = [slot for slot in first.slots if isinstance(slot.stats, TensorStats) or slot.bad]
    if not shown:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("slot", overflow="fold")
    table.add_column("tensor", overflow="fold")
    for name in ("min", "max", "mean", "l2"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bad", overflow="fold")
    shown.sort(key=lambda slot: not slot.bad)  # stable: the bad ones are among those shown
    for slot in sorted(shown[:SLOTS], key=lambda slot: _order(slot.slot)):
        held = numbers(slot.stats) if isinstance(slot.stats, TensorStats) else [""] * 4
        table.add_row(Text(one_line(slot.slot)), Text(_tensor(slot)), *held, Text(counts(slot), "red"))
    _section(console, None, table)
    if len(shown) > SLOTS:
        console.print(Text(f"  and {counted(len(shown) - SLOTS, 'more slot')}", "dim"))


def _order(slot: str) -> int:
    return 0 if slot.startswith(("input.", "param.", "grad_output.")) else 1


def _tensor(slot: SlotNumbers) -> str:
    return one_line(f"{slot.dtype} {slot.shape}")


def _led(first: Anomaly) -> Table:
    table = Table.grid(padding=(0, 2))
    for one in first.led:
        name = f"{one.place.scope}/{one.place.op}" if one.place.scope else one.place.op
        size = f"up to {number(one.largest)}"
        table.add_row(Text(shorten(one_line(name), 60)), Text(one_line(f"{one.slot} {one.dtype} {one.shape}")), Text(size))
    return table


def _further(found: tuple[Anomaly, ...]) -> Table:
    table = Table.grid()
    for one in found:
        table.add_row(Text(clean(one.sentence), overflow="fold"))
        source = f"; your code: {short_source(one.place.source)}" if one.place.source else ""
        table.add_row(Padding(Text(clean(f"{one.matters}: {one.because}{source}"), "dim", overflow="fold"), (0, 0, 0, 4)))
    return table


def _section(console: Console, title: str | None, body: RenderableType) -> None:
    console.print()
    if title:
        console.print(Text(title, "bold"))
    console.print(Padding(body, (0, 0, 0, 2)))
