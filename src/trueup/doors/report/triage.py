"""``triage.json`` and the page beside it: what a triage found, for a program and for a reader. Meaning: docs/triage.md.

A triage on a terminal: a line a run while it works, then a line a step.

   1  as it is                       10 steps, loss 2.31 to 1.87                      3.1 s
float anomalies      pass      no NaN, Inf or saturated value in 10 steps
compiler and fusion  DEVIATES  with remapping off the loss of step 0 becomes 2.31418 instead of 2.41507, 4.2 % apart
whole network        not reached  compiler and fusion explains it; --all goes on
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from trueup.doors.report.document import document as verdict
from trueup.doors.report.document import dumps, fields, headed, json_plain
from trueup.doors.report.html import ours, page
from trueup.doors.report.recipe import steps_table
from trueup.doors.report.saving import write_text
from trueup.doors.report.terminal import print_next, progress
from trueup.foundation.words.answers import Answers, answers
from trueup.foundation.words.wording import clean, counted, number

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.triage.running import Triage, Trial


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
