"""``align.json``: what following a recipe gave, for a program. The comparison behind it is as in ``verdict.json``.

A recipe that was followed, on a terminal: a line a step, the way down to the module that differs, what to do next.

environment    pass      10 switches, versions and seeds are the same
inputs         pass      122 tensors that come into step 0: 122 bitwise equal
forward        DEVIATES  backbone.stem.0.conv, conv2d output.0: mean 0.438 and 0.45, 2.7 %, tensor 17 % off
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.analysis.recipes.following import named
from trueup.analysis.recipes.recipe import RecipeResult
from trueup.doors.report.document import document as verdict
from trueup.doors.report.document import fields, json_plain
from trueup.doors.report.saving import save as save_comparison
from trueup.doors.report.saving import save_json
from trueup.doors.report.terminal import labelled, print_next
from trueup.foundation.words.wording import clean, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.recipes.recipe import Rung


def document(found: RecipeResult) -> dict[str, Any]:
    """Return it as JSON-ready data."""
    what, commands = found.advice or ("", ())
    return {
        "schema": "trueup-align",
        "schema_version": 1,
        **fields(found, "recipe verdict exit_code"),
        "sentence": conclusion(found),
        "steps": json_plain(found.outcomes),
        "next": {"what": what, "commands": list(commands)} if found.advice else None,
        "comparison": verdict(found.result),
    }


def save(found: RecipeResult, directory: Path) -> Path:
    """Write ``index.html`` with the steps on top, ``align.json``, and what `saving.save` writes; raises TrueupError if it
    cannot."""
    save_comparison(found.result, directory, recipe=found)
    save_json(document(found), directory / "align.json")
    return directory


COLOURS = {"pass": "green", "DEVIATES": "bold red", "could not tell": "bold yellow", "not asked": "dim", "not reached": "dim"}


def render(found: RecipeResult, console: Console) -> None:
    """Print it."""
    widths = max(len(outcome.name) for outcome in found.outcomes), max(len(outcome.status) for outcome in found.outcomes)
    for outcome in found.outcomes:
        console.print(steps_table([outcome], *widths))
        if outcome.rungs:
            console.print(Padding(_ladder(outcome.rungs), (1, 0, 1, 2), expand=False))
        if outcome.status in ("DEVIATES", "could not tell") and outcome.limit:
            said = (("fails where", outcome.limit), ("after", one_line(outcome.origin)))
            dim = ((label, Text(text, "dim", overflow="fold")) for label, text in said)
            console.print(Padding(labelled(dim), (0, 0, 1, 2), expand=False))
    console.print()
    console.print(Text.assemble(conclusion(found)))
    if found.advice is not None:
        print_next(console, *found.advice)


def steps_table(outcomes: Iterable[Any], *widths: int) -> Table:
    """Lay steps out, of a recipe or a triage: name, status, what was said, and remarks below; ``widths`` of the first columns."""
    grid = Table.grid(padding=(0, 2))
    for width in widths or (None, None):
        grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    for one in outcomes:
        said = f"because {one.said}" if one.status == "could not tell" else one.said
        grid.add_row(Text(one_line(one.name), "bold"), Text(one.status, COLOURS[one.status]), Text(clean(said)))
        for remark in one.remarks:
            grid.add_row("", "", Text(clean(remark), "dim"))
    return grid


def conclusion(found: RecipeResult) -> str:
    """Say in a sentence what became of the recipe."""
    first = found.deviating
    if first is not None:
        place = named(found.result) if first.check != "environment" else ""
        return f"DEVIATES by recipe {one_line(found.recipe)}, at: {one_line(first.name)}{'; it starts at ' if place else ''}{place}"
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
