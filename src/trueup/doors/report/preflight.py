"""What `trueup.preflight` found: on a terminal a sentence and a row for each setting, and the same as JSON.

DIFFERS  AdamW lr: 0.001 in the baseline, 0.0011 in the candidate

group      setting   baseline  candidate  numbers
optimizer  AdamW lr     0.001     0.0011  changes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.doors.report.document import headed, json_plain
from trueup.doors.report.terminal import plain_table, print_lines, print_more
from trueup.foundation.settings import origin
from trueup.foundation.words.setting_sentence import subject, values
from trueup.foundation.words.wording import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.audit.preflight import Preflight

HEADS = {"clear": "CLEAR  ", "differs": "DIFFERS  ", "could not tell": "COULD NOT TELL  "}


def render(result: Preflight, limit: int, console: Console) -> None:
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
    table = plain_table("group", "setting", "baseline", "candidate", "numbers")
    shown = result.settings[:limit]
    for one in shown:
        since = "" if one.step is None else f" (from step {one.step})"
        style = {"changes": "red", "may": "", "cannot": "dim"}[one.severity]
        table.add_row(one.group, subject(one) + since, *values(one), one.severity, style=style)
    console.print()
    console.print(table)
    print_more(console, len(result.settings) - limit, f" (--limit {len(result.settings)} shows all)")
    whence = {f"{one.severity:9}{one.group}: {said}": None for one in shown if (said := origin(one.group, one.name))}
    for said in whence:
        print_lines(console, [said], 9, "dim")


def document(result: Preflight) -> dict[str, Any]:
    """Return all of it as JSON-ready data."""
    settings = [json_plain(one) | {"text": subject(one), "origin": origin(one.group, one.name)} for one in result.settings]
    found = headed("trueup-preflight", result, "candidate broken odd unread came_along looks")
    return found | {"baseline": result.baseline or None, "settings": settings}
