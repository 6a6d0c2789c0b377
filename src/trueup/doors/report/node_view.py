"""A call in the middle of its run: what it got and gave on both sides, who made its inputs, who reads its outputs.

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
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.comparison.result.surroundings import Link, Surroundings
from trueup.doors.report.capture_view import print_calls
from trueup.doors.report.cosine_view import cosine_text
from trueup.doors.report.facts import call_name, slot_row
from trueup.doors.report.nodes import Node, slots_of
from trueup.doors.report.terminal import slot_table
from trueup.foundation.words.wording import clean, one_line, sci

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.doors.report.tensor_diff import TensorDiff

SHOWN = 12
"""Producers and readers that are listed."""


def render_node(
    sides: tuple[Node | None, Node | None], console: Console, *, judged: Mapping[str, Any] | None = None, alone: bool = False
) -> None:
    """Print a call on both sides; at least one has it.

    Args:
        sides: in the baseline and in the candidate.
        console: where.
        judged: its row of the table of calls, where the captures were compared.
        alone: whether there is no other capture to look for a counterpart in.
    """
    node = sides[1] or sides[0]
    assert node is not None
    call = node.call
    where = f"{call.phase}, step {call.step}, rank {call.rank}, {call.level}"
    console.print(Text.assemble((call_name(call.scope, call.op, call.ordinal), "bold"), "  ", (one_line(where), "dim")))
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
    grid = Table.grid(padding=(0, 2))
    for name, node in zip(("baseline", "candidate"), sides, strict=True):
        if node is not None:
            label = "capture" if alone else name
            grid.add_row(Text(label, "dim"), Text(f"seq {node.call.seq} of {one_line(str(node.capture.path))}", overflow="fold"))
        elif not alone:
            grid.add_row(Text(name, "dim"), Text("no call of this name; `vc` pairs calls by what they execute", "yellow"))
    if judged:
        grid.add_row(Text("compared", "dim"), Text(_judged(judged), "red" if judged.get("role") == "culprit" else ""))
    node = sides[1] or sides[0]
    assert node is not None
    site = next((record["site"] for record in node.call.slots if record.get("site") is not None), None)
    frames, line = node.capture.sites(node.call.rank).get(site, ((), None)) if site is not None else ((), None)
    if frames:
        code = f"  {one_line(line.strip())}" if line else ""
        grid.add_row(Text("your code", "dim"), Text(f"{one_line(frames[0])}{code}", overflow="fold"))
    inside = [call_name(**facts) for seq in around.ancestors(node.call.seq)[:1] if (facts := _named(around, seq))]
    if inside:
        grid.add_row(Text("inside", "dim"), Text(inside[0], overflow="fold"))
    console.print(Padding(grid, (0, 0, 0, 2)))


def _judged(judged: Mapping[str, Any]) -> str:
    errors = [judged.get(name) for name in ("error_in", "error_out")]
    text = [sci(float(value)) if value is not None and not math.isnan(value) else "?" for value in errors]
    role = f", {judged['role']}" if judged.get("role") else ""
    return one_line(f"{judged['state']}{role}: rel. L2 in {text[0]}, out {text[1]}")


def _both(before: Node, after: Node, console: Console) -> None:
    found = list(slots_of(before, after))
    rows = [slot_row(slot) for slot, _ in found]
    console.print(Padding(slot_table(rows), (0, 0, 0, 2)))
    told = [(slot.slot, _cosine(diff)) for slot, diff in found if diff is not None]
    cosines = [f"{one_line(name)} {text}" for name, text in told if text]
    if cosines:
        console.print(Padding(Text.assemble(("cosine   ", "dim"), "   ".join(cosines)), (0, 0, 0, 2)))
    if any(row.method == "sketch" for row in rows):
        more = "≈ estimated from sketches, about ±18 %. Recorded with --detail tensor: exact, with the worst elements (`cp`)."
        console.print(Padding(Text(more, "dim"), (0, 0, 0, 2)))


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
    console.print(Padding(grid, (0, 0, 0, 2)))


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
