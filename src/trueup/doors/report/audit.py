"""What an audit found, on a terminal and as strict JSON (a number that JSON cannot hold is a text: ``"NaN"``, ``"Infinity"``).

`trueup.check`: a sentence for each check, then what proves it.

    casts      1 dangerous cast (106 looked at): torch.Tensor.half, forward, step 0, rank 0, float32 to float16: 55 of 64 elements
               become infinite: the input reaches 7.70e5, the largest float16 is 65504 [net/train.py:11 in forward]
    precision  mixed precision is on: 96 of 98 matrix products and convolutions run in bfloat16, 2 in float32: head aten::addmm

      phase      bfloat16  float32
      forward          32        1
      backward         64        1

`trueup.preflight`: a sentence, and a row for each setting.

    DIFFERS  AdamW lr: 0.001 in the baseline, 0.0011 in the candidate

    group      setting   baseline  candidate  numbers
    optimizer  AdamW lr     0.001     0.0011  changes

Its page holds all of it, the rows by group.

`trueup.overflow`: the sentence first, then the call in numbers, what led to it, what to do. Meaning: docs/overflow.md.

    FOUND  crf, forward, step 0, rank 0 (torch.Tensor.add): overflow: of clean inputs up to 6.2e4 (float16) it made 2 +Inf of …
           accuracy-relevant: the next step reads weights that are bad because of it
           your code: bert_crf/bert_crf.py:44 in partition

      slot        tensor               min      max     mean       l2   bad
      input.0     float16 [8, 7]     58112    62048    60102    4.5e5

Its page is one file that needs no network, in the style of the comparison's report.
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
from trueup.doors.report.html import ours, page
from trueup.doors.report.result_view import numbers
from trueup.doors.report.saving import save_json, write_text
from trueup.doors.report.terminal import entry, listing, plain_table, print_lines, print_more, section
from trueup.foundation.model import TensorStats
from trueup.foundation.settings import origin
from trueup.foundation.words.anomaly_sentence import HEADS as ANOMALY_HEADS
from trueup.foundation.words.anomaly_sentence import bad_numbers, counts, operators
from trueup.foundation.words.answers import overflow_answers
from trueup.foundation.words.setup_sentence import subject, values
from trueup.foundation.words.wording import clean, counted, number, one_line, short_source, shorten

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.audit import Census, Check, Similarity
    from trueup.analysis.audit.amp import Amp
    from trueup.analysis.audit.preflight import Preflight
    from trueup.foundation.facts.anomaly import Anomaly, OverflowResult, Place, ScaleStep


def check_document(result: Check) -> dict[str, Any]:
    """Return a result as JSON-ready data: the fields of `trueup.analysis.audit`'s facts by their names."""
    return {
        "schema": "trueup-check", "schema_version": 1, "exit_code": result.exit_code, "capture": result.path,
        "against": result.against, "sentences": dict(result.sentences),
    } | fields(result, "casts census dtypes graph notes")  # fmt: skip


def amp_document(result: Amp) -> dict[str, Any]:
    """Return what was found of mixed precision as JSON-ready data."""
    names = "sentence state dtype modules scale scale_history first_scale advice instead"
    return {"schema": "trueup-amp", "schema_version": 1, "exit_code": result.exit_code} | fields(result, names)


def render_amp(result: Amp, limit: int, console: Console) -> None:
    """Print the conclusion, up to ``limit`` modules of other precision than most, and each advice with its policy."""
    print_lines(console, [result.sentence], 0, "bold")
    if result.state not in ("", "off"):
        rows = [(one.scope or "(the model)", one.kind, one.weights, one.products) for one in result.modules]
        listing(console, ("module", "kept", "weights", "products"), rows, limit)
    for one in result.advice:
        entry(console, one.what, [("why", clean(one.why)), *([("policy", clean(one.policy.strip()))] if one.policy else [])])


INDENT = 11


