"""What `trueup env` found, on a terminal: a sentence, what does not go together, then the variables that are set.

ASCEND_LAUNCH_BLOCKING=1 is for debugging: it waits for each operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from trueup.doors.report.terminal import labelled, plain_table, print_lines, print_more
from trueup.foundation.words.setting_sentence import value

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.knowledge.environment import Environments, Machine

NUMBERS = {"changes": "change", "may": "may change", "cannot": "stay"}


def render(found: Environments, limit: int, console: Console) -> None:
    """Print the conclusion; of two machines what differs, of one its variables; conflicts and advice of each."""
    print_lines(console, [found.sentence], 0, "bold")
    if len(found.machines) == 2:
        table = plain_table("variable or version", "first", "second", "numbers")
        for one in found.differences[:limit]:
            table.add_row(escape(one.name), escape(value(one.baseline)), escape(value(one.candidate)), NUMBERS[one.severity])
        if found.differences:
            console.print()
            console.print(table)
        print_more(console, len(found.differences) - limit, f" (--limit {len(found.differences)} shows all)")
    else:
        _variables(found.machines[0], limit, console)
    for machine in found.machines:
        _remarks(machine, console, named=len(found.machines) == 2)


def _variables(machine: Machine, limit: int, console: Console) -> None:
    if not machine.variables:
        return
    table = plain_table("variable", "value", "numbers", "meaning")
    for one in machine.variables[:limit]:
        table.add_row(escape(one.name), escape(one.value), NUMBERS[one.severity], escape(one.means))
    console.print()
    console.print(table)
    print_more(console, len(machine.variables) - limit, f" (--limit {len(machine.variables)} shows all)")


def _remarks(machine: Machine, console: Console, *, named: bool) -> None:
    place = f" ({machine.where})" if named else ""
    for conflict in machine.conflicts:
        console.print()
        print_lines(console, [f"conflict: {', '.join(conflict.names)}{place}"], 0, "bold")
        console.print(labelled([("why", conflict.says), ("from", conflict.origin)]))
    for one in machine.advice:
        console.print()
        print_lines(console, [f"advice: {one.what}{place}"], 0, "bold")
        console.print(labelled([("got", f"{one.got} ({one.where})"), ("next", one.remedy)]))
