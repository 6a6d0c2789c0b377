"""What a capture holds, on a terminal: a header, its calls with their tensors, or its modules; and one tensor of it.

runs/npu  torch on npu:0, 1 rank, 3 steps, 1,240 calls, complete

   seq  call                                       min      max      mean       l2
   418  neck.lstm  torch.lstm#0  backward, step 0, api
          grad_output.0  float32 [8, 16, 64]    -1.234    1.357  0.001020    41.12

Calls in one line each, and how many there are of each operator, on one side or on both. A tensor is named ``CAP:CALL:SLOT``, or is
a ``.npy`` file, and is written as one; shown are its numbers, a histogram and its first elements, as far as they were kept.
Histograms are counted by `trueup.comparison.result.evidence`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.text import Text
from rich.tree import Tree

from trueup.analysis.selecting import KEYS, Call, NothingChosen, Selection, chosen_calls, find_call, nothing, scan
from trueup.comparison.result import evidence as counting
from trueup.doors.report.document import fields
from trueup.doors.report.terminal import labelled, plain_table
from trueup.foundation.facts.operators import named
from trueup.foundation.model import LEVELS, NUMBERS, TensorStats, TrueupError
from trueup.foundation.store.columns import SCALE_COLUMNS, loss_scale_in
from trueup.foundation.store.declared import policy_lines
from trueup.foundation.store.durable import replacing
from trueup.foundation.words.wording import call_name, clean, counted, number, one_line, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table

    from trueup.foundation.store import Capture

SPECIAL = {"n_nan": "NaN", "n_posinf": "inf", "n_neginf": "-inf", "n_saturated": "at max"}
NOT_FINITE = ("n_nan", "n_posinf", "n_neginf")
VALUE_WIDTH = 60
PROBLEMS_SHOWN = 5
RULES_SHOWN = 20

BAR = 40
ELEMENTS = 12
LABELS = {
    "min": "min", "max": "max", "mean": "mean", "l2": "l2", "n_nan": "NaN", "n_posinf": "+inf", "n_neginf": "-inf",
    "n_zero": "zero", "n_subnormal": "subnormal", "n_saturated": "at the dtype's maximum", "digest": "digest",
    "foreign_checksum": "the tool's checksum", "foreign_statistics": "as the tool said",
}  # fmt: skip


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


def render_tensor(
    capture: Capture, chosen: Selection, call: str, slot: str, console: Console, npy: Path | None = None, *, first: bool = True
) -> None:
    """Print one slot of one call, ``first``: its first elements too, and write its elements to ``npy``. Raises TrueupError if the
    call or the slot is not there, its payload cannot be read, or there is none to write."""
    found = find_call(capture, chosen, call)
    record = record_of(found, slot)
    if npy is not None and record.get("payload_segment") is None:
        raise TrueupError(
            f"{npy} was not written: no elements of {one_line(found.op)}#{found.ordinal} {one_line(slot)} were kept.\n"
            f"  expected: a capture with --detail tensor\n  got:      {_kept(record)[0]}\n  next:     {_again(found, record)}"
        )
    title = f"{found.name}  {one_line(record['slot'])}"
    console.print(Text.assemble((title, "bold"), "  ", (f"seq {found.seq}, {found.place}", "dim")))
    if code := source_of(capture, record):
        console.print(Text(f"your code: {code}", "dim"))
    if record["producer_seq"] is not None:
        console.print(Text(f"written by seq {record['producer_seq']}", "dim"))
    if record.get("value") is not None and record.get("numel") is None:
        console.print(Text(_argument(record["value"])))
        return
    console.print()
    console.print(_numbers(record))
    console.print()
    if record.get("payload_segment") is None:
        kept, verb = _kept(record)
        console.print(Text(f"Only {kept} of it {verb} kept. For its elements:", "dim"))
        console.print(Text(f"  {_again(found, record)}"), soft_wrap=True)
        return
    values = payload_of(capture, record)
    _elements(values, console, first=first)
    if npy is not None:
        console.print(Text(write_npy(values, npy)), soft_wrap=True)


def payload_of(capture: Capture, record: dict[str, Any]) -> NDArray[Any]:
    """Return the elements of a slot, mapped, in its recorded shape; raises TrueupError if they are gone, or not its digest's."""
    place: list[Any] = [record[name] for name in ("rank", "payload_segment", "payload_key", "payload_view", "digest")]
    try:
        values = np.asarray(capture.payload(*place))
    except TrueupError as error:
        name = f"{call_name(record['scope'] or '', record['op'], record['ordinal'])} {one_line(record['slot'])}"
        where = f"seq {record['seq']}, step {record['step']}, rank {record['rank']}"
        raise TrueupError(f"The elements of {name} cannot be trusted.\n  where:    {where}\n  got:      {error}") from None
    shape = record.get("shape")
    return values.reshape(shape) if isinstance(shape, list) and values.size == math.prod(shape) else values


def _kept(record: dict[str, Any]) -> tuple[str, str]:
    if any(record.get(name) is not None for name in ("l2", "min", "foreign_statistics")):
        return "statistics", "were"
    if record.get("digest") is not None:
        return "a digest", "was"
    return ("a checksum", "was") if record.get("foreign_checksum") is not None else ("dtype and shape", "were")


