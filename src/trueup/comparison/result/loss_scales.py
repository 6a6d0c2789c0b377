"""The history of a loss scale, from the records of a GradScaler's steps."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from trueup.foundation.words.anomaly_sentence import loss_scale

COLUMNS = ("step", "slot", "max", "value")


def scales(table: pa.Table) -> list[tuple[int, float, bool]]:
    """Return ``(step, scale, skipped)`` for each step of a GradScaler, given its rows in order, with at least `COLUMNS`."""
    found: list[tuple[int, float, bool]] = []
    overflow, scale = False, None
    for row in table.select(COLUMNS).to_pylist():
        if row["slot"] == "input.scale":
            scale, overflow = row["max"], False
        elif (row["slot"] or "").startswith("input.found_inf"):
            overflow = overflow or bool(row["max"])
        elif row["slot"] == "arguments":
            said: dict[str, Any] = json.loads(row["value"] or "{}")
            known = said.get("scale", scale)  # a capture of digests has the arguments only
            if known is not None:
                found.append((row["step"], float(known), bool(said.get("skipped", overflow))))
    return found


def loss_scale_in(table: pa.Table) -> str | None:
    """Say how the loss scale went, or return None where there was none."""
    return loss_scale([(scale, skipped) for _, scale, skipped in scales(table)])
