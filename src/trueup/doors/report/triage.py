"""What was found in steps, for a program and for a reader: a recipe that was followed (``align.json``; the comparison behind it is
as in ``verdict.json``), and a triage (``triage.json`` and the page beside it; meaning: docs/triage.md).

On a terminal a line a step, the way down to the module that differs, what to do next:

environment    pass      10 switches, versions and seeds are the same
inputs         pass      122 tensors that come into step 0: 122 bitwise equal
forward        DEVIATES  backbone.stem.0.conv, conv2d output.0: mean 0.438 and 0.45, 2.7 %, tensor 17 % off

A triage also has a line a run while it works:

   1  as it is                       10 steps, loss 2.31 to 1.87                      3.1 s
float anomalies      pass      no NaN, Inf or saturated value in 10 steps
compiler and fusion  DEVIATES  with remapping off the loss of step 0 becomes 2.31418 instead of 2.41507, 4.2 % apart
whole network        not reached  compiler and fusion explains it; --all goes on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.analysis.recipes.following import named
from trueup.analysis.recipes.recipe import RecipeResult
from trueup.doors.report.document import document as verdict
from trueup.doors.report.document import dumps, fields, headed, json_plain
from trueup.doors.report.html import ours, page
from trueup.doors.report.saving import save as save_comparison
from trueup.doors.report.saving import save_json, write_text
from trueup.doors.report.terminal import labelled, print_next, progress
from trueup.foundation.words.answers import Answers, answers
from trueup.foundation.words.wording import clean, counted, number, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.recipes.recipe import Rung
    from trueup.analysis.triage.running import Triage, Trial


def recipe_document(found: RecipeResult) -> dict[str, Any]:
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


def save_recipe(found: RecipeResult, directory: Path) -> Path:
    """Write ``index.html`` with the steps on top, ``align.json``, and what `saving.save` writes; raises TrueupError if it
    cannot."""
    save_comparison(found.result, directory, recipe=found)
    save_json(recipe_document(found), directory / "align.json")
    return directory


COLOURS = {"pass": "green", "DEVIATES": "bold red", "could not tell": "bold yellow", "not asked": "dim", "not reached": "dim"}


def render_recipe(found: RecipeResult, console: Console) -> None:
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


def document(found: Triage) -> dict[str, Any]:
    """Return it as JSON-ready data."""
    return headed("trueup-triage", found, "command framework baseline") | {
        "steps": [
            fields(one, "name status said page remarks guilty advice")
            | {"comparison": None if one.result is None else verdict(one.result)}
            for one in found.outcomes
        ],
        "runs": [_trial(one) for one in found.trials],
    }


def _trial(one: Trial) -> dict[str, Any]:
    return {
        "name": one.name, "off": list(one.off), "directory": str(one.directory), "seconds": round(one.seconds, 3),
        "failed": one.failed or None, "losses": json_plain(one.losses),
        "remarks": list(one.remarks),
    }  # fmt: skip


def _answers(found: Triage) -> Answers:
    """Say what it is first: what the comparison of the step that explains it says, else what that step says."""
    head, first = found.verdict.upper(), found.explaining
    if first is None:
        return Answers(head, found.sentence.removeprefix(head).lstrip(" ,"), ())
    if first.result is None:
        return Answers(head, first.said, (("found by", (first.name,)), *((("note", first.remarks),) if first.remarks else ())))
    told = answers(first.result)
    rows = [row for row in told.rows if row[0] in ("place", "size", "certainty", "dtype")]
    return Answers(head, told.cause, (("found by", (first.name,)), *rows))


def render_page(found: Triage) -> str:
    """Return the text of index.html."""
    return page(
        "triage.html.j2",
        [ours("page.js")],
        found=found,
        tone={"explained": "deviates", "could not tell": "inconclusive"}.get(found.verdict, "aligned"),
        said=_answers(found),
        steps=sorted({step for one in found.trials for step in one.losses}),
        trials=[(one, curve(one), one.directory.name) for one in found.trials],
    )


def save(found: Triage) -> Path:
    """Write ``index.html`` and ``triage.json`` into the folder of the triage; raises TrueupError if they cannot be written."""
    for name, content in (("triage.json", dumps(document(found))), ("index.html", render_page(found))):
        write_text(content, found.directory / name, "a directory that can be written")
    return found.directory


NAME_WIDTH = 44


def trials_progress(console: Console) -> Callable[[Trial], None]:
    """Return what prints runs as they are made."""
    print_run = progress(console, NAME_WIDTH)
    return lambda trial: print_run(trial.name, trial.seconds, (curve(trial), "dim"))


def curve(trial: Trial) -> str:
    """Say in short what a run gave."""
    if trial.failed:
        return clean(trial.failed)
    if not trial.losses:
        return ""
    first, last = trial.losses[min(trial.losses)], trial.losses[max(trial.losses)]
    return f"{counted(len(trial.losses), 'step')}, loss {number(first, 6)} to {number(last, 6)}"


def render(found: Triage, console: Console) -> None:
    """Print it."""
    console.print()
    console.print(steps_table(found.outcomes))
    console.print()
    console.print(Text(clean(found.sentence)))
    first = found.explaining
    if first is not None and first.advice:
        print_next(console, "to run without it" if first.guilty else "look at it", first.advice)
