"""``trueup simdev run -- COMMAND``: a command with the simulated accelerator. ``trueup simdev list``: what that can get wrong, and
what it may legitimately do differently."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from trueup.doors.cli.options import Command as Shared
from trueup.doors.cli.options import Following, required
from trueup.foundation.words.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.simdev.tables import Row

simdev = typer.Typer(
    name="simdev",
    help="The simulated accelerator: a device `npu` on the CPU, with faults and noise to switch on.",
    no_args_is_help=True,
    add_completion=False,
)


@simdev.command(
    "run", cls=Shared, context_settings={"allow_interspersed_args": False}, epilog="Example: trueup simdev run -- python train.py"
)
def run_command(
    command: Following = None,
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="How many devices there are.")] = 1,
) -> int:
    """Run a command with a device `npu` in PyTorch and in Paddle, where it is built the first time; in TensorFlow `npu_device` and
    `npu_bridge` find it. TRUEUP_SIMULATED=1 before `python` reaches PyTorch alone. The exit code is the command's."""
    from trueup.recording.recorder.launch import program, run_to_the_end, search_path

    words = required(command, "run", "simdev run")
    given = {"TRUEUP_SIMULATED": "1", "TRUEUP_SIMULATED_DEVICES": str(devices), "PYTHONPATH": search_path(os.environ)}
    return run_to_the_end([program(words[0]), *words[1:]], {**os.environ, **given}, None, None)


@simdev.command("list", cls=Shared, epilog="Example: trueup simdev list")
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
    console.print(Padding(Text(row.what), (0, 0, 0, 4), expand=False))
    console.print(Padding(Text.assemble(("to blame: ", "dim"), row.blame), (0, 0, 0, 4), expand=False))
