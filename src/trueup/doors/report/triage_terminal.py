"""A triage on a terminal: a line a run while it works, then a line a step.

   1  as it is                       10 steps, loss 2.31 to 1.87                      3.1 s
float anomalies      pass      no NaN, Inf or saturated value in 10 steps
compiler and fusion  DEVIATES  with remapping off the loss of step 0 becomes 2.31418 instead of 2.41507, 4.2 % apart
whole network        not reached  compiler and fusion explains it; --all goes on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from trueup.doors.report.recipe_terminal import COLOURS
from trueup.foundation.words.wording import clean, counted, number, one_line, shorten

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.triage.found import Triage, Trial

NAME_WIDTH = 44


class Progress:
    """Prints runs as they are made."""

    def __init__(self, console: Console) -> None:
        self._console, self._count = console, 0

    def tell(self, trial: Trial) -> None:
        """Print one."""
        self._count += 1
        name = shorten(one_line(trial.name), NAME_WIDTH)
        line = f"{self._count:4}  {name:<{NAME_WIDTH}}  {trial.seconds:6.1f} s  {curve(trial)}"
        self._console.print(Text(line, "dim"), soft_wrap=True)


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
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for one in found.outcomes:
        said = clean(f"because {one.said}" if one.status == "could not tell" else one.said)
        grid.add_row(Text(one.name, "bold"), Text(one.status, COLOURS[one.status]), Text(said))
        for remark in one.remarks:
            grid.add_row("", "", Text(clean(remark), "dim"))
    console.print(grid)
    console.print()
    console.print(Text(clean(found.sentence)))
    first = found.explaining
    if first is not None and first.advice:
        console.print()
        what = "to run without it" if first.guilty else "look at it"
        console.print(Text.assemble(("next  ", "bold"), f"{what}:"))
        for line in first.advice:  # soft_wrap: what is to be copied must stay one line
            console.print(Text(f"      {one_line(line)}", "cyan"), soft_wrap=True)
