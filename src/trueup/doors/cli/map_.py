"""``trueup map BASE CAND -o map.toml``: propose which layer is which, of two captures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def map_(
    baseline: Annotated[Path, typer.Argument(metavar="BASE", show_default=False, help="Capture of the trusted run.")],
    candidate: Annotated[Path, typer.Argument(metavar="CAND", show_default=False, help="Capture of the other run.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the map goes.")] = Path("map.toml"),
) -> int:
    """Propose which layer of one model is which of another, of two frameworks or of one.

    Exit code 0: each layer with weights has a counterpart and none is unsure, 2: some want a look.
    """
    from trueup.analysis.pairing import map_file
    from trueup.analysis.pairing.captured import tree_of_capture
    from trueup.analysis.pairing.proposing import propose

    proposal = propose(tree_of_capture(baseline), tree_of_capture(candidate))
    typer.echo(str(proposal))
    typer.echo(f"map: {map_file.write(proposal, output)}")
    return 2 if proposal.unsure or proposal.only_baseline or proposal.only_candidate else 0