def render_check(result: Check, limit: int, console: Console) -> None:
    """Print the conclusions and, of each check, up to ``limit`` lines of what it found."""
    for name, sentence in result.sentences:
        print_lines(console, [f"{name:{INDENT}}{clean(sentence)}"], INDENT, _colour(result, name))
    for note in result.notes:
        print_lines(console, [f"{'note':{INDENT}}{one_line(note)}"], INDENT, "dim")
    _dtypes(result.census, console)
    _casts(result, limit, console)
    _others(result, limit, console)
    if result.graph is not None:
        _graph(result.graph, limit, console)


def _colour(result: Check, name: str) -> str:
    graph, dtypes = result.graph, result.dtypes
    bad = {
        "casts": bool(result.casts.dangerous), "dtypes": dtypes is not None and dtypes.differs,
        "graph": graph is not None and not graph.same,
    }  # fmt: skip
    return "bold red" if bad.get(name) else "bold"


def _dtypes(census: Census, console: Console) -> None:
    dtypes = list(census.counts())
    if not dtypes:
        return
    table = plain_table("phase", *(f">{dtype}" for dtype in dtypes))
    for phase in ("forward", "backward"):
        counts = census.counts(phase)
        if counts:
            table.add_row(phase, *(f"{counts.get(dtype, 0):,}" for dtype in dtypes))
    _show(table, console)
    rare = [one for one in census.products if one.dtype != dtypes[0]]
    if len(dtypes) > 1:
        table = plain_table("in another dtype", "operator", "phase", "dtype", ">calls")
        for one in rare[:LISTED]:
            table.add_row(one_line(one.scope or "outside any module"), one_line(one.op), one.phase, one.dtype, f"{one.calls:,}")
        _show(table, console, len(rare) - LISTED)


LISTED = 10


def _casts(result: Check, limit: int, console: Console) -> None:
    """List casts; the first dangerous one stands in the sentence already."""
    rest = [one for one in result.casts.casts if one is not next(iter(result.casts.dangerous), None)]
    if not rest:
        return
    table = plain_table("further casts", "")
    for one in rest[:limit]:
        times = f" ({one.times:,} times)" if one.times > 1 else ""
        word = Text("dangerous", "red") if one.dangerous else Text("lossy", "dim")
        table.add_row(word, Text(clean(one.sentence) + times))
    _show(table, console, len(rest) - limit)


def _others(result: Check, limit: int, console: Console) -> None:
    pairs: Sequence[tuple[object, object]] = () if result.dtypes is None else result.dtypes.other
    if not pairs:
        return
    assert result.dtypes is not None
    table = plain_table("other dtypes", "operator", "phase", "baseline", "candidate")
    for before, after in result.dtypes.other[:limit]:
        table.add_row(one_line(after.scope or "outside any module"), one_line(after.op), after.phase, before.dtype, after.dtype)
    _show(table, console, len(pairs) - limit)


def _graph(graph: Similarity, limit: int, console: Console) -> None:
    for title, rows in (("missing in the candidate", graph.missing), ("only in the candidate", graph.extra)):
        if rows:
            table = plain_table(title, "operator", "phase", ">baseline", ">candidate", "your code")
            for one in rows[:limit]:
                scope, source = one_line(one.scope or "outside any module"), short_source(one.source) if one.source else ""
                table.add_row(scope, one_line(one.op), one.phase, f"{one.baseline:,}", f"{one.candidate:,}", source)
            _show(table, console, len(rows) - limit)
    if graph.missing or graph.extra:
        wired = "" if graph.edges != graph.edges else f", of the edges {graph.edges:.4f}"
        of = f"Dice coefficient of {graph.baseline:,} and {counted(graph.candidate, 'call')}, level {graph.level}"
        console.print(Text(f"  similarity of the calls {graph.calls:.4f}{wired} ({of})", "dim"))


def _show(table: Table, console: Console, more: int = 0) -> None:
    section(console, None, table)
    print_more(console, more, ": raise --limit")