def _again(call: Call, record: dict[str, Any]) -> str:
    """Return the command that would keep the elements, or what to do where another tool dumped them."""
    if record.get("foreign_name") is not None:
        return f"dump the tensors of step {call.step} too ({one_line(str(record['foreign_name']))}) and import that dump"
    what = f"--include {shlex.quote(one_line(call.scope or call.op))} --steps {call.step}"
    return f"trueup capture -o DIR --detail tensor {what} -- COMMAND"


def record_of(call: Call, slot: str) -> dict[str, Any]:
    """Return the record of a slot; raises TrueupError if the call has no such slot."""
    for record in call.slots:
        if record["slot"] == slot:
            return record
    there = ", ".join(str(record["slot"]) for record in call.slots)
    raise TrueupError(
        f"{call.op}#{call.ordinal} has no slot {slot}.\n  expected: one of {one_line(there)}\n"
        f"  got:      {slot!r}\n  next:     name one of its slots"
    )


def source_of(capture: Capture, record: dict[str, Any]) -> str:
    """Return the user's line behind a slot, ``train.py:57 in forward  x = f(x)``; empty where no stack was recorded."""
    frames, line = capture.sites(record["rank"]).get(record["site"], ((), None))
    text = f"  {one_line(line.strip())}" if line else ""
    return one_line(frames[0]) + text if frames else ""


def _argument(value: str) -> str:
    try:
        return clean(json.dumps(json.loads(value), indent=2, ensure_ascii=False))
    except ValueError:
        return clean(value)


def _numbers(record: dict[str, Any]) -> Table:
    shape = record.get("shape")
    sizes = f"[{', '.join(map(str, shape))}]" if isinstance(shape, list) else str(shape or "")
    device = "" if record.get("device") is None else f" on {record['device']}"  # other tools do not say
    rows = [("tensor", one_line(f"{record['dtype'] or 'dtype not known'} {sizes}{device}"))]
    for key, label in LABELS.items():
        value = record.get(key)
        if value is None or (key.startswith("n_") and not value):
            continue
        shown = f"{value:,}" if isinstance(value, int) else number(value, 7) if isinstance(value, float) else value
        rows.append((label, one_line(shown)))
    return labelled(rows)


def _elements(values: NDArray[Any], console: Console, *, first: bool) -> None:
    rows = spans(histograms([values]))
    print_bars(rows, console)
    if not first and values.size:
        return
    if rows:
        console.print()
    head = np.asarray(values.flat[:ELEMENTS]).tolist()
    shown = "  ".join(number(float(value), 7) if isinstance(value, float) else str(value) for value in head)
    console.print(Text(f"first elements  {shown}{'  …' if values.size > ELEMENTS else ''}" if head else "no elements"))


BINS = 16
BLOCKS = " ▏▎▍▌▋▊▉█"


def histograms(tensors: Sequence[NDArray[Any]], bins: int = BINS) -> list[tuple[float, float, list[int]]]:
    """Count the finite elements of several tensors in the same bins: ``(from, to, [count of each])`` rows."""
    return counting.histograms([partial(counting.finite, values) for values in tensors], bins)


def spans(rows: Sequence[tuple[float, float, list[int]]]) -> list[tuple[str, list[int]]]:
    """Name the bins of a histogram by their ends, aligned: ``-0.5 to 1.25``."""
    edges = [(number(low), number(high), counts) for low, high, counts in rows]
    left, right = (max((len(edge[k]) for edge in edges), default=0) for k in (0, 1))
    return [(f"{low:>{left}} to {high:>{right}}", counts) for low, high, counts in edges]


