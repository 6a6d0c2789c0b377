"""The simulated accelerator's faults and noise, listed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from rich.padding import Padding
from rich.text import Text

from trueup.foundation.words.wording import counted

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
    """Print all rows: name, operator and phase; what happens; for faults also what is to blame."""
    faults, noise = list(faults), list(noise)
    console.print(Text(f"{counted(len(faults), 'fault')}: the comparison must name them", "bold"))
    for row in faults:
        _print(row, console)
    console.print()
    console.print(
        Text(f"{counted(len(noise), 'kind')} of noise: legitimate differences that it must not blame", "bold")
    )
    for row in noise:
        _print(row, console)


def _print(row: Row, console: Console) -> None:
    console.print()
    console.print(Text.assemble((row.name, "bold"), "  ", (f"{row.op}, {row.phase}", "dim")))
    console.print(Padding(Text(row.what), (0, 0, 0, 4)))
    blame = str(getattr(row, "blame", "") or "")
    if blame:
        console.print(Padding(Text.assemble(("to blame: ", "dim"), blame), (0, 0, 0, 4)))
