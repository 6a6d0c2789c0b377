"""What a capture holds, on a terminal: a header, its calls with their tensors, or its modules.

runs/npu  torch on npu:0, 1 rank, 3 steps, 1,240 calls, complete

   seq  call                                       min      max      mean       l2
   418  neck.lstm  torch.lstm#0  backward, step 0, api
          grad_output.0  float32 [8, 16, 64]    -1.234    1.357  0.001020    41.12
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from rich.text import Text
from rich.tree import Tree

from trueup.comparison.result.loss_scales import COLUMNS as SCALE_COLUMNS
from trueup.comparison.result.loss_scales import loss_scale_in
from trueup.doors.report.selecting import KEYS, Call, Selection, chosen_calls, nothing, scan
from trueup.foundation.facts.operators import named
from trueup.foundation.model import LEVELS
from trueup.foundation.store.policy_uses import policy_lines
from trueup.foundation.words.wording import clean, counted, number, one_line, shorten

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

__all__ = ["CaptureLike", "Selection", "render_calls", "render_header", "render_tree"]

SPECIAL = {"n_nan": "NaN", "n_posinf": "inf", "n_neginf": "-inf", "n_saturated": "at max"}
NOT_FINITE = ("n_nan", "n_posinf", "n_neginf")
VALUE_WIDTH = 60
PROBLEMS_SHOWN = 5
RULES_SHOWN = 20


class CaptureLike(Protocol):
    """What is used of ``trueup.foundation.store.Capture``."""

    root: Any
    ranks: Any
    problems: Any

    @property
    def steps(self) -> list[int]:
        """Steps with records, in order."""

    def records(self, columns: Any = None, **where: Any) -> pa.Table:
        """Return rows, one per slot."""

    def payload(self, rank: int, segment: str, key: str, view: Any = None, digest: Any = None) -> np.ndarray[Any, Any]:
        """Return a tensor, its bytes checked against the digest."""

    def sites(self, rank: int) -> Any:
        """Return stacks by site."""


def render_header(capture: CaptureLike, chosen: Selection, console: Console) -> None:
    """Say in one line what the capture is, then what is wrong with it."""
    manifests = list(capture.ranks.values()) if isinstance(capture.ranks, dict) else []
    said = [capture.root, *manifests]
    framework = _first(said, "framework") or "unknown framework"
    versions = _first(said, "versions")
    if isinstance(versions, dict) and isinstance(versions.get(framework), str):
        framework = f"{framework} {versions[framework]}"
    devices = list(dict.fromkeys(str(device) for one in said for device in _listed(one.get("devices"))))
    calls, found, scaled = 0, set(), []
    for rows in scan(capture, Selection(chosen.path), (*KEYS, "level", "op")):
        calls += rows.select(KEYS).group_by(list(KEYS)).aggregate([]).num_rows
        found.update(rows["level"].unique().to_pylist())
        if not set(named("scaler")).isdisjoint(rows["op"].unique().to_pylist()):
            scaled += rows["step"].unique().to_pylist()
    levels = [level for level in LEVELS if level in found]
    states = {str(one.get("status")) for one in manifests if one.get("status")}
    facts = [
        framework + (f" on {', '.join(devices)}" if devices else ""),
        counted(len(capture.ranks), "rank"),
        counted(len(capture.steps), "step"),
        counted(calls, "call"),
        *([f"levels {', '.join(levels)}"] if levels else []),
        *([", ".join(sorted(states))] if states else []),
    ]
    console.print(Text.assemble((clean(str(chosen.path)), "bold"), "  ", one_line(", ".join(facts))))
    if scaled and (scale := loss_scale_in(capture.records(list(SCALE_COLUMNS), op=named("scaler"), step=scaled))):
        console.print(Text(f"loss scale  {scale}"))
    for line in policy_lines(manifests)[:RULES_SHOWN]:
        console.print(Text(f"policy  {one_line(line)}", "yellow"))
    for problem in list(capture.problems)[:PROBLEMS_SHOWN]:
        console.print(Text(f"problem  {one_line(str(problem))}", "yellow"))
    if len(capture.problems) > PROBLEMS_SHOWN:
        console.print(Text(f"and {counted(len(capture.problems) - PROBLEMS_SHOWN, 'more problem')}", "yellow"))
    notes = list(dict.fromkeys(str(note) for one in manifests for note in _listed(one.get("notes"))))
    for note in notes[:PROBLEMS_SHOWN]:
        console.print(Text(f"note  {one_line(note)}", "dim"))
    if len(notes) > PROBLEMS_SHOWN:
        console.print(Text(f"and {counted(len(notes) - PROBLEMS_SHOWN, 'more note')}", "dim"))
    console.print()


def render_calls(capture: CaptureLike, chosen: Selection, limit: int, console: Console) -> None:
    """List the chosen calls in order of execution, each with its slots.

    Raises:
        TrueupError: nothing was chosen.
    """
    calls, total = chosen_calls(capture, chosen, limit)
    print_calls(calls, console, several=len(capture.ranks) > 1)
    if total > len(calls):
        rest = f"and {counted(total - len(calls), 'more call')}: "
        rest += "raise --limit, or choose with --scope, --op, --phase, --step, --where"
        console.print(Text(rest, "dim"))


def print_calls(calls: Sequence[Call], console: Console, *, several: bool) -> None:
    """Print calls with their slots under one heading; ``several``: ranks, so that each is named."""
    slots = [[_slot(slot) for slot in call.slots] for call in calls]
    widths = _widths([row for group in slots for row in group], console.width)
    console.print(Text(_line("   seq ", _TITLES, widths), "dim"), soft_wrap=True)
    for call, group in zip(calls, slots, strict=True):
        console.print(_heading(call, several), soft_wrap=True)
        for cells in group:
            console.print(Text(_line(" " * 7, cells, widths).rstrip()), soft_wrap=True)


def render_tree(capture: CaptureLike, chosen: Selection, console: Console) -> None:
    """Show the modules as a tree, with the calls inside each and what is not finite.

    Raises:
        TrueupError: nothing was chosen.
    """
    counts: dict[str, dict[str, int]] = {}
    for rows in scan(capture, chosen, (*KEYS, "scope", "phase", *NOT_FINITE)):
        _count(rows, counts)
    if not counts:
        raise nothing(capture, chosen)
    console.print(_tree(counts))


def _count(rows: pa.Table, counts: dict[str, dict[str, int]]) -> None:
    """Add the calls of ``rows`` by scope and phase, and how many of a scope are not finite."""
    calls = rows.group_by([*KEYS, "scope", "phase"], use_threads=False).aggregate([(name, "sum") for name in NOT_FINITE])
    bad = sum(pc.fill_null(calls[f"{name}_sum"], 0).to_numpy() > 0 for name in NOT_FINITE) > 0
    calls = calls.append_column("bad", pa.array(bad, pa.int64()))
    kinds = calls.group_by(["scope", "phase"], use_threads=False).aggregate([("seq", "count"), ("bad", "sum")])
    for row in kinds.to_pylist():
        here = counts.setdefault(row["scope"] or "", {})
        here[row["phase"]] = here.get(row["phase"], 0) + row["seq_count"]
        here["not finite"] = here.get("not finite", 0) + row["bad_sum"]


_TITLES = ("call", "", "min", "max", "mean", "l2", "")


def _slot(row: dict[str, Any]) -> tuple[str, ...]:
    name = one_line(row["slot"] or "")
    if row.get("value") is not None and row.get("numel") is None:
        return (name, shorten(one_line(row["value"]), VALUE_WIDTH), "", "", "", "", "")
    shape = row.get("shape")
    sizes = f"[{','.join(map(str, shape))}]" if isinstance(shape, list) else str(shape or "")
    tensor = one_line(f"{row.get('dtype') or ''} {sizes}".strip())
    values = tuple("" if row.get(key) is None else number(row[key]) for key in ("min", "max", "mean", "l2"))
    special = ", ".join(f"{row[key]:,} {word}" for key, word in SPECIAL.items() if row.get(key))
    if not any(values) and row.get("digest"):
        special = f"digest {one_line(row['digest'])}"
    return (name, tensor, *values, special)


def _widths(rows: Sequence[tuple[str, ...]], console_width: int) -> list[int]:
    """Give each column what its widest cell needs; long arguments may run over the numbers, which they have none of."""
    tensors = [row for row in rows if any(row[2:])] or [("",) * 7]
    widths = [max(len(title), *(len(row[k]) for row in tensors)) for k, title in enumerate(_TITLES)]
    widths[0] = max(4, *(len(row[0]) for row in rows)) if rows else 4
    spare = console_width - 7 - sum(widths[1:6]) - 12
    widths[0] = max(len("grad_output.0"), min(widths[0], spare))  # shorter, an output and an input look alike
    return widths


def _line(lead: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    first = shorten(cells[0], widths[0])
    if not any(cells[2:]):
        return f"{lead}{first:<{widths[0]}}  {cells[1]}"
    values = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells[2:6], widths[2:6], strict=True))
    return f"{lead}{first:<{widths[0]}}  {cells[1]:<{widths[1]}}  {values}  {cells[6]}"


def _heading(call: Call, several: bool) -> Text:
    where = f"{call.phase}, step {call.step}, {f'rank {call.rank}, ' if several else ''}{call.level}"
    scope = f"{one_line(call.scope)}  " if call.scope else ""
    name = f"{call.seq:>6}  {scope}{one_line(call.op)}#{call.ordinal}"
    return Text.assemble((name, "bold"), "  ", (one_line(where), "dim"))


def _tree(counts: dict[str, dict[str, int]]) -> Tree:
    root = Tree(Text("modules", "bold"), guide_style="dim")
    if "" in counts:
        root.add(_label("outside any module", counts[""]))
    nodes: dict[str, Tree] = {}
    for scope in sorted(filter(None, counts), key=_natural):
        parent = root
        parts = scope.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in nodes:
                nodes[path] = parent.add(_label(parts[depth - 1], counts.get(path, {})))
            parent = nodes[path]
    return root


def _label(name: str, here: dict[str, int]) -> Text:
    phases = ", ".join(f"{count:,} {phase}" for phase, count in here.items() if phase != "not finite")
    label = Text.assemble(one_line(name), "  ", (one_line(phases), "dim"))
    if here.get("not finite"):
        label.append(f"  {counted(here['not finite'], 'call')} with NaN or inf", "yellow")
    return label


def _natural(scope: str) -> list[tuple[int, int, str]]:
    """Sort ``layers.10`` behind ``layers.9``."""
    return [(0, int(part), "") if part.isdecimal() and len(part) < 10 else (1, 0, part) for part in scope.split(".")]


def _first(manifests: Sequence[dict[str, Any]], key: str) -> Any:
    return next((one[key] for one in manifests if one.get(key)), None)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] if value else []