def print_bars(rows: Sequence[tuple[str, Sequence[int]]], console: Console, *headings: str) -> None:
    """Print named counts with their bars, those of each side in a column; ``headings``, if any, of the names and of each column."""
    if not rows:
        return
    most, sides = max(max(counts) for _, counts in rows), len(rows[0][1])
    left, digits = max(len(name) for name, _ in rows), max(len(f"{most:,}"), 5)
    width = max(5, min(BAR, (console.width - left - 2 - 3 * (sides - 1)) // sides - digits - 1))
    if headings:
        columns = "   ".join(f"{heading:<{width + digits + 1}}" for heading in headings[1:])
        console.print(Text(f"{headings[0]:<{left}}  {columns}".rstrip(), "dim"), soft_wrap=True)
    for name, counts in rows:
        bars = "   ".join(f"{bar(count / most, width):<{width}} {count:>{digits},}" for count in counts)
        console.print(Text(f"{name:>{left}}  {bars}"), soft_wrap=True)


def bar(share: float, width: int) -> str:
    """Draw a bar in eighths of a character; anything above zero is seen."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()


def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which ``.npy`` holds a tensor: its own, or the smallest of NumPy's that holds all its values."""
    if dtype.kind in "biufc" and dtype.isbuiltin == 1:
        return dtype
    return np.dtype(np.float32 if "float" in dtype.name else np.int8 if dtype.name.startswith("int") else np.uint8)


def write_npy(values: NDArray[Any], path: Path) -> str:
    """Write a tensor piece by piece, then give it its name; return a sentence that says so. Raises TrueupError if it cannot."""
    dtype = plain_dtype(values.dtype)
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": values.shape}
            )
            with np.nditer(values, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=1 << 16) as pieces:
                for piece in pieces if values.size else ():
                    file.write(np.ascontiguousarray(piece).astype(dtype).tobytes())
    except OSError as error:
        raise TrueupError(f"{path} cannot be written: {error.strerror}; name another file") from None
    widened = "" if dtype == values.dtype else f", widened from {values.dtype.name}, which .npy does not know"
    return one_line(f"wrote {path}: {dtype.name} {list(values.shape)}{widened}")


def read_npy(path: Path) -> NDArray[Any]:
    """Map a ``.npy`` file; nothing in it is executed. Raises TrueupError if it cannot be read, or holds objects."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, OverflowError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise TrueupError(f"{path} cannot be read as .npy: {one_line(str(reason))[:200]}; write it again with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise TrueupError(f"{path} is no .npy file but an archive of several: unpack it and name one")
    return array


@dataclass(frozen=True, slots=True)
class Operand:
    """A side of a comparison, as far as it was kept."""

    name: str  # what it is, for a person
    where: str
    dtype: str | None
    shape: tuple[int, ...] | None
    values: NDArray[Any] | None
    stats: TensorStats | None = None
    sketch: NDArray[np.float64] | None = None
    digest: str | None = None
    missing: str = ""  # why there are no values


@dataclass(frozen=True, slots=True)
class Address:
    """``CAP:CALL:SLOT``, taken apart; no call: a file."""

    path: Path
    call: str = ""
    slot: str = ""


def read_address(text: str, like: Address | None = None) -> Address:
    """Take ``CAP:CALL:SLOT`` or a file apart; the capture is the shortest directory that the name begins with. With ``like``, the
    other side, a capture alone means the same call and slot. Raises TrueupError if it is neither."""
    whole = Path(text)
    if whole.is_file():
        return Address(whole)
    if like is not None and like.call and whole.is_dir():
        return replace(like, path=whole)
    at = text.find(":")
    while at >= 0:
        call, _, slot = text[at + 1 :].rpartition(":")
        if call and slot and Path(text[:at]).is_dir():
            return Address(Path(text[:at]), call, slot)
        at = text.find(":", at + 1)
    raise TrueupError(
        f"{one_line(text)} names no tensor.\n"
        "  expected: CAP:CALL:SLOT (CAP a directory, CALL a seq or scope/op#n, SLOT as `trueup show` lists it), or a .npy file\n"
        f"  got:      {one_line(text)!r}\n"
        "  next:     such as runs/cpu:neck.lstm/torch.lstm#0:output.0; `trueup show CAP` lists calls and slots"
    )


def operand(address: Address, chosen: Selection) -> Operand:
    """Return the tensor at an address, of the chosen calls of a capture; raises TrueupError if it is not there or unreadable."""
    if not address.call:
        values = read_npy(address.path)
        return Operand(one_line(str(address.path)), "", values.dtype.name, values.shape, values)
    from trueup.foundation.store import open_capture

    capture = open_capture(address.path)
    call = find_call(capture, replace(chosen, path=address.path), address.call)
    return recorded(capture, address.path, call, record_of(call, address.slot))


def recorded(capture: Capture, path: Path, call: Call, record: dict[str, Any]) -> Operand:
    """Return the tensor of a slot's record; raises TrueupError if its elements cannot be read."""
    name = f"{one_line(str(path))}  {call.name}  {one_line(record['slot'])}"
    where = f"seq {call.seq}, {call.place}"
    shape = record.get("shape")
    plain = isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**48 for size in shape)
    sizes = tuple(shape) if plain and shape is not None else None
    if record.get("dtype") is None or sizes is None:
        return Operand(name, where, record.get("dtype"), sizes, None, missing="is no tensor")
    kept = Operand(name, where, record["dtype"], sizes, None, _stats(record), None, record.get("digest"))
    if record.get("payload_segment") is not None:
        return replace(kept, values=payload_of(capture, record))
    if kept.stats is None:
        return replace(kept, missing="only a digest was kept" if kept.digest else "nothing was kept but its shape")
    return replace(kept, sketch=_sketch(capture, record), missing="only statistics were kept")


def _stats(record: dict[str, Any]) -> TensorStats | None:
    if record.get("n_nan") is None:
        return None
    numbers = {name: float("nan") if record[name] is None else record[name] for name in NUMBERS}
    return TensorStats(numel=record["numel"], digest=record.get("digest"), **numbers)  # type: ignore[arg-type]


def _sketch(capture: Capture, record: dict[str, Any]) -> NDArray[np.float64] | None:
    from trueup.foundation.store import sketch_matrix

    place = {name: record[name] for name in ("rank", "step", "seq", "slot")}
    rows = sketch_matrix(capture.records(["sketch"], **place).column("sketch"))
    return None if len(rows) != 1 or np.isnan(rows).any() else rows[0]
