"""Calls in one line each, and how many there are of each operator, on one side or on both."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from trueup.doors.report.capture_view import CaptureLike
from trueup.doors.report.facts import call_name
from trueup.doors.report.selecting import KEYS, Call, Selection, scan
from trueup.foundation.words.wording import counted, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


def render_list(calls: Sequence[Call], total: int, console: Console, *, several: bool) -> None:
    """Print calls with their type and place; ``several``: ranks, so that each is named."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("seq", justify="right", no_wrap=True)
    for name in ("type", "name", "phase"):
        table.add_column(name, overflow="fold")
    for name in ("step", *(["rank"] if several else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("level", no_wrap=True)
    for call in calls:
        name = call_name(call.scope, call.op, call.ordinal)
        place = [str(call.step), *([str(call.rank)] if several else [])]
        table.add_row(str(call.seq), *map(Text, (one_line(call.op), name, one_line(call.phase))), *place, one_line(call.level))
    console.print(table)
    if total > len(calls):
        console.print(Text(f"and {counted(total - len(calls), 'more call')}: raise -l, or choose with -n, -t, -p", "dim"))


def count_types(capture: CaptureLike, chosen: Selection) -> Counter[str]:
    """Count the chosen calls by operator, some steps at a time."""
    found: Counter[str] = Counter()
    for rows in scan(capture, chosen, (*KEYS, "op")):
        calls = rows.group_by([*KEYS, "op"], use_threads=False).aggregate([]).group_by("op", use_threads=False)
        counts = calls.aggregate([("seq", "count")])
        found.update({op or "": n for op, n in zip(counts["op"].to_pylist(), counts["seq_count"].to_pylist(), strict=True)})
    return found


def render_types(sides: Sequence[tuple[str, Counter[str]]], console: Console, limit: int) -> None:
    """Print how many calls of each operator there are on each side, what differs first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("type", overflow="fold")
    for name, _ in sides:
        table.add_column(name, justify="right", no_wrap=True)
    if len(sides) > 1:
        table.add_column("")
    names = {name for _, counts in sides for name in counts}

    def order(name: str) -> tuple[bool, int, str]:
        counts = [side[name] for _, side in sides]
        return len(set(counts)) == 1, -max(counts), name

    shown = sorted(names, key=order)
    for name in shown[:limit]:
        counts = [side[name] for _, side in sides]
        differs = [Text("differs" if len(set(counts)) > 1 else "", "yellow")] if len(sides) > 1 else []
        table.add_row(Text(one_line(name)), *(f"{count:,}" for count in counts), *differs)
    totals = [sum(side.values()) for _, side in sides]
    table.add_row(Text("all", "dim"), *(f"{total:,}" for total in totals))
    console.print(table)
    if len(shown) > limit:
        console.print(Text(f"and {counted(len(shown) - limit, 'more type')}: raise -l", "dim"))
