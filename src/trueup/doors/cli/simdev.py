"""``trueup simdev list``: what the simulated accelerator can get wrong, and what it may legitimately do differently."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="The simulated accelerator: a device `npu` on the CPU, with faults and noise to switch on.",
    no_args_is_help=True,
)


@app.callback()
def simdev() -> None:
    """Keep ``list`` a command of its own, however few there are."""


@app.command("list")
def list_table() -> None:
    """List the faults and the noise of the simulated accelerator."""
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.catalogue import render_catalogue
    from trueup.simdev import FAULTS, NOISE

    render_catalogue(FAULTS.values(), NOISE.values(), Terminal())
