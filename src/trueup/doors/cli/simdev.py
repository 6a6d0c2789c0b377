"""``trueup simdev list``: what the simulated accelerator can get wrong, and what it may legitimately do differently."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import typer
from rich.padding import Padding
from rich.text import Text

from trueup.foundation.words.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.simdev.tables import Row

app = typer.Typer(
    name="simdev",
    help="The simulated accelerator: a device `npu` on the CPU, with faults and noise to switch on.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def simdev() -> None:
    """Keep ``list`` a command of its own, however few there are."""


@app.command("list")
def list_table() -> None:
    """List the faults and the noise of the simulated accelerator."""
    from trueup.doors.report.terminal import Terminal
    from trueup.simdev import FAULTS, NOISE

    render_catalogue(FAULTS.values(), NOISE.values(), Terminal())


def render_catalogue(faults: Collection[Row], noise: Collection[Row], console: Console) -> None:
    """Print all rows: name, operator and phase; what happens; what is to blame."""
    console.print(Text(f"{counted(len(faults), 'fault')}: the comparison must name them", "bold"))
    for row in faults:
        _print(row, console)
    console.print()
    console.print(Text(f"{counted(len(noise), 'kind')} of noise: legitimate differences that it must not blame", "bold"))
    for row in noise:
        _print(row, console)


def _print(row: Row, console: Console) -> None:
    console.print()
    console.print(Text.assemble((row.name, "bold"), "  ", (f"{row.op}, {row.phase}", "dim")))
    console.print(Padding(Text(row.what), (0, 0, 0, 4)))
    console.print(Padding(Text.assemble(("to blame: ", "dim"), row.blame), (0, 0, 0, 4)))
