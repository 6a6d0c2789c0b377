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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from trueup.doors.report.document import fields, headed, json_plain
from trueup.doors.report.html import ours, page
from trueup.doors.report.terminal import entry, listing, plain_table, print_lines, print_more, section
from trueup.foundation.settings import origin
from trueup.foundation.words.setting_sentence import subject, values
from trueup.foundation.words.wording import clean, counted, one_line, short_source

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.audit import Census, Check, Similarity
    from trueup.analysis.audit.amp import Amp
    from trueup.analysis.audit.preflight import Preflight


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
