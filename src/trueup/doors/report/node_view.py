"""One call of a run with what stands around it, and its counterpart in another run.

A call in the middle of its run: what it got and gave on both sides, who made its inputs, who reads its outputs.

head/torch.nn.functional.linear#0  forward, step 0, rank 0, api
  baseline   seq 41 of runs/cpu
  candidate  seq 41 of runs/npu
  compared   deviates, culprit: rel. L2 in 0, out 2.1e-1
  your code  train.py:57 in forward

  slot                        min  max  mean  l2  rel. L2
  ...
  reads    input.0   seq 38  encoder/torch.tanh#0  output.0
  read by  output.0  seq 44  torch.nn.functional.cross_entropy#0  input.0
  before   seq 40  ...

The elements of a tensor as rows of numbers, on a terminal and as text: precision_tool's ``pt``.

Calls whose outputs point elsewhere than the baseline's, each in a panel, as precision_tool's ``vcs`` lists them.

╭─ 1  head  tf.raw_ops.MatMul#0  backward, step 0 ───────────────────╮
│ baseline  seq 41        candidate  seq 41                          │
│ input     input.0 1.000000   input.1 0.999999                      │
│ output    output.0 0.412310  max |d| 2.1e-1                        │
╰────────────────────────────────────────────────────────────────────╯
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trueup.analysis.selecting import Call, Selection, find_call
from trueup.comparison.result.cosines import Dissimilar, Listing, SlotCosine
from trueup.comparison.result.evidence import Link, Surroundings
from trueup.doors.report.capture_view import Operand, print_calls, record_of, recorded, source_of
from trueup.doors.report.diff import TensorDiff, compare_tensors
from trueup.doors.report.result_view import slot_row
from trueup.doors.report.saving import replaced
from trueup.doors.report.terminal import labelled, slot_table
from trueup.foundation.kernels.metrics import Tolerance
from trueup.foundation.model import SlotComparison, TrueupError
from trueup.foundation.words.wording import call_name, clean, counted, number, one_line, sci, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from trueup.foundation.store import Capture

ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Node:
    """A call and the capture that holds it."""

    capture: Capture
    call: Call

    def operand(self, slot: str) -> Operand:
        """Return a slot as a side of a comparison of tensors; raises TrueupError if it is not there, or cannot be read."""
        return recorded(self.capture, self.capture.path, self.call, record_of(self.call, slot))


def named_alike(node: Node, other: Capture) -> Node | None:
    """Return the call of another capture that has the same name, None where that holds none."""
    call = node.call
    chosen = Selection(other.path, phase=call.phase, step=call.step, rank=call.rank, level=call.level)
    rows = other.records(
        ["seq"], rank=call.rank, step=call.step, phase=call.phase, level=call.level, scope=call.scope, op=call.op,
        ordinal=call.ordinal,
    )  # fmt: skip
    seqs = rows["seq"].unique().to_pylist()
    return at_seq(other, chosen, seqs[0]) if len(seqs) == 1 else None


def at_seq(capture: Capture, chosen: Selection, seq: int) -> Node | None:
    """Return the chosen call with an execution number, with all its slots."""
    try:
        return Node(capture, find_call(capture, chosen, str(seq)))
    except TrueupError:
        return None


def slots_of(baseline: Node, candidate: Node) -> Iterator[tuple[SlotComparison, TensorDiff | None]]:
    """Yield every slot of two calls that are counterparts, in the candidate's order, with what is known of its tensors."""
    there = {record["slot"]: record for record in baseline.call.slots}
    names = [record["slot"] for record in candidate.call.slots]
    for name in [*names, *(slot for slot in there if slot not in names)]:
        if name == ARGUMENTS or name not in there or name not in names:
            yield _untensored(name, there.get(name), next((r for r in candidate.call.slots if r["slot"] == name), None)), None
            continue
        try:
            sides = baseline.operand(name), candidate.operand(name)
        except TrueupError as error:
            yield SlotComparison(name, "incomparable", float("nan"), "none", ("", ""), ("", ""), None, None, str(error)), None
            continue
        diff = compare_tensors(*sides, Tolerance(), top=1)
        yield _compared(name, diff), diff


def _untensored(name: str, before: dict[str, object] | None, after: dict[str, object] | None) -> SlotComparison:
    """Compare what is no tensor, or is on one side alone."""
    texts = [None if record is None else str(record.get("value") or record.get("dtype") or "") for record in (before, after)]
    same = texts[0] == texts[1]
    state = "equal" if same else "deviates"
    reason = "" if None not in texts else f"only in the {'candidate' if texts[0] is None else 'baseline'}"
    return SlotComparison(name, state, 0.0 if same else float("nan"), "value", ("", ""), ("", ""), texts[0], texts[1], reason)  # type: ignore[arg-type]


