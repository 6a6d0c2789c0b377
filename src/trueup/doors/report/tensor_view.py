"""One tensor of a capture on a terminal: its numbers, a histogram and its first elements, as far as they were kept."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from trueup.doors.report.capture_view import CaptureLike
from trueup.doors.report.histograms import bar, histogram
from trueup.doors.report.npy import write_npy
from trueup.doors.report.selecting import Call, Selection, find_call
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import clean, number, one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

BAR = 40
ELEMENTS = 12
LABELS = {
    "min": "min", "max": "max", "mean": "mean", "l2": "l2", "n_nan": "NaN", "n_posinf": "+inf", "n_neginf": "-inf",
    "n_zero": "zero", "n_subnormal": "subnormal", "n_saturated": "at the dtype's maximum", "digest": "digest",
    "foreign_checksum": "the tool's checksum", "foreign_statistics": "as the tool said",
}  # fmt: skip


def render_tensor(
    capture: CaptureLike, chosen: Selection, call: str, slot: str, console: Console, npy: Path | None = None, *, first: bool = True
) -> None:
    """Print one slot of one call, ``first``: its first elements too, and write its elements to ``npy``.

    Raises:
        TrueupError: the call or the slot is not there, its payload cannot be read, or there is none to write.
    """
    found = find_call(capture, chosen, call)
    record = record_of(found, slot)
    if npy is not None and record.get("payload_segment") is None:
        raise TrueupError(
            f"{npy} was not written: no elements of {one_line(found.op)}#{found.ordinal} {one_line(slot)} were kept.\n"
            f"  expected: a capture with --detail tensor\n  got:      {_kept(record)[0]}\n  next:     {_again(found, record)}"
        )
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
    if record.get("payload_segment") is None:
        kept, verb = _kept(record)
        console.print(Text(f"Only {kept} of it {verb} kept. For its elements:", "dim"))
        console.print(Text(f"  {_again(found, record)}"), soft_wrap=True)
        return
    values = payload_of(capture, record)
    _elements(values, console, first=first)
    if npy is not None:
        console.print(Text(write_npy(values, npy)), soft_wrap=True)


def payload_of(capture: CaptureLike, record: dict[str, Any]) -> NDArray[Any]:
    """Return the elements of a slot in its recorded shape, mapped, their bytes checked against its digest.

    Raises:
        TrueupError: they cannot be read, or are not those that were recorded; it names the slot.
    """
    place: list[Any] = [record[name] for name in ("rank", "payload_segment", "payload_key", "payload_view", "digest")]
    try:
        values = np.asarray(capture.payload(*place))
    except TrueupError as error:
        scope = f"{record['scope']}/" if record["scope"] else ""
        name = one_line(f"{scope}{record['op']}#{record['ordinal']} {record['slot']}")
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
    """Return the record of a slot.

    Raises:
        TrueupError: the call has no such slot.
    """
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
    device = "" if record.get("device") is None else f" on {record['device']}"  # other tools do not say
    grid.add_row(Text("tensor", "dim"), Text(one_line(f"{record['dtype'] or 'dtype not known'} {sizes}{device}")))
    for key, label in LABELS.items():
        value = record.get(key)
        if value is None or (key.startswith("n_") and not value):
            continue
        shown = f"{value:,}" if isinstance(value, int) else number(value, 7) if isinstance(value, float) else value
        grid.add_row(Text(label, "dim"), Text(one_line(shown)))
    return grid


def _elements(values: NDArray[Any], console: Console, *, first: bool) -> None:
    rows = histogram(values)
    most = max((count for *_, count in rows), default=0)
    edges = [(number(low), number(high), count) for low, high, count in rows]
    left = max((len(low) for low, _, _ in edges), default=0)
    right = max((len(high) for _, high, _ in edges), default=0)
    for low, high, count in edges:
        console.print(Text(f"{low:>{left}} to {high:>{right}}  {bar(count / most, BAR):<{BAR}} {count:>9,}"), soft_wrap=True)
    if not first and values.size:
        return
    if rows:
        console.print()
    head = np.asarray(values.flat[:ELEMENTS]).tolist()
    shown = "  ".join(number(float(value), 7) if isinstance(value, float) else str(value) for value in head)
    console.print(Text(f"first elements  {shown}{'  …' if values.size > ELEMENTS else ''}" if head else "no elements"))
