"""Calls whose outputs point elsewhere than the baseline's, each in a panel, as precision_tool's ``vcs`` lists them.

╭─ 1  head  tf.raw_ops.MatMul#0  backward, step 0 ───────────────────╮
│ baseline  seq 41        candidate  seq 41                          │
│ input     input.0 1.000000   input.1 0.999999                      │
│ output    output.0 0.412310  max |d| 2.1e-1                        │
╰────────────────────────────────────────────────────────────────────╯
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trueup.comparison.result.cosines import Dissimilar, Listing, SlotCosine
from trueup.foundation.words.wording import counted, one_line, sci, shorten

if TYPE_CHECKING:
    from rich.console import Console


def render_listing(listing: Listing, console: Console) -> None:
    """Print the calls of a listing, then what it could not tell."""
    for number, call in enumerate(listing.calls, 1):
        console.print(_panel(number, call, listing.limit, console.width))
    said, style = _summary(listing)
    console.print(Text(said, style))
    if listing.unknown:
        several = counted(listing.unknown, "call could not be measured", "calls could not be measured")
        console.print(Text(f"could not tell: {several}: {one_line(listing.why_unknown)}", "yellow"))
    if listing.estimated:
        console.print(Text(
            "≈ estimated from sketches: 1 - cosine is right to about ±25 %. For exact ones, and the largest difference, "
            "record both runs with --detail tensor.", "dim",
        ))  # fmt: skip


def _summary(listing: Listing) -> tuple[str, str]:
    compared = f"of {counted(listing.compared, 'compared call')}"
    if not listing.total:
        return f"no output with a cosine of {listing.limit:g} or less, {compared}", "" if listing.unknown else "green"
    more = listing.total - len(listing.calls)
    rest = f", {more:,} more below: raise -l" if more else ""
    return f"{counted(listing.total, 'call')} with an output whose cosine is {listing.limit:g} or less, {compared}{rest}", "bold"


def _panel(number: int, call: Dissimilar, limit: float, width: int) -> Panel:
    title, where = _title(number, call, width)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    if call.names is None:
        grid.add_row(Text("seq", "dim"), f"{call.seq[0]} in the baseline, {call.seq[1]} in the candidate")
    elif call.names[0] != call.names[1]:
        grid.add_row(Text("right", "dim"), Text(one_line(call.names[1])))
    for label, is_output in (("input", False), ("output", True)):
        slots = [slot for slot in call.slots if slot.is_output is is_output]
        if slots:
            cell = Text("\n" if is_output and any(map(_remark, slots)) else "   ").join(_slot(slot, limit) for slot in slots)
            grid.add_row(Text(label, "dim"), cell)
    return Panel(grid, title=Text.assemble((title, "bold"), "  ", (one_line(where), "dim")), title_align="left", padding=(0, 1))


def _title(number: int, call: Dissimilar, width: int) -> tuple[str, str]:
    if call.names is not None:
        return shorten(f"{number}  {one_line(call.names[0])}", max(20, width - 8)), ""
    key = call.key
    scope = f"{one_line(key.scope)}  " if key.scope else ""
    where = f"{key.phase}, step {key.step}, rank {key.rank}, {key.level}"
    return shorten(f"{number}  {scope}{one_line(key.op)}#{key.ordinal}", max(20, width - len(where) - 8)), where


def _slot(slot: SlotCosine, limit: float) -> Text:
    style = "green"
    if math.isnan(slot.cosine):
        style = "red" if slot.reason else "yellow"
    elif slot.cosine <= limit:
        style = "red"
    value = "none" if math.isnan(slot.cosine) else f"{'≈' if slot.is_estimate else ''}{cosine_text(slot.cosine)}"
    text = Text.assemble(one_line(slot.slot), " ", (value, style))
    if remark := _remark(slot):
        text.append(f"  {remark}", "dim")
    return text


def _remark(slot: SlotCosine) -> str:
    if not slot.is_output:
        return ""
    far = f"max |d| {sci(slot.max_absolute)}" if math.isfinite(slot.max_absolute) and slot.max_absolute else ""
    return "  ".join(filter(None, (far, one_line(slot.reason))))


def cosine_text(value: float) -> str:
    """Write a cosine with six decimals; one that is not 1 is never written as 1."""
    return "1" if value == 1 else f"{min(value, 0.999999) if value < 1 else value:.6f}"