def _compared(name: str, diff: TensorDiff) -> SlotComparison:
    sides = diff.baseline, diff.candidate
    dtypes = sides[0].dtype or "", sides[1].dtype or ""
    shapes = tuple("" if side.shape is None else f"[{', '.join(map(str, side.shape))}]" for side in sides)
    stats = [side.stats or side.digest for side in sides]
    if diff.metrics is not None:
        relative, method = diff.metrics.relative_l2, "tensor"
        state = "equal" if diff.metrics.same else "agrees"
    elif diff.estimate is not None:
        relative, method, state = diff.estimate.relative_l2, "sketch", "agrees"
    elif diff.answer == "close":
        relative, method, state = 0.0, "digest", "equal"
    else:
        relative, method, state = float("nan"), "none", "incomparable"
    reason = "" if method != "none" else diff.sentence
    return SlotComparison(name, state, relative, method, dtypes, (shapes[0], shapes[1]), stats[0], stats[1], reason)  # type: ignore[arg-type]


SHOWN = 12  # producers and readers that are listed


def render_node(
    sides: tuple[Node | None, Node | None], console: Console, *, judged: Mapping[str, Any] | None = None, alone: bool = False
) -> None:
    """Print a call of the baseline and of the candidate, of which at least one has it. ``judged``: its row of the table of calls,
    where the captures were compared; ``alone``: there is one capture only."""
    node = sides[1] or sides[0]
    assert node is not None
    call = node.call
    console.print(Text.assemble((call.name, "bold"), "  ", (call.place, "dim")))
    around = Surroundings(node.capture, call.rank, call.step)
    _facts(sides, around, console, judged, alone)
    console.print()
    before, after = sides
    if before is not None and after is not None:
        _both(before, after, console)
    else:
        print_calls([call], console, several=len(node.capture.ranks) > 1)
    _neighbours(around, node, console)


def _facts(
    sides: tuple[Node | None, Node | None], around: Surroundings, console: Console, judged: Mapping[str, Any] | None, alone: bool
) -> None:
    rows: list[tuple[str, str | Text]] = []
    for name, node in zip(("baseline", "candidate"), sides, strict=True):
        if node is not None:
            rows.append(("capture" if alone else name, f"seq {node.call.seq} of {one_line(str(node.capture.path))}"))
        elif not alone:
            rows.append((name, Text("no call of this name; `vc` pairs calls by what they execute", "yellow")))
    if judged:
        rows.append(("compared", Text(_judged(judged), "red" if judged.get("role") == "culprit" else "")))
    node = sides[1] or sides[0]
    assert node is not None
    if code := next(filter(None, (source_of(node.capture, record) for record in node.call.slots)), ""):
        rows.append(("your code", code))
    inside = [call_name(**facts) for seq in around.ancestors(node.call.seq)[:1] if (facts := _named(around, seq))]
    if inside:
        rows.append(("inside", inside[0]))
    console.print(Padding(labelled(rows), (0, 0, 0, 2), expand=False))


def _judged(judged: Mapping[str, Any]) -> str:
    errors = [judged.get(name) for name in ("error_in", "error_out")]
    text = [sci(float(value)) if value is not None and not math.isnan(value) else "?" for value in errors]
    role = f", {judged['role']}" if judged.get("role") else ""
    return one_line(f"{judged['state']}{role}: rel. L2 in {text[0]}, out {text[1]}")


def _both(before: Node, after: Node, console: Console) -> None:
    found = list(slots_of(before, after))
    rows = [slot_row(slot) for slot, _ in found]
    console.print(Padding(slot_table(rows), (0, 0, 0, 2), expand=False))
    told = [(slot.slot, _cosine(diff)) for slot, diff in found if diff is not None]
    cosines = [f"{one_line(name)} {text}" for name, text in told if text]
    if cosines:
        console.print(Padding(Text.assemble(("cosine   ", "dim"), "   ".join(cosines)), (0, 0, 0, 2), expand=False))
    if any(row.method == "sketch" for row in rows):
        more = "≈ estimated from sketches, about ±18 %. Recorded with --detail tensor: exact, with the worst elements (`cp`)."
        console.print(Padding(Text(more, "dim"), (0, 0, 0, 2), expand=False))


def _cosine(diff: TensorDiff) -> str:
    if diff.metrics is not None and not diff.metrics.same and math.isfinite(diff.metrics.cosine):
        return cosine_text(diff.metrics.cosine)
    return ""


