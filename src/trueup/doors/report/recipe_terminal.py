"""A recipe that was followed, on a terminal: a line a step, the way down to the module that differs, what to do next.

environment    pass      10 switches, versions and seeds are the same
inputs         pass      122 tensors that come into step 0: 122 bitwise equal
forward        DEVIATES  backbone.stem.0.conv, conv2d output.0: mean 0.438 and 0.45, 2.7 %, tensor 17 % off
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.foundation.words.wording import clean, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.recipes.found import Outcome, RecipeResult, Rung

COLOURS = {"pass": "green", "DEVIATES": "bold red", "could not tell": "bold yellow", "not asked": "dim", "not reached": "dim"}


def render(found: RecipeResult, console: Console) -> None:
    """Print it."""
    width = max(len(outcome.name) for outcome in found.outcomes)
    status = max(len(outcome.status) for outcome in found.outcomes)
    for outcome in found.outcomes:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=width, no_wrap=True)
        grid.add_column(width=status, no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(one_line(outcome.name), "bold"), Text(outcome.status, COLOURS[outcome.status]), Text(_said(outcome)))
        for remark in outcome.remarks:
            grid.add_row("", "", Text(clean(remark), "dim"))
        console.print(grid)
        if outcome.rungs:
            console.print(Padding(_ladder(outcome.rungs), (1, 0, 1, 2)))
        if outcome.status in ("DEVIATES", "could not tell") and outcome.limit:
            _numbers(outcome, console)
    console.print()
    console.print(Text.assemble(conclusion(found)))
    if found.advice is not None:
        what, commands = found.advice
        console.print()
        console.print(Text.assemble(("next  ", "bold"), f"{what}{':' if commands else ''}"))
        for command in commands:  # soft_wrap: a command must stay one line, or it cannot be copied
            console.print(Text(" " * 6 + command, "cyan"), soft_wrap=True)


def conclusion(found: RecipeResult) -> str:
    """Say in a sentence what became of the recipe."""
    first = found.deviating
    if first is not None:
        return f"DEVIATES by recipe {one_line(found.recipe)}, at: {one_line(first.name)}"
    recipe = f"recipe {one_line(found.recipe)}"
    if found.verdict == "aligned":
        made = [outcome.name for outcome in found.outcomes if outcome.status == "pass"]
        return f"ALIGNED by the numbers of {recipe}: {one_line(', '.join(made))}"
    unknown = next((outcome for outcome in found.outcomes if outcome.status not in ("pass", "not asked")), None)
    if found.verdict == "deviates":
        return f"DEVIATES by more than rounding, within the numbers of {recipe}: {one_line(found.result.sentence.splitlines()[0])}"
    if unknown is not None:
        return f"COULD NOT TELL by {recipe}, at: {one_line(unknown.name)}"
    return f"COULD NOT TELL, though each step of {recipe} passes: {one_line(found.result.sentence.splitlines()[0])}"


def _said(outcome: Outcome) -> str:
    return clean(f"because {outcome.said}" if outcome.status == "could not tell" else outcome.said)


def _ladder(rungs: tuple[Rung, ...]) -> Table:
    """The modules of each floor up to the one that differs, one floor further in than the one before."""
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for rung in rungs:
        name, status = Text("  " * rung.depth + one_line(rung.name)), Text(rung.status, COLOURS[rung.status])
        table.add_row(name, status, Text(rung.said, "dim"))
    return table


def _numbers(outcome: Outcome, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text("fails where", "dim"), Text(outcome.limit, "dim"))
    grid.add_row(Text("after", "dim"), Text(one_line(outcome.origin), "dim"))
    console.print(Padding(grid, (0, 0, 1, 2)))
