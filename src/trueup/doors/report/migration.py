"""What is known of a machine, its logs and its files, on a terminal: a sentence, then what proves it.

`trueup explain-log`: the first error, what to do, and which lines only follow from it.

    FOUND  rank 2, train.log:8812, 10:03:11: The memory of the GPU does not suffice.

    line   torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
    next   See whether another process holds it; then a smaller batch.

`trueup env`: what does not go together, then the variables that are set.

    ASCEND_LAUNCH_BLOCKING=1 is for debugging: it waits for each operator.

`trueup profile`: where a step's time goes, the classes with their shares, and what to do about the first; also as a page.

    62 % of a step is host: the step waits for its data; most in enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__.

    class  share  most in                     calls  line
    host    62 %  enumerate(DataLoader)#_...      5  train.py:31

`trueup export`: how it was made and checked. `trueup checkpoint`: what files of weights hold, and how they differ.

    net.onnx computes what the model does, node by node: 3 inputs, batch sizes 2, 1, 3, largest error 1.2e-7.

    12 tensors written and read back bitwise, 12 under a new name; names and shapes are those of model.pt: a strict load passes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trueup.doors.report.terminal import entry, labelled, listing, print_lines, print_more_by_limit, print_next
from trueup.foundation.words.setup_sentence import value
from trueup.foundation.words.wording import clean, counted, sci, shorten

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.checkpoint import Checkpoint, Comparison, Repair
    from trueup.migration.export import Exported
    from trueup.migration.knowledge import Explanation, Operators
    from trueup.migration.knowledge.environment import Environments, Machine
    from trueup.migration.knowledge.explaining import Sighting
    from trueup.migration.knowledge.logs import Row
    from trueup.migration.profile.judging import Compared, Profile

NAMES = {"op": "operator"}
LATE = "The operator and the line that Python names are those that waited, and need not be those that failed."

UNKNOWN = (
    "Give the logs of all ranks and the device's host log: an earlier line may say why. Else search these words in the issues of "
    "the library that raised them."
)

DIFFERING = 5  # nodes of an export that are listed

SHOWN = 0.005  # share of a step from which a part is listed
LISTED = 3  # parts listed of each class
COLOURS = {
    "operator": "#2e8b57", "copy and format": "#d98200", "framework": "#8a6fd1", "compile": "#c2185b", "host": "#c0392b",
    "communication": "#1976d2",
}  # fmt: skip
TONES = {0: "aligned", 1: "deviates", 2: "inconclusive"}


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


def render_exported(found: Exported, console: Console) -> None:
    """Print the conclusion, what was chosen, the error of each run, and what ATC would not take."""
    print_lines(console, [found.sentence], 0, "bold")
    console.print()
    runs = ", ".join(f"batch {run.batch}: {sci(run.error)}" for run in found.runs)
    rows = [("chosen", clean(found.chosen)), ("file", f"opset {found.opset}, {found.nodes:,} nodes"), ("errors", runs)]
    rows.append(("judged", _judged(found)))
    rows += [("differs", f"{node.name}, {node.op}: {node.why or '; '.join(node.settings)}") for node in found.differ[:DIFFERING]]
    console.print(labelled([*rows, *(("atc", one) for one in found.atc)]))


def _judged(found: Exported) -> str:
    if found.coarse or found.unjudged:
        return found.unjudged or "the outputs alone: the nodes bear no names that torch.onnx gives with dynamo"
    return f"{counted(found.judged, 'value')}, each made of the framework's values before it, by the rounding of its operators"


def render_profile(found: Profile, limit: int, console: Console) -> None:
    """Print the conclusion, the parts of each class up to ``limit``, and sign and remedy of what slows the steps down."""
    from trueup.migration.profile.reading import remedy, sign

    print_lines(console, [found.sentence], 0, "bold")
    rows = []
    for kind, share in found.shares.items():
        for place, part in enumerate(one for one in found.of(kind)[:LISTED] if found.share(one) >= SHOWN):
            rows.append((
                *((kind, _share(share)) if not place else ("", "")), shorten(clean(part.name), 60), _share(found.share(part)),
                f"{part.calls:,}", ", ".join(map(clean, part.lines)),
            ))  # fmt: skip
    listing(console, ("class", "share", "most in", "share", "calls", "lines"), rows, limit)
    slow, why = found.finding, [("why", clean(text)) for text in found.compiled[:LISTED]]
    if slow is not None:
        console.print()
        variant = found.variant(slow.kind)
        console.print(labelled([("sign", sign(slow.kind, variant)), *why, ("next", remedy(slow.kind, variant))]))
    elif why:
        console.print()
        console.print(labelled(why))
    remarks = [*found.remarks, *([f"Unreliable: {found.unreliable}."] if found.unreliable and not found.doubtful else [])]
    if remarks:
        console.print()
        print_lines(console, remarks, 0, "dim")


def render_steps_compared(found: Compared, limit: int, console: Console) -> None:
    """Print how much slower a step is, and up to ``limit`` changes that matter."""
    from trueup.migration.profile.reading import remedy

    print_lines(console, [found.sentence], 0, "bold")
    rows = [
        (kind, shorten(clean(name), 60), f"{before / 1e3:,.3f}", f"{after / 1e3:,.3f}", f"{(after - before) / 1e3:+,.3f}")
        for kind, name, before, after in _changes(found)
    ]
    listing(console, ("class", "name", "ms before", "ms now", "change"), rows, limit)
    if found.exit_code == 1:
        kind = found.changes[0][0]
        console.print()
        console.print(labelled([("next", remedy(kind, found.candidate.variant(kind)))]))


def _changes(found: Compared) -> list[tuple[str, str, float, float]]:
    """Return the changes that matter, the largest first."""
    least = SHOWN * max(found.before, found.after)
    some = (one for one in found.changes if abs(one[3] - one[2]) >= least)
    return sorted(some, key=lambda one: -abs(one[3] - one[2]))


def profile_page(found: Profile, compared: Compared | None = None) -> str:
    """Return the text of a page with the conclusion, one step as lanes, and the parts of each class; with ``compared`` of both
    traces, and what changed."""
    from trueup.doors.report.html import ours, page  # here: what is said on a terminal needs no page
    from trueup.migration.profile.reading import remedy

    slow = found.finding.kind if found.finding else ""
    if compared is not None:
        slow = compared.changes[0][0] if compared.exit_code == 1 else ""
    classes = [(kind, share, found.of(kind)[:20]) for kind, share in found.shares.items()]
    shown = [("before", compared.baseline), ("now", found)] if compared else [("", found)]
    sides = [(name, one.lanes, one.window / max(one.steps, 1) / 1e3) for name, one in shown if one.lanes]
    return page(
        "profile.html.j2", [ours("page.js")], found=found, compared=compared, tone=TONES[(compared or found).exit_code],
        colours=COLOURS, sides=sides, changes=_changes(compared) if compared else [],
        remedy="" if not slow else remedy(slow, found.variant(slow)), classes=classes,
        shown={bar.kind for _, lanes, _ in sides for lane in lanes for bar in lane.bars},
        remarks=[*found.compiled, *found.remarks, *([f"Unreliable: {found.unreliable}."] if found.unreliable else [])],
    )  # fmt: skip


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


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