def _neighbours(around: Surroundings, node: Node, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    seq = node.call.seq
    made, read = around.producers(seq), around.consumers(seq)
    for label, links, own, other in (("reads", made, "target", "source"), ("read by", read, "source", "target")):
        for k, link in enumerate(links[:SHOWN]):
            grid.add_row(Text(label if not k else "", "dim"), *_link(around, link, own, other))
        if len(links) > SHOWN:
            grid.add_row("", Text(f"and {len(links) - SHOWN:,} more", "dim"))
    if not made:
        grid.add_row(Text("reads", "dim"), Text("what no recorded call made", "dim"))
    if not read:
        grid.add_row(Text("read by", "dim"), Text("no recorded call", "dim"))
    for label, at in zip(("before", "after"), around.beside(seq, node.call.level), strict=True):
        if at is not None and (facts := _named(around, at)):
            grid.add_row(Text(label, "dim"), "", f"seq {at}", Text(call_name(**facts), overflow="fold"))
    console.print()
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _link(around: Surroundings, link: Link, own: str, other: str) -> Sequence[Text | str]:
    seq = getattr(link, other)
    facts = _named(around, seq)
    name = call_name(**facts) if facts else "a call of an earlier step"
    return [
        Text(one_line(getattr(link, f"{own}_slot")), no_wrap=True), f"seq {seq}",
        Text(f"{name}  {one_line(getattr(link, f'{other}_slot'))}", overflow="fold"),
    ]  # fmt: skip


def _named(around: Surroundings, seq: int) -> dict[str, Any] | None:
    facts = around.facts(seq)
    return None if facts is None else {"scope": facts["scope"] or "", "op": facts["op"] or "", "ordinal": facts["ordinal"]}


def graph_text(node: Node, depth: int) -> str:
    """Return the calls within ``depth`` tensors of a call as a Graphviz graph (https://graphviz.org/doc/info/lang.html)."""
    around = Surroundings(node.capture, node.call.rank, node.call.step)
    names: dict[int, None] = {node.call.seq: None}
    edges: dict[tuple[int, int, str], None] = {}
    frontier = [node.call.seq]
    for _ in range(depth):
        fresh: dict[int, None] = {}
        for seq in frontier:
            for link in (*around.producers(seq), *around.consumers(seq)):
                edges[link.source, link.target, link.source_slot] = None
                fresh |= {end: None for end in (link.source, link.target) if end not in names}
        names |= fresh
        frontier = list(fresh)
    lines = ["digraph calls {", "  rankdir=LR; node [shape=box];"]
    for seq in names:
        facts = _named(around, seq)
        label = f"{seq} {call_name(**facts) if facts else 'a call of an earlier step'}"
        bold = ", style=bold" if seq == node.call.seq else ""
        lines.append(f"  n{seq} [label={_quoted(label)}{bold}];")
    lines += [f"  n{source} -> n{target} [label={_quoted(slot)}];" for source, target, slot in edges]
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return '"' + clean(one_line(text)).replace("\\", "\\\\").replace('"', '\\"') + '"'


ROWS, COLUMNS = 16, 8
PIECE = 1 << 16


def render_values(values: NDArray[Any], console: Console, name: str) -> None:
    """Print what a tensor is, and its extremes, as far as it is one of numbers."""
    from trueup.foundation.kernels import summarize
    from trueup.foundation.model import NUMBERS, PACKED

    rows = [("tensor", one_line(f"{values.dtype.name} {list(values.shape)}"))]
    packed = np.empty(PACKED)
    try:
        summarize(values, packed)
    except TypeError:  # text, records
        packed[:] = np.nan
    for label, value in zip(NUMBERS, packed.tolist(), strict=False):
        if label in ("min", "max", "mean", "l2") and np.isfinite(value):
            rows.append((label, number(value, 7)))
        elif label.startswith("n_") and value > 0:
            rows.append((label.removeprefix("n_"), f"{int(value):,}"))
    console.print(Text(name, "bold"))
    console.print(labelled(rows))


def render_rows(values: NDArray[Any], console: Console) -> None:
    """Print the first elements in C order, sixteen rows of eight; on a narrow terminal in more rows of fewer."""
    first = np.asarray(values.flat[: ROWS * COLUMNS]).tolist()
    if not first:
        return
    cells = [number(value, 5) if isinstance(value, float) else one_line(str(value)) for value in first]
    width, label = max(map(len, cells)), len(str(len(cells)))
    columns = next((n for n in (COLUMNS, COLUMNS // 2, 2) if label + n * (width + 2) <= console.width), 1)
    console.print()
    for start in range(0, len(cells), columns):
        row = "".join(f"  {cell:>{width}}" for cell in cells[start : start + columns])
        console.print(Text.assemble((f"{start:>{label}}", "dim"), row), soft_wrap=True)
    if values.size > ROWS * COLUMNS:
        console.print(Text(f"and {values.size - ROWS * COLUMNS:,} more elements: -o FILE writes all", "dim"))


def write_text(values: NDArray[Any], path: Path) -> str:
    """Write a tensor as text, an element a line in C order; return a sentence that says so. Raises TrueupError if it cannot."""
    flat = values.reshape(-1)
    with replaced(path, "a file for the elements") as temporary, temporary.open("w", encoding="utf-8") as file:
        for start in range(0, flat.size, PIECE):
            file.writelines(f"{value}\n" for value in np.asarray(flat[start : start + PIECE]).tolist())
    return one_line(f"wrote {path}: {values.dtype.name} {list(values.shape)}, an element a line")


def render_listing(listing: Listing, console: Console) -> None:
    """Print the calls of a listing, then what it could not tell."""
    for place, call in enumerate(listing.calls, 1):
        console.print(_panel(place, call, listing.limit, console.width))
    said, style = _summary(listing)
    console.print(Text(said, style))
    if listing.unknown:
        several = counted(listing.unknown, "call could not be measured", "calls could not be measured")
        console.print(Text(f"could not tell: {several}: {one_line(listing.why_unknown)}", "yellow"))
    if listing.estimated:
        console.print(Text(
            "≈ estimated from sketches: 1 - cosine is right to about ±25 %. For exact ones, and the largest difference, "
            "record both runs with --detail tensor.", "dim",
        ))  # fmt: skip


def _summary(listing: Listing) -> tuple[str, str]:
    compared = f"of {counted(listing.compared, 'compared call')}"
    if not listing.total:
        return f"no output with a cosine of {listing.limit:g} or less, {compared}", "" if listing.unknown else "green"
    more = listing.total - len(listing.calls)
    rest = f", {more:,} more below: raise -l" if more else ""
    return f"{counted(listing.total, 'call')} with an output whose cosine is {listing.limit:g} or less, {compared}{rest}", "bold"


def _panel(number: int, call: Dissimilar, limit: float, width: int) -> Panel:
    title, where = _title(number, call, width)
    rows: list[tuple[str, str | Text]] = []
    if call.names is None:
        rows.append(("seq", f"{call.seq[0]} in the baseline, {call.seq[1]} in the candidate"))
    elif call.names[0] != call.names[1]:
        rows.append(("right", one_line(call.names[1])))
    for label, is_output in (("input", False), ("output", True)):
        slots = [slot for slot in call.slots if slot.is_output is is_output]
        if slots:
            apart = Text("\n" if is_output and any(map(_remark, slots)) else "   ")
            rows.append((label, apart.join(_slot(slot, limit) for slot in slots)))
    heading = Text.assemble((title, "bold"), "  ", (one_line(where), "dim"))
    return Panel(labelled(rows), title=heading, title_align="left", padding=(0, 1))


def _title(number: int, call: Dissimilar, width: int) -> tuple[str, str]:
    if call.names is not None:
        return shorten(f"{number}  {one_line(call.names[0])}", max(20, width - 8)), ""
    key = call.key
    scope = f"{one_line(key.scope)}  " if key.scope else ""
    where = f"{key.phase}, step {key.step}, rank {key.rank}, {key.level}"
    return shorten(f"{number}  {scope}{one_line(key.op)}#{key.ordinal}", max(20, width - len(where) - 8)), where


def _slot(slot: SlotCosine, limit: float) -> Text:
    style = "green"
    if math.isnan(slot.cosine):
        style = "red" if slot.reason else "yellow"
    elif slot.cosine <= limit:
        style = "red"
    value = "none" if math.isnan(slot.cosine) else f"{'≈' if slot.is_estimate else ''}{cosine_text(slot.cosine)}"
    text = Text.assemble(one_line(slot.slot), " ", (value, style))
    if remark := _remark(slot):
        text.append(f"  {remark}", "dim")
    return text


def _remark(slot: SlotCosine) -> str:
    if not slot.is_output:
        return ""
    far = f"max |d| {sci(slot.max_absolute)}" if math.isfinite(slot.max_absolute) and slot.max_absolute else ""
    return "  ".join(filter(None, (far, one_line(slot.reason))))


def cosine_text(value: float) -> str:
    """Write a cosine with six decimals; one that is not 1 is never written as 1."""
    return "1" if value == 1 else f"{min(value, 0.999999) if value < 1 else value:.6f}"
