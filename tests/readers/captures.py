"""What the tests of the readers look at: an import, and the rows it made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trueup import import_dump, open_capture
from trueup.exchange.readers import Imported
from trueup.foundation.store import Capture

Row = dict[str, Any]


def imported(source: Path, folder: Path, format: str | None = None) -> tuple[Imported, list[Row], Capture]:
    """Import a dump; the capture must be whole."""
    result = import_dump(source, folder / "capture", format=format)
    capture = open_capture(result.path)
    rows = capture.records().to_pylist()
    assert capture.problems == []
    assert (len(rows), len({(r["rank"], r["step"], r["seq"]) for r in rows})) == (result.rows, result.calls)
    return result, rows, capture


def find(rows: list[Row], **wanted: Any) -> Row:
    """Return the one row of such a kind."""
    (found,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return found


def tensor(capture: Capture, row: Row) -> Any:
    """Return the payload of a row."""
    return capture.payload(row["rank"], row["payload_segment"], row["payload_key"], row["payload_view"])
