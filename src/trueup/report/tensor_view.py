"""One tensor of a capture on a terminal: its numbers, a histogram and its first elements, as far as they were kept."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from trueup.model import TrueupError
from trueup.report.capture_view import CaptureLike
from trueup.report.selecting import COLUMNS, Call, Selection, chosen_rows, find_call
from trueup.report.wording import clean, number, one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

BINS = 16
BAR = 40
ELEMENTS = 12
BLOCKS = " ▏▎▍▌▋▊▉█"
LABELS = {
    "min": "min", "max": "max", "mean": "mean", "l2": "l2", "n_nan": "NaN", "n_posinf": "+inf", "n_neginf": "-inf",
    "n_zero": "zero", "n_subnormal": "subnormal", "n_saturated": "at the dtype's maximum", "digest": "digest",
}  # fmt: skip


def render_tensor(capture: CaptureLike, chosen: Selection, call: str, slot: str, console: Console) -> None:
    """Print one slot of one call.

    Raises:
        TrueupError: the call or the slot is not there, or its payload cannot be read.
    """
    found = find_call(chosen_rows(capture, chosen, COLUMNS), call)
    record = _record(found, slot)
    scope = f"{found.scope}/" if found.scope else ""
    title = f"{scope}{found.op}#{found.ordinal}  {record['slot']}"
    where = f"seq {found.seq}, {found.phase}, step {found.step}, rank {found.rank}, {found.level}"
    console.print(Text.assemble((one_line(title), "bold"), "  ", (one_line(where), "dim")))
    _source(capture, record, console)
    if record.get("value") is not None and record.get("numel") is None:
        console.print(Text(_argument(record["value"])))
        return
    console.print()
    console.print(_numbers(record))
    console.print()
    _elements(capture, record, found, console)


def histogram(values: NDArray[Any], bins: int = BINS) -> list[tuple[float, float, int]]:
    """Count finite elements in equal bins between their extremes, one bin if they are (nearly) all equal.

    Returns ``(from, to, count)`` rows. Of complex elements the magnitude is taken.
    """
    held = np.abs(values) if np.iscomplexobj(values) else np.asarray(values)
    finite = held.astype(np.float64, copy=False).ravel()
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return []
    low, high = float(finite.min()), float(finite.max())
    scale = 1.0 if high / 4 - low / 4 < np.finfo(np.float64).max / 4 else 4.0  # the span must be a float64 itself
    if (high / scale - low / scale) <= 2 * bins * np.spacing(max(abs(low), abs(high)) / 4) * 4 / scale:
        return [(low, high, int(finite.size))]
    counts, edges = np.histogram(finite / scale, bins=bins)
    edges = edges * scale
    edges[np.abs(edges) < (high / scale - low / scale) * 1e-6] = 0.0  # an edge at zero, but for rounding
    return [(float(a), float(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]


def bar(share: float, width: int = BAR) -> str:
    """Draw a bar in eighths of a character; anything above zero is seen."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()


def _record(call: Call, slot: str) -> dict[str, Any]:
    for record in call.slots:
        if record["slot"] == slot:
            return record
    there = ", ".join(str(record["slot"]) for record in call.slots)
    raise TrueupError(
        f"{call.op}#{call.ordinal} has no slot {slot}.\n  expected: one of {one_line(there)}\n"
        f"  got:      {slot!r}\n  next:     name one of its slots"
    )


def _source(capture: CaptureLike, record: dict[str, Any], console: Console) -> None:
    frames, line = capture.sites(record["rank"]).get(record.get("site"), ((), None))
    if frames:
        text = f"  {one_line(line.strip())}" if line else ""
        console.print(Text(f"your code: {one_line(frames[0])}{text}", "dim"))
    if record.get("producer_seq") is not None:
        console.print(Text(f"written by seq {record['producer_seq']}", "dim"))


def _argument(value: str) -> str:
    try:
        return clean(json.dumps(json.loads(value), indent=2, ensure_ascii=False))
    except ValueError:
        return clean(value)


def _numbers(record: dict[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    shape = record.get("shape")
    sizes = f"[{', '.join(map(str, shape))}]" if isinstance(shape, list) else str(shape or "")
    grid.add_row(Text("tensor", "dim"), Text(one_line(f"{record['dtype']} {sizes} on {record['device']}")))
    for key, label in LABELS.items():
        value = record.get(key)
        if value is None or (key.startswith("n_") and not value):
            continue
        shown = f"{value:,}" if isinstance(value, int) else number(value, 7) if isinstance(value, float) else value
        grid.add_row(Text(label, "dim"), Text(one_line(shown)))
    return grid


def _elements(capture: CaptureLike, record: dict[str, Any], call: Call, console: Console) -> None:
    if record.get("payload_segment") is None or record.get("payload_key") is None:
        kept = "statistics" if record.get("l2") is not None else "a digest"
        console.print(
            Text(f"Only {kept} of it {'were' if kept == 'statistics' else 'was'} kept. For its elements:", "dim")
        )
        what = f"--include {shlex.quote(one_line(call.scope or call.op))} --steps {call.step}"
        command = f"trueup capture -o DIR --detail tensor {what} -- COMMAND"
        console.print(Text(f"  {command}"), soft_wrap=True)
        return
    place = [record["rank"], *(record.get(f"payload_{part}") for part in ("segment", "key", "view"))]
    values = np.asarray(capture.payload(*place))
    rows = histogram(values)
    most = max((count for *_, count in rows), default=0)
    edges = [(number(low), number(high), count) for low, high, count in rows]
    left = max((len(low) for low, _, _ in edges), default=0)
    right = max((len(high) for _, high, _ in edges), default=0)
    for low, high, count in edges:
        console.print(Text(f"{low:>{left}} to {high:>{right}}  {bar(count / most):<{BAR}} {count:>9,}"), soft_wrap=True)
    if rows:
        console.print()
    first = values.ravel()[:ELEMENTS].tolist()
    shown = "  ".join(number(float(value), 7) if isinstance(value, float) else str(value) for value in first)
    console.print(Text(f"first elements  {shown}{'  …' if values.size > ELEMENTS else ''}" if first else "no elements"))
