"""``trueup align BASE CAND --recipe NAME``: the steps of a porting guide over two captures, up to the one that explains it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer


def align(
    baseline: Annotated[Path, typer.Argument(metavar="BASE", show_default=False, help="Capture of the trusted run.")],
    candidate: Annotated[
        Path, typer.Argument(metavar="CAND", show_default=False, help="Capture of the run under suspicion.")
    ],
    command: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer evaluates it on Python 3.10
        typer.Argument(metavar="-- COMMAND...", show_default=False, help="The candidate's training, to be run again if need be."),
    ] = None,
    recipe: Annotated[str, typer.Option(metavar="NAME|FILE", help="paddle, or a recipe file of your own.")] = "paddle",
    metric: Annotated[
        Optional[tuple[float, float]],  # noqa: UP045
        typer.Option(metavar="BASE CAND", show_default=False, help="What both trainings ended with: accuracy, or loss."),
    ] = None,
    mapping: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--map", metavar="FILE", show_default=False, help="Which scopes and operators are which, as for compare."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Make all steps, also after one that deviates.")] = False,
    base_command: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TEXT", show_default=False, help="The baseline's training in quotes, to be run again too."),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", show_default=False, help="Save the report there."),
    ] = None,
    json: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="Save align.json under this name."),
    ] = None,
) -> int:
    """Follow a recipe: flags and inputs, forward, backward, several steps, the final metric, in the recipe's order and numbers.

    Exit code 0: every step passes, 1: one deviates, 2: could not tell.
    """
    from trueup.analysis.recipes import follow
    from trueup.analysis.recipes.deeper import further
    from trueup.doors.cli.terminal import Terminal
    from trueup.doors.report.recipe_document import save, save_json
    from trueup.doors.report.recipe_terminal import render
    from trueup.doors.report.terminal import print_saved, print_written

    console = Terminal()
    found = follow(baseline, candidate, recipe, mapping=mapping, metric=metric, every=every)
    render(found, console)
    if command:
        inside = further(found, command, None if base_command is None else shlex.split(base_command), recipe, mapping)
        if inside is not None:
            found = inside
            console.print()
            render(found, console)
    if output is not None:
        print_saved(save(found, output), console)
    if json is not None:
        print_written(save_json(found, json), console)
    return found.exit_code
