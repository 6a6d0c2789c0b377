"""``trueup checkpoint inspect|compare|repair``: what files of weights hold, how two differ, names brought back to the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trueup.doors.cli import loading
from trueup.doors.cli.options import File, Json, Word, save_as_json

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Checkpoints: what they hold, how two differ, names repaired.")

One = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A file, or a folder of DCP, Megatron or shards.")]
Part = Annotated[Word, typer.Option(metavar="NAME", help="A part, as inspect names it; without: the weights.")]
Limit = Annotated[int, typer.Option(metavar="N", min=1, help="How many tensors to list.")]


@app.command()
def inspect(checkpoint: One, limit: Limit = 20, json: Json = None) -> int:
    """Say what a checkpoint holds, without running anything in it. Exit code 0: it is whole; 2: it cannot be read."""
    with loading():
        from trueup.doors.report.checkpoint import inspected, render_inspected
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.checkpoint import open_checkpoint

    console = Terminal()
    found = open_checkpoint(checkpoint)
    render_inspected(found, limit, console)
    save_as_json(lambda: inspected(found), json, console)
    return 0


@app.command()
def compare(first: One, second: One, part: Part = None, limit: Limit = 20, json: Json = None) -> int:
    """Compare two checkpoints tensor by tensor, names without wrappers. Exit code 0: all alike; 1: not; 2: cannot be read."""
    with loading():
        from trueup.doors.report.checkpoint import render_compared
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.checkpoint import compare as run

    console = Terminal()
    found = run(first, second, part)
    render_compared(found, limit, console)
    save_as_json(found.document, json, console)
    return found.exit_code


@app.command()
def repair(
    checkpoint: One,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A new file, .safetensors.")],
    like: Annotated[
        File, typer.Option(metavar="CHECKPOINT", help="Of the model as it is: torch.save(model.state_dict(), ...).")
    ] = None,
    part: Part = None,
    limit: Limit = 20,
    json: Json = None,
) -> int:
    """Write the weights of a checkpoint, and nothing else of it, under the names of the model, and prove it.

    Exit code 0: read back bitwise, and a strict load passes; 1: a strict load would fail; 2: cannot be read or written, or
    there is no --like to prove it by.
    """
    with loading():
        from trueup.doors.report.checkpoint import render_repaired
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.checkpoint import repair as run

    console = Terminal()
    found = run(checkpoint, output, like=like, part=part)
    render_repaired(found, limit, console)
    save_as_json(found.document, json, console)
    return found.exit_code
