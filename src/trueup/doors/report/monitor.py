"""Monitored runs on a terminal and as documents: two side by side, and one as a page with heat maps: step x rank x module, the line
behind each cell.

DEVIATES  gradient_norm of blocks.1.fc1 leaves first, at step 412
          0.158 in the baseline, 0.231 in the candidate: 46 % higher; up to 18 % is noise there
          it differs from step 411 on; of 193 series over 1,000 steps (0 to 999) 12 leave and 180 differ
          the loss leaves at step 430

2 ALERTS  step 412, rank 0: gradient_norm of blocks.1.fc1 spikes to 3.1, 24 robust deviations above 0.16, ...

    series         rows  columns      low     high
    gradient_norm    15    1,000    0.014     3.12
"""

from __future__ import annotations

import base64
import fnmatch
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from trueup.analysis.monitor.comparing import Compared, size
from trueup.analysis.monitor.kinds import rows
from trueup.analysis.monitor.trend import Trend
from trueup.doors.report.document import fields, headed, json_plain
from trueup.doors.report.html import embedded, ours, page
from trueup.doors.report.saving import save_json, write_text
from trueup.doors.report.terminal import COLOURS, labelled, listing, print_lines
from trueup.foundation.words.wording import clean, counted, number, percent

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.foundation.store.series import SeriesReader

COLUMNS = (">at", ">rank", "series", ">baseline", ">candidate", ">apart", ">noise")

MAPS = ("series", ">rows", ">columns", ">low", ">high")
MAPS_SHOWN = 20


def compared_document(found: Compared) -> dict[str, Any]:
    """Return it as JSON-ready data."""
    return headed("trueup-series", found, "differing series steps") | fields(found, "left notes")


def render_compared(found: Compared, limit: int, console: Console) -> None:
    """Print it, with up to ``limit`` of the series that leave."""
    print_lines(console, clean(found.sentence).splitlines(), 10, COLOURS[found.verdict])
    several = any(one.rank for one in found.left)
    rows = [
        (
            f"{one.beyond:,}", str(one.rank), clean(one.series), number(one.baseline, 4), number(one.candidate, 4),
            size(one.difference, one), size(one.noise, one),
        )
        for one in found.left
    ]  # fmt: skip
    columns = COLUMNS if several else [name for name in COLUMNS if name != ">rank"]
    listing(console, columns, rows if several else [(one[0], *one[2:]) for one in rows], limit)
    for note in found.notes:
        console.print()
        console.print(labelled([("note", Text(clean(note), overflow="fold"))]))


SHOWN = ("series", ">steps", ">first", ">last", ">least", ">largest")
RANKS = (">ranks apart", ">odd rank")


def shown_document(reader: SeriesReader, scope: str | None) -> dict[str, Any]:
    """Return what a monitored run holds, joined over its ranks; ``scope``: a glob on modules."""
    found = [
        one for one in rows(reader)
        if scope is None or fnmatch.fnmatchcase(one.series.partition("/")[2], scope) or fnmatch.fnmatchcase(one.series, scope)
    ]  # fmt: skip
    steps = np.unique(np.concatenate([reader.steps(rank) for rank in reader.ranks])) if reader.ranks else np.zeros(0, np.int64)
    return {
        "schema": "trueup-show-series", "schema_version": 1, "path": str(reader.capture.path), "ranks": reader.ranks,
        "steps": [int(steps[0]), int(steps[-1]), len(steps)] if len(steps) else [], "problems": reader.problems,
        "series": [fields(one, "series taken first last low high apart odd") for one in found],
    }  # fmt: skip


