"""The simulated accelerator's faults and noise as two tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console


class Row(Protocol):
    """What a fault and a kind of noise have in common."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def op(self) -> str: ...  # noqa: D102
    @property
    def phase(self) -> str: ...  # noqa: D102
    @property
    def what(self) -> str: ...  # noqa: D102


def render_catalogue(faults: Iterable[Row], noise: Iterable[Row], console: Console) -> None:
    """Print both tables: name, what happens, operator and phase; for faults also whom to blame, if another call."""
    faults, noise = list(faults), list(noise)
    console.print(Text(f"{len(faults)} faults: the comparison must name them", "bold"))
    console.print(_table(faults))
    console.print()
    console.print(Text(f"{len(noise)} kinds of noise: legitimate differences that it must not blame", "bold"))
    console.print(_table(noise))


def _table(rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("name", no_wrap=True)
    table.add_column("what happens", ratio=1, overflow="fold")
    table.add_column("where", overflow="fold", max_width=44)
    for row in rows:
        where = Text(f"{row.op}, {row.phase}")
        blame = str(getattr(row, "blame", "") or "")
        if blame and blame not in (row.op, row.name):
            where.append(f"\nblame {blame}", "dim")
        table.add_row(Text(row.name), Text(row.what), where)
    return table
