"""A monitored run on a terminal, and as a page with heat maps: step x rank x module, the line behind each cell.

2 ALERTS  step 412, rank 0: gradient_norm of blocks.1.fc1 spikes to 3.1, 24 robust deviations above 0.16, ...

    series         rows  columns      low     high
    gradient_norm    15    1,000    0.014     3.12
"""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from trueup.analysis.monitor.trend import Trend
from trueup.doors.report.document import fields, headed, json_plain
from trueup.doors.report.html import embedded, ours, page
from trueup.doors.report.saving import save_json, write_text
from trueup.doors.report.terminal import COLOURS, labelled, listing, print_lines
from trueup.foundation.words.wording import clean, number

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("series", ">rows", ">columns", ">low", ">high")
SHOWN = 20


def document(found: Trend) -> dict[str, Any]:
    """Return it as JSON-ready data: everything but the cells."""
    maps = [{"kind": one.kind, "rows": len(one.rows), "columns": len(one.steps)} for one in found.maps]
    return headed("trueup-trend", found, "path ranks steps") | fields(found, "alerts notes") | {"maps": maps}


def save(found: Trend, directory: Path) -> Path:
    """Write ``index.html`` and ``trend.json``; raises TrueupError if it cannot."""
    expected = "a directory that can be made and written, for index.html and trend.json"
    write_text(trend_page(found), directory / "index.html", expected)
    save_json(document(found), directory / "trend.json")
    return directory


def render(found: Trend, console: Console) -> None:
    """Print it."""
    head = found.sentence.partition("  ")[0]
    lines = [*clean(found.sentence).splitlines(), *(clean(alert["said"]) for alert in found.alerts[1:SHOWN])]
    indent = len(head) + 2
    print_lines(console, [lines[0], *(" " * indent + one for one in lines[1:])], indent, COLOURS[found.verdict])
    console.print()
    rows = []
    for one in found.maps:
        low, high = one.low[np.isfinite(one.low)], one.high[np.isfinite(one.high)]
        ends = (number(float(low.min()), 4), number(float(high.max()), 4)) if len(low) and len(high) else ("", "")
        rows.append((clean(one.kind), str(len(one.rows)), f"{len(one.steps):,}", *ends))
    listing(console, COLUMNS, rows, SHOWN + 20)
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
