"""What `trueup checkpoint` found, on a terminal.

12 tensors written and read back bitwise, 12 under a new name; names and shapes are those of model.pt: a strict load passes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trueup.doors.report.terminal import labelled, listing, print_lines, print_more_by_limit, print_next
from trueup.foundation.words.wording import counted, sci

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.checkpoint import Checkpoint, Comparison, Repair


def sentence(found: Checkpoint) -> str:
    """Say what a checkpoint holds."""
    tensors = [one for part in found.parts.values() for one in part.values()]
    size = sum(one.nbytes for one in tensors)
    parts = [f"{name or 'weights'} {len(part):,}" for name, part in found.parts.items()]
    return f"{found.path} ({found.kind}): {counted(len(tensors), 'tensor')}, {size / 1e6:,.1f} MB: {', '.join(parts)}."


def inspected(found: Checkpoint) -> dict[str, object]:
    """Return what a checkpoint holds as JSON-ready data."""
    parts = {
        part: {name: {"dtype": one.dtype, "shape": list(one.shape)} for name, one in tensors.items()}
        for part, tensors in found.parts.items()
    }
    head = {"schema": "trueup-checkpoint", "schema_version": 1, "sentence": sentence(found), "kind": found.kind}
    return {
        **head,
        "parts": parts,
        "values": found.values,
        "foreign": list(found.foreign),
        "notes": found.notes,
        "wrapped": wrapped(found),
    }


def wrapped(found: Checkpoint) -> int:
    """Return how many names have what a wrapper added."""
    from trueup.migration.checkpoint import unwrapped

    return sum(name != new for part in found.parts.values() for name, new in unwrapped(part).items())


def render_inspected(found: Checkpoint, limit: int, console: Console) -> None:
    """Print what a checkpoint holds: each part with its first tensors, and what else is in it."""
    print_lines(console, [sentence(found)], 0, "bold")
    count = wrapped(found)
    if count:
        have = "has" if count == 1 else "have"
        print_lines(console, [f"{counted(count, 'name')} {have} what a wrapper added: trueup checkpoint repair takes it off."], 0)
    for name, part in found.parts.items():
        rows = [(one, tensor.dtype, str(list(tensor.shape))) for one, tensor in part.items()]
        listing(console, (name or "weights", "dtype", "shape"), rows, limit)
    if found.values:
        console.print()
        console.print(labelled(list(found.values.items())[:limit]))
        print_more_by_limit(console, len(found.values), limit)
    for note in found.notes:
        console.print()
        print_lines(console, [note], 0, "dim")


def render_compared(found: Comparison, limit: int, console: Console) -> None:
    """Print the conclusion, the tensors that differ, and the names that one side has."""
    print_lines(console, [found.sentence], 0, "bold")
    rows = []
    for one in sorted(found.differences, key=lambda one: float("-inf") if math.isnan(one.relative) else -one.relative):
        numbers = ("", "") if math.isnan(one.relative) else (sci(one.relative), sci(one.largest))
        rows.append((one.name, one.first, one.second, *numbers, one.reason))
    listing(console, ("tensor", "first", "second", "rel. L2", "largest", ""), rows, limit)
    for names, side in zip(found.only, (found.first, found.second), strict=True):
        _names(f"only in {side}", names, limit, console)
    if all(found.only):
        command = f"trueup checkpoint repair {shlex.quote(found.second)} --like {shlex.quote(found.first)} -o fixed.safetensors"
        print_next(console, "names that only differ are put right by", [command])


def render_repaired(found: Repair, limit: int, console: Console) -> None:
    """Print the conclusion, the new names, and what a strict load would miss."""
    print_lines(console, [found.sentence], 0, "bold")
    listing(console, ("name", "as"), found.renamed, limit)
    _names("missing", found.missing, limit, console)
    _names("unexpected", found.unexpected, limit, console)
    _names("another shape", [f"{name}: {here}, wanted {there}" for name, here, there in found.shapes], limit, console)
    rows = [row for row in (("left out", ", ".join(found.left)), *(("note", note) for note in found.notes)) if row[1]]
    if rows:
        console.print()
        console.print(labelled(rows))


def _names(title: str, names: Sequence[str], limit: int, console: Console) -> None:
    listing(console, (title,), [(name,) for name in names], limit)