HEADS = {"clear": "CLEAR  ", "differs": "DIFFERS  ", "could not tell": "COULD NOT TELL  "}


def render_preflight(result: Preflight, limit: int, console: Console) -> None:
    """Print the conclusion, then up to ``limit`` settings that differ, and what else was found."""
    head = HEADS[result.verdict]
    print_lines(console, [head + one_line(result.sentence)], len(head), "bold red" if result.verdict == "differs" else "bold")
    for name, sentences in (
        ("required", result.broken), ("odd", result.odd), ("port", (result.came_along,) if result.came_along else ()),
        ("look", result.looks), ("note", result.unread),
    ):  # fmt: skip
        for sentence in sentences:
            if sentence != result.sentence:
                print_lines(console, [f"{name:9}{one_line(sentence)}"], 9, "dim" if name == "note" else "")
    if not result.settings:
        return
    rows = [
        (one.group, subject(one) + ("" if one.step is None else f" (from step {one.step})"), *values(one), one.severity)
        for one in result.settings
    ]
    styles = [{"changes": "red", "may": "", "cannot": "dim"}[one.severity] for one in result.settings]
    listing(console, ("group", "setting", "baseline", "candidate", "numbers"), rows, limit, styles, whole=1)
    shown = result.settings[:limit]
    whence = {f"{one.severity:9}{one.group}: {said}": None for one in shown if (said := origin(one.group, one.name))}
    if whence:
        console.print()
    for said in whence:
        print_lines(console, [said], 9, "dim")


def preflight_document(result: Preflight) -> dict[str, Any]:
    """Return all of it as JSON-ready data."""
    settings = [json_plain(one) | {"text": subject(one), "origin": origin(one.group, one.name)} for one in result.settings]
    found = headed("trueup-preflight", result, "candidate broken odd unread came_along looks")
    return found | {"baseline": result.baseline or None, "settings": settings}


TONES = {"clear": "aligned", "differs": "deviates", "could not tell": "inconclusive"}
SAID = (
    ("required", "broken", "values that must hold and do not"), ("odd", "odd", "wrong in nearly every training"),
    ("look", "looks", "right in many trainings, and the cause in some"), ("notes", "unread", "what could not be told"),
)  # fmt: skip
"""Sections of the page that are sentences: anchor, field, and what they are."""


def preflight_page(result: Preflight) -> str:
    """Return the text of a page with the conclusion, all settings that differ, and what else was found."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for one in result.settings:
        since = "" if one.step is None else f" (from step {one.step})"
        row = subject(one) + since, *values(one), one.severity, origin(one.group, one.name)
        groups.setdefault(one.group, []).append(row)
    said = [(anchor, title, found) for anchor, name, title in SAID if (found := getattr(result, name))]
    return page(
        "preflight.html.j2", [ours("page.js")], found=result, head=HEADS[result.verdict].strip(), groups=groups, said=said,
        tone=TONES[result.verdict],
    )  # fmt: skip


def overflow_document(result: OverflowResult) -> dict[str, Any]:
    """Return a result as JSON-ready data."""
    return headed("trueup-overflow", result, "would_overflow ranks steps calls measured") | {
        "capture": result.path,
        "anomalies": [_anomaly(one) for one in result.anomalies],
        "expected": [{"op": name, "calls": count} for name, count in result.expected],
        "loss_scale": {"history": result.scale_history, "steps": json_plain(result.scale)},
    } | fields(result, "try_next notes")


def save_overflow(result: OverflowResult, directory: Path) -> Path:
    """Write index.html and overflow.json into a directory, made if need be; raises TrueupError where they cannot be written."""
    text = overflow_page(result)
    save_json(overflow_document(result), directory / "overflow.json")
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


def render_overflow(result: OverflowResult, console: Console) -> None:
    """Print a result."""
    lines = clean(result.sentence).splitlines()
    print_lines(console, lines, len(ANOMALY_HEADS[result.verdict]), COLOURS[result.verdict])
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


def overflow_page(result: OverflowResult) -> str:
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
