"""``overflow.json``: what overflowed, as a document that a program can rely on; and the page beside it. Meaning: docs/overflow.md.

Strict JSON: a number that JSON cannot hold is one of the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

On a terminal: the sentence first, then the call in numbers, what led to it, what to do.

    FOUND  crf, forward, step 0, rank 0 (torch.Tensor.add): overflow: of clean inputs up to 6.2e4 (float16) it made 2 +Inf of …
           accuracy-relevant: the next step reads weights that are bad because of it
           your code: bert_crf/bert_crf.py:44 in partition

      slot        tensor               min      max     mean       l2   bad
      input.0     float16 [8, 7]     58112    62048    60102    4.5e5

The page is one file that needs no network, in the style of the comparison's report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.doors.report.document import fields, headed, json_plain
from trueup.doors.report.result_view import numbers
from trueup.doors.report.saving import save_json, write_text
from trueup.doors.report.terminal import plain_table, print_lines, print_more, section
from trueup.foundation.model import TensorStats
from trueup.foundation.words.anomaly_sentence import HEADS, bad_numbers, counts, operators
from trueup.foundation.words.answers import overflow_answers
from trueup.foundation.words.wording import clean, number, one_line, short_source, shorten

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.foundation.facts.anomaly import Anomaly, OverflowResult, Place, ScaleStep


def document(result: OverflowResult) -> dict[str, Any]:
    """Return a result as JSON-ready data."""
    return headed("trueup-overflow", result, "would_overflow ranks steps calls measured") | {
        "capture": result.path,
        "anomalies": [_anomaly(one) for one in result.anomalies],
        "expected": [{"op": name, "calls": count} for name, count in result.expected],
        "loss_scale": {"history": result.scale_history, "steps": json_plain(result.scale)},
    } | fields(result, "try_next notes")


def save_page(result: OverflowResult, directory: Path) -> Path:
    """Write index.html and overflow.json into a directory, made if need be; raises TrueupError where they cannot be written."""
    text = render_page(result)
    save_json(document(result), directory / "overflow.json")
    write_text(text, directory / "index.html", "a directory that can be made and written, for index.html")
    return directory


def _anomaly(one: Anomaly) -> dict[str, Any]:
    slots = [fields(s, "slot dtype shape") | {"bad": bad_numbers(s.bad), "held": json_plain(s.stats)} for s in one.slots]
    led = [{"call": json_plain(by.place)} | fields(by, "slot dtype shape largest") | {"bad": bad_numbers(by.bad)} for by in one.led]
    said = fields(one, "kind severity sentence transient matters because run_next carried policy")
    followed = fields(one, "reached healed_by again notes")
    return said | {"call": json_plain(one.place), "slots": slots, "led": led} | followed


FURTHER, NOTES, SLOTS = 10, 6, 12
COLOURS = {"found": "bold red", "clean": "bold green", "harmless": "bold green", "inconclusive": "bold yellow"}


def render(result: OverflowResult, console: Console) -> None:
    """Print a result."""
    lines = clean(result.sentence).splitlines()
    print_lines(console, lines, len(HEADS[result.verdict]), COLOURS[result.verdict])
    first = result.first
    if first is not None:
        _slots(first, console)
        if first.led:
            section(console, "what led to it, nearest first", _leading(first))
        if first.policy:
            section(console, "a policy.toml that runs the call in a wider dtype", Text(first.policy.rstrip(), "cyan"))
    if result.scale_history:
        section(console, "loss scale", Text(result.scale_history))
    if len(result.anomalies) > 1:
        section(console, "further findings", _further(result.anomalies[1 : FURTHER + 1]))
        print_more(console, len(result.anomalies) - 1 - FURTHER, "; overflow.json lists all")
    if result.notes:
        section(console, "notes", Text("\n".join(one_line(note) for note in result.notes[:NOTES])))
    _next(result, console)


def _next(result: OverflowResult, console: Console) -> None:
    first, head = result.first, "next  "
    what = "whether the clean numbers are the right ones:" if first and first.matters == "harmless" else "whether it matters:"
    for said, command in ((what, first.run_next if first else ""), ("whether the policy heals it:", result.try_next)):
        if command:
            if head.strip():
                console.print()
            console.print(Text.assemble((head, "bold"), said))
            console.print(Text(" " * 6 + command, "cyan"), soft_wrap=True)
            head = " " * 6


def _slots(first: Anomaly, console: Console) -> None:
    shown = [slot for slot in first.slots if isinstance(slot.stats, TensorStats) or slot.bad]
    if not shown:
        return
    table = plain_table("slot", "tensor", ">min", ">max", ">mean", ">l2", "bad")
    shown.sort(key=lambda slot: not slot.bad)  # stable: the bad ones are among those shown
    for slot in sorted(shown[:SLOTS], key=lambda slot: not slot.slot.startswith(("input.", "param.", "grad_output."))):
        held = numbers(slot.stats) if isinstance(slot.stats, TensorStats) else [""] * 4
        table.add_row(Text(one_line(slot.slot)), Text(one_line(f"{slot.dtype} {slot.shape}")), *held, Text(counts(slot), "red"))
    section(console, None, table)
    print_more(console, len(shown) - SLOTS, "", "slot")


def _leading(first: Anomaly) -> Table:
    table = Table.grid(padding=(0, 2))
    for one in first.led:
        size = f"up to {number(one.largest)}"
        table.add_row(Text(shorten(_name(one.place), 60)), Text(one_line(f"{one.slot} {one.dtype} {one.shape}")), Text(size))
    return table


def _further(found: tuple[Anomaly, ...]) -> Table:
    table = Table.grid()
    for one in found:
        table.add_row(Text(clean(one.sentence), overflow="fold"))
        source = f"; your code: {short_source(one.place.source)}" if one.place.source else ""
        table.add_row(Padding(Text(clean(f"{one.matters}: {one.because}{source}"), "dim", overflow="fold"), (0, 0, 0, 4)))
    return table


CARDS = 50
STEPS = 500  # steps of a loss scale that are listed; the line has all
CURVE = 720, 120  # width and height of that line in pixels
RULE = (
    "An infinity (or a dtype's largest number, which masks are made of) is expected where every call that reads it, in forward "
    "and in backward, gives clean and finite numbers, or numbers that are healed themselves. No list of operators decides that. "
    "Who asked for an infinity (it stands among the arguments of the call) decides only whom to name where it is not healed."
)


def render_page(result: OverflowResult) -> str:
    """Return the text of index.html."""
    from trueup.doors.report.html import ours, page

    return page(
        "overflow.html.j2",
        [ours("page.js")],
        result=result,
        said=overflow_answers(result),
        tone={"found": "deviates", "inconclusive": "inconclusive"}.get(result.verdict, "aligned"),
        cards=[_card(one) for one in result.anomalies[:CARDS]],
        scale=result.scale[:STEPS],
        curve=scale_curve(result.scale),
        rule=RULE,
    )


def scale_curve(history: Sequence[ScaleStep]) -> dict[str, Any] | None:
    """Lay out the loss scale of the first rank over the steps, logarithmic; None where there is no line to draw."""
    first = min((one.rank for one in history), default=0)
    mine = [one for one in history if one.rank == first and one.scale > 0 and math.isfinite(one.scale)]
    if len({one.step for one in mine}) < 2:
        return None
    powers = [math.log2(one.scale) for one in mine]
    low, high = math.floor(min(powers)), max(math.ceil(max(powers)), math.floor(min(powers)) + 1)
    width, height = CURVE
    left, last = mine[0].step, max(mine[-1].step - mine[0].step, 1)
    points = [
        (round((one.step - left) / last * width, 1), round((high - power) / (high - low) * height, 1))
        for one, power in zip(mine, powers, strict=True)
    ]
    return {
        "width": width, "height": height, "low": 2.0**low, "high": 2.0**high, "first": left, "last": mine[-1].step,
        "path": "M" + " L".join(f"{x},{y}" for x, y in points),
        "skipped": [(*point, one) for point, one in zip(points, mine, strict=True) if one.skipped][:STEPS],
    }  # fmt: skip


def _card(one: Anomaly) -> dict[str, Any]:
    return {
        "one": one,
        "operators": operators(one),
        "slots": [
            (slot, numbers(slot.stats) if isinstance(slot.stats, TensorStats) else None, counts(slot), str(slot.stats or ""))
            for slot in one.slots
        ],
        "led": [(_name(led.place), led, number(led.largest), bad_numbers(led.bad)) for led in one.led],
    }


def _name(place: Place) -> str:
    return one_line(f"{place.scope}/{place.op}" if place.scope else place.op)
