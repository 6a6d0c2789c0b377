"""What is known of a machine and of its logs, on a terminal.

`trueup explain-log`: the first error, what to do, and which lines only follow from it.

    FOUND  rank 2, train.log:8812, 10:03:11: The memory of the GPU does not suffice.

    line   torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
    next   See whether another process holds it; then a smaller batch.

`trueup env`: a sentence, what does not go together, then the variables that are set.

    ASCEND_LAUNCH_BLOCKING=1 is for debugging: it waits for each operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trueup.doors.report.terminal import entry, labelled, listing, print_lines
from trueup.foundation.words.setting_sentence import value
from trueup.foundation.words.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.knowledge import Explanation, Operators
    from trueup.migration.knowledge.environment import Environments, Machine
    from trueup.migration.knowledge.explaining import Sighting
    from trueup.migration.knowledge.known import Row

NAMES = {"op": "operator"}
LATE = "The operator and the line that Python names are those that waited, and need not be those that failed."

UNKNOWN = (
    "Give the logs of all ranks and the device's host log: an earlier line may say why. Else search these words in the issues of "
    "the library that raised them."
)


def render_explanation(found: Explanation, limit: int, console: Console) -> None:
    """Print the conclusion, the row of the first error, and up to ``limit`` of each other kind of line."""
    print_lines(console, [f"{found.verdict}  {found.sentence}"], 0, "bold")
    if found.first is not None:
        console.print()
        console.print(labelled(_particulars(found.first)))
        for row in found.near:
            entry(console, f"near: {row.id}", [("line", row.hit[0]), ("why", row.cause), ("next", row.remedy)])
    _table(console, "follows from it", found.echoes, limit)
    _table(console, "other errors", found.others, limit)
    _table(console, "no row knows", [one for one in found.unknown if one is not found.first], limit)
    _table(console, "to ignore", found.notes, limit)
    if found.remarks:
        console.print()
        print_lines(console, found.remarks, 0, "dim")


def _particulars(first: Sighting) -> list[tuple[str, str]]:
    rows = [("line", first.text)]
    if first.source:
        rows.append(("code", first.source))
    if first.names:
        rows.append(("names", ", ".join(f"{NAMES.get(name, name)} {value}" for name, value in first.names.items())))
    return rows + (_row(first.row) if first.row is not None else [("next", UNKNOWN)])


def _row(row: Row) -> list[tuple[str, str]]:
    """Return what a row says, each part with a label."""
    said = [
        ("row", row.id), ("why", row.cause if row.role == "echo" else ""), ("late", LATE if row.late else ""), ("look", row.probe),
        ("next", row.remedy), ("check", row.check), ("guide", row.corrects), ("of", row.versions or ""), ("from", row.origin or ""),
    ]  # fmt: skip
    return [(label, text) for label, text in said if text]


def _table(console: Console, title: str, some: Sequence[Sighting], limit: int) -> None:
    rows = [
        (one.row.id if one.row else one.text[:60], f"{one.count:,}", "" if one.rank is None else str(one.rank), _where(one))
        for one in some
    ]
    listing(console, (title, "lines", "rank", "first"), rows, limit)


def _where(one: Sighting) -> str:
    return f"{one.log}:{one.line}" + (f", {one.time}" if one.time else "")


def render_operators(found: Operators, limit: int, console: Console) -> None:
    """Print the conclusion and up to ``limit`` operators, those that were compiled late first."""
    print_lines(console, [found.sentence], 0, "bold")
    if not found.operators:
        return
    rows = [
        (f"{one.type} (moves)" if one.moves else one.type, one.parameters, f"{one.asked:,}", f"{one.compiled:,}", f"{one.late:,}",
         f"{one.first} to {one.last}" if found.steps else "")
        for one in found.operators
    ]  # fmt: skip
    listing(console, ("operator", "parameters", "asked", "compiled", "after step 1", "steps"), rows, limit)
    moved = sum(one.asked for one in found.operators if one.moves)
    if moved:
        which = ", ".join(sorted({one.type for one in found.operators if one.moves}))
        print_lines(console, [f"{counted(moved, 'call')} only copy or change a format: {which}."], 0)
    if found.exit_code == 1:
        print_lines(console, ["next: fix the shapes or attributes that change from step to step, as the parameters above show."], 0)
    if found.left_out:
        print_lines(console, [f"{counted(found.left_out, 'call')} of further parameters were left out."], 0, "dim")


NUMBERS = {"changes": "change", "may": "may change", "cannot": "stay"}


def render_environments(found: Environments, limit: int, console: Console) -> None:
    """Print the conclusion; of two machines what differs, of one its variables; conflicts and advice of each."""
    print_lines(console, [found.sentence], 0, "bold")
    if len(found.machines) == 2:
        differing = [(one.name, value(one.baseline), value(one.candidate), NUMBERS[one.severity]) for one in found.differences]
        listing(console, ("variable or version", "first", "second", "numbers"), differing, limit)
    else:
        variables = [(one.name, one.value, one.default, NUMBERS[one.severity], one.means) for one in found.machines[0].variables]
        listing(console, ("variable", "value", "default", "numbers", "meaning"), variables, limit)
    for machine in found.machines:
        _remarks(machine, console, named=len(found.machines) == 2)


def _remarks(machine: Machine, console: Console, *, named: bool) -> None:
    place = f" ({machine.where})" if named else ""
    for conflict in machine.conflicts:
        entry(console, f"conflict: {', '.join(conflict.names)}{place}", [("why", conflict.says), ("from", conflict.origin)])
    for one in machine.advice:
        entry(console, f"advice: {one.what}{place}", [("got", f"{one.got} ({one.where})"), ("next", one.remedy)])