def render_shown(reader: SeriesReader, document: dict[str, Any], limit: int, console: Console) -> None:
    """Print it."""
    first = next(iter(reader.capture.ranks.values()), {})
    versions = first.get("versions")
    framework = str(first.get("framework", "unknown framework"))
    version = f" {versions[framework]}" if isinstance(versions, dict) and framework in versions else ""
    span = document["steps"]
    said = f", {counted(span[2], 'step')} ({span[0]:,} to {span[1]:,})" if span else ", no steps"
    some = document["series"]
    held = f"{counted(len(reader.ranks), 'rank')}{said}, {counted(len(some), 'series', 'series')} of a monitor"
    console.print(Text(clean(f"{document['path']}  {framework}{version}, {held}"), overflow="fold"))
    for problem in document["problems"]:
        console.print(labelled([("note", Text(clean(problem), overflow="fold"))]))
    many = len(reader.ranks) > 1
    lines = []
    for one in some:
        numbers = [number(float(one[name]), 4) for name in ("first", "last", "low", "high")]  # NaN is a word in the document
        line = [clean(one["series"]), f"{one['taken']:,}", *numbers]
        lines.append([*line, percent(float(one["apart"])), "" if one["odd"] is None else str(one["odd"])] if many else line)
    listing(console, (*SHOWN, *RANKS) if many else SHOWN, lines, limit)


def trend_document(found: Trend) -> dict[str, Any]:
    """Return it as JSON-ready data: everything but the cells."""
    maps = [{"kind": one.kind, "rows": len(one.rows), "columns": len(one.steps)} for one in found.maps]
    return headed("trueup-trend", found, "path ranks steps") | fields(found, "alerts notes") | {"maps": maps}


def save_trend(found: Trend, directory: Path) -> Path:
    """Write ``index.html`` and ``trend.json``; raises TrueupError if it cannot."""
    expected = "a directory that can be made and written, for index.html and trend.json"
    write_text(trend_page(found), directory / "index.html", expected)
    save_json(trend_document(found), directory / "trend.json")
    return directory


def render_trend(found: Trend, console: Console) -> None:
    """Print it."""
    head = found.sentence.partition("  ")[0]
    lines = [*clean(found.sentence).splitlines(), *(clean(alert["said"]) for alert in found.alerts[1:MAPS_SHOWN])]
    indent = len(head) + 2
    print_lines(console, [lines[0], *(" " * indent + one for one in lines[1:])], indent, COLOURS[found.verdict])
    console.print()
    rows = []
    for one in found.maps:
        low, high = one.low[np.isfinite(one.low)], one.high[np.isfinite(one.high)]
        ends = (number(float(low.min()), 4), number(float(high.max()), 4)) if len(low) and len(high) else ("", "")
        rows.append((clean(one.kind), str(len(one.rows)), f"{len(one.steps):,}", *ends))
    listing(console, MAPS, rows, MAPS_SHOWN + 20)
    for note in found.notes:
        console.print()
        console.print(labelled([("note", Text(clean(note), overflow="fold"))]))


def trend_page(found: Trend) -> str:
    """Return the text of a page that needs no network."""
    head, _, rest = found.sentence.partition("  ")
    data = {
        "maps": [
            {
                "kind": one.kind, "meaning": one.meaning, "log": one.logarithmic, "rows": [list(row) for row in one.rows],
                "steps": one.steps.tolist(), "low": _packed(one.low), "high": None if _same(one.low, one.high) else
            _packed(one.high), }
            for one in found.maps
        ],
        "alerts": json_plain(list(found.alerts)), "last": found.steps[1],
    }  # fmt: skip
    return page(
        "trend.html.j2", [ours("page.js"), ours("trend.js")], found=found, tone=found.verdict, head=head, first_line=rest,
        data=embedded(data),
    )  # fmt: skip


def _same(low: Any, high: Any) -> bool:
    return bool(np.array_equal(low, high, equal_nan=True))


def _packed(values: Any) -> str:
    """Return float32 as base64 of deflated little-endian bytes, which a browser inflates by itself. The four bytes of a number
    stand apart: those of like size deflate to a half."""
    held = np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(held.tobytes(), 6)).decode()
