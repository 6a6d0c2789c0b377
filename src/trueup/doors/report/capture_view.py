"""What a capture holds, on a terminal: a header, its calls with their tensors, or its modules.

runs/npu  torch on npu:0, 1 rank, 3 steps, 1,240 calls, complete

   seq  call                                       min      max      mean       l2
   418  neck.lstm  torch.lstm#0  backward, step 0, api
          grad_output.0  float32 [8, 16, 64]    -1.234    1.357  0.001020    41.12

Calls in one line each, and how many there are of each operator, on one side or on both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.text import Text
from rich.tree import Tree

from trueup.analysis.selecting import KEYS, Call, NothingChosen, Selection, chosen_calls, find_call, nothing, scan
from trueup.doors.report.document import fields
from trueup.doors.report.terminal import plain_table
from trueup.foundation.facts.operators import named
from trueup.foundation.model import LEVELS
from trueup.foundation.store.declared import policy_lines
from trueup.foundation.store.overview import SCALE_COLUMNS, loss_scale_in
from trueup.foundation.words.wording import clean, counted, number, one_line, shorten

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.foundation.store import Capture

SPECIAL = {"n_nan": "NaN", "n_posinf": "inf", "n_neginf": "-inf", "n_saturated": "at max"}
NOT_FINITE = ("n_nan", "n_posinf", "n_neginf")
VALUE_WIDTH = 60
PROBLEMS_SHOWN = 5
RULES_SHOWN = 20


def document(capture: Capture, chosen: Selection, limit: int, call: str | None = None) -> dict[str, Any]:
    """Return what a capture is and its chosen calls, the first ``limit``, with all that was recorded of their slots but sketches;
    of one ``call`` only that."""
    try:
        calls, total = ([find_call(capture, chosen, call)], 1) if call else chosen_calls(capture, chosen, limit)
    except NothingChosen:
        calls, total = [], 0
    manifests = list(capture.ranks.values())
    return {
        "schema": "trueup-show", "schema_version": 1, "path": str(chosen.path),
        "framework": _first(manifests, "framework"), "versions": _first(manifests, "versions"),
        "devices": sorted({str(device) for one in manifests for device in _listed(one.get("devices"))}),
        "ranks": sorted(capture.ranks), "steps": capture.steps, "levels": sorted(capture.levels), "problems": capture.problems,
        "calls_in_all": total,
        "calls": [
            fields(one, "step rank seq phase level scope op ordinal") | {"slots": [_slot_facts(slot) for slot in one.slots]}
            for one in calls
        ],
    }  # fmt: skip


def _slot_facts(slot: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in slot.items() if name not in (*KEYS, "sketch") and value is not None}


def render_header(capture: Capture, chosen: Selection, console: Console) -> None:
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
    notes = list(dict.fromkeys(str(note) for one in manifests for note in _listed(one.get("notes"))))
    for word, texts, style in (("problem", capture.problems, "yellow"), ("note", notes, "dim")):
        for text in texts[:PROBLEMS_SHOWN]:
            console.print(Text(f"{word}  {one_line(str(text))}", style))
        if len(texts) > PROBLEMS_SHOWN:
            console.print(Text(f"and {counted(len(texts) - PROBLEMS_SHOWN, f'more {word}')}", style))
    console.print()


def render_calls(capture: Capture, chosen: Selection, limit: int, console: Console) -> None:
    """List the chosen calls in order of execution, each with its slots; raises TrueupError if nothing was chosen."""
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


def render_tree(capture: Capture, chosen: Selection, console: Console) -> None:
    """Show the modules as a tree, with the calls inside each and what is not finite; raises TrueupError if nothing was chosen."""
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


MORE = "raise --limit, or choose with --scope, --op, --phase"


def render_list(calls: Sequence[Call], total: int, console: Console, *, several: bool, how: str = MORE) -> None:
    """Print calls with their type and place; ``several``: ranks, so that each is named; ``how`` one sees more."""
    table = plain_table(">seq", "type", "name", "phase", ">step", *([">rank"] if several else []), "level")
    for call in calls:
        place = [str(call.step), *([str(call.rank)] if several else [])]
        table.add_row(str(call.seq), *map(Text, (one_line(call.op), call.name, one_line(call.phase))), *place, one_line(call.level))
    console.print(table)
    if total > len(calls):
        console.print(Text(f"and {counted(total - len(calls), 'more call')}: {how}", "dim"))


def count_types(capture: Capture, chosen: Selection) -> Counter[str]:
    """Count the chosen calls by operator, some steps at a time."""
    found: Counter[str] = Counter()
    for rows in scan(capture, chosen, (*KEYS, "op")):
        calls = rows.group_by([*KEYS, "op"], use_threads=False).aggregate([]).group_by("op", use_threads=False)
        counts = calls.aggregate([("seq", "count")])
        found.update({op or "": n for op, n in zip(counts["op"].to_pylist(), counts["seq_count"].to_pylist(), strict=True)})
    return found


def render_types(sides: Sequence[tuple[str, Counter[str]]], console: Console, limit: int) -> None:
    """Print how many calls of each operator there are on each side, what differs first."""
    table = plain_table("type", *(f">{name}" for name, _ in sides), *([""] if len(sides) > 1 else []))
    names = {name for _, counts in sides for name in counts}

    def order(name: str) -> tuple[bool, int, str]:
        counts = [side[name] for _, side in sides]
        return len(set(counts)) == 1, -max(counts), name

    shown = sorted(names, key=order)
    for name in shown[:limit]:
        counts = [side[name] for _, side in sides]
        differs = [Text("differs" if len(set(counts)) > 1 else "", "yellow")] if len(sides) > 1 else []
        table.add_row(Text(one_line(name)), *(f"{count:,}" for count in counts), *differs)
    totals = [sum(side.values()) for _, side in sides]
    table.add_row(Text("all", "dim"), *(f"{total:,}" for total in totals))
    console.print(table)
    if len(shown) > limit:
        console.print(Text(f"and {counted(len(shown) - limit, 'more type')}: raise -l", "dim"))
