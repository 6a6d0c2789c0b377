"""``overflow.json``: what overflowed, as a document that a program can rely on; and the page beside it. Meaning: docs/overflow.md.

Strict JSON: a number that JSON cannot hold is one of the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.doors.report.document import json_number
from trueup.doors.report.saving import replaced
from trueup.foundation.model import TensorStats
from trueup.foundation.words.anomaly_sentence import bad_numbers

if TYPE_CHECKING:
    from trueup.foundation.facts.anomaly import Anomaly, Led, OverflowResult, Place, SlotNumbers

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; new fields may come at any time."""


def document(result: OverflowResult) -> dict[str, Any]:
    """Return a result as JSON-ready data."""
    return {
        "schema": "trueup-overflow",
        "schema_version": SCHEMA_VERSION,
        "verdict": result.verdict,
        "exit_code": result.exit_code,
        "sentence": result.sentence,
        "capture": result.path,
        "would_overflow": result.would_overflow,
        "ranks": result.ranks,
        "steps": result.steps,
        "calls": result.calls,
        "measured": result.measured,
        "anomalies": [_anomaly(one) for one in result.anomalies],
        "expected": [{"op": name, "calls": count} for name, count in result.expected],
        "loss_scale": {
            "history": result.scale_history,
            "steps": [dataclasses.asdict(one) | {"scale": json_number(one.scale)} for one in result.scale],
        },
        "try_next": result.try_next,
        "notes": list(result.notes),
    }


def dumps(result: OverflowResult) -> str:
    """Return the text of overflow.json."""
    return json.dumps(document(result), indent=2, allow_nan=False) + "\n"


def save_json(result: OverflowResult, file: str | Path) -> Path:
    """Write overflow.json under any name.

    Raises:
        TrueupError: the file cannot be written.
    """
    target = Path(file)
    with replaced(target, "a file that can be made and written, for overflow.json") as temporary:
        temporary.write_text(dumps(result), encoding="ascii")
    return target


def save_page(result: OverflowResult, directory: str | Path) -> Path:
    """Write index.html and overflow.json into a directory, made if need be.

    Raises:
        TrueupError: they cannot be written.
    """
    from trueup.doors.report.overflow_html import render_page

    target = Path(directory)
    text = render_page(result)
    save_json(result, target / "overflow.json")
    with replaced(target / "index.html", "a directory that can be made and written, for index.html") as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return target


def _anomaly(one: Anomaly) -> dict[str, Any]:
    names = ("kind", "severity", "sentence", "transient", "matters", "because", "run_next", "carried", "policy")
    return {name: getattr(one, name) for name in names} | {
        "call": _place(one.place),
        "slots": [_slot(slot) for slot in one.slots],
        "led": [_led(led) for led in one.led],
        "reached": list(one.reached),
        "healed_by": list(one.healed_by),
        "again": list(one.again),
        "notes": list(one.notes),
    }


def _place(place: Place) -> dict[str, Any]:
    return dataclasses.asdict(place) | {"stack": list(place.stack)}


def _slot(slot: SlotNumbers) -> dict[str, Any]:
    held: Any = slot.stats
    if isinstance(held, TensorStats):
        held = {name: json_number(v) if isinstance(v, float) else v for name, v in dataclasses.asdict(held).items()}
    return {"slot": slot.slot, "dtype": slot.dtype, "shape": slot.shape, "bad": bad_numbers(slot.bad), "held": held}


def _led(led: Led) -> dict[str, Any]:
    return {
        "call": _place(led.place), "slot": led.slot, "dtype": led.dtype, "shape": led.shape,
        "largest": json_number(led.largest), "bad": bad_numbers(led.bad),
    }  # fmt: skip
