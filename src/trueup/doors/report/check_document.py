"""What `trueup.check` found, as strict JSON: a number that JSON cannot hold is ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.doors.report.document import json_number
from trueup.doors.report.saving import replaced

if TYPE_CHECKING:
    from trueup.analysis.audit import Check

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; new fields may come at any time."""


def document(result: Check) -> dict[str, Any]:
    """Return a result as JSON-ready data: the fields of `trueup.analysis.audit`'s facts by their names."""
    facts = {name: _plain(getattr(result, name)) for name in ("casts", "census", "dtypes", "graph", "notes")}
    return {
        "schema": "trueup-check", "schema_version": SCHEMA_VERSION, "exit_code": result.exit_code, "capture": result.path,
        "against": result.against, "sentences": dict(result.sentences), **facts,
    }  # fmt: skip


def save_json(result: Check, file: str | Path) -> Path:
    """Write the document.

    Raises:
        TrueupError: the file cannot be written.
    """
    target = Path(file)
    with replaced(target, "a file that can be made and written, for the checks as JSON") as temporary:
        temporary.write_text(json.dumps(document(result), indent=2, allow_nan=False) + "\n", encoding="ascii")
    return target


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return json_number(value) if isinstance(value, float) else value
