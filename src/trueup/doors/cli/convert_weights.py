"""``trueup convert-weights IN OUT --map map.toml --to paddle``: weights of one framework as those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert_weights(
    source: Annotated[
        Path, typer.Argument(metavar="IN", show_default=False, help="Weights: .safetensors, .npz, .pt, .pth, .bin or .pdparams.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="New file, .safetensors or .npz.")],
    mapping: Annotated[Path, typer.Option("--map", metavar="FILE", help="Which layer is which, as `trueup map` writes it.")],
    to: Annotated[str, typer.Option(metavar="FRAMEWORK", help="torch or paddle.")],
    partly: Annotated[bool, typer.Option("--partly", help="Write what can be converted, although something cannot.")] = False,
) -> int:
    """Convert a model's weights: uses layer classes, never guesses from shapes.

    Exit code 0: all were converted, 2: some were not, and are named.
    """
    from trueup.analysis.pairing import state_files
    from trueup.analysis.pairing.converting import convert_state
    from trueup.comparison.normalise.mapping import load

    found = convert_state(state_files.read(source), load(mapping), to)
    typer.echo(str(found))
    if found.is_whole or partly:
        typer.echo(f"weights: {state_files.write(found.state, target)}")
    else:
        typer.echo("nothing was written: correct the map, or pass --partly", err=True)
    return 0 if found.is_whole else 2
