"""``triage.json`` and the page beside it: what a triage found, for a program and for a reader. Meaning: docs/triage.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from trueup.doors.report.document import document as verdict
from trueup.doors.report.document import json_number
from trueup.doors.report.html import environment, ours, policy
from trueup.doors.report.saving import replaced
from trueup.doors.report.triage_terminal import curve

if TYPE_CHECKING:
    from trueup.analysis.triage.found import Outcome, Triage, Trial

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; new fields may come at any time."""


def document(found: Triage) -> dict[str, Any]:
    """Return it as JSON-ready data."""
    return {
        "schema": "trueup-triage",
        "schema_version": SCHEMA_VERSION,
        "verdict": found.verdict,
        "exit_code": found.exit_code,
        "sentence": found.sentence,
        "command": list(found.command),
        "framework": found.framework,
        "baseline": found.baseline,
        "steps": [_outcome(one) for one in found.outcomes],
        "runs": [_trial(one) for one in found.trials],
    }


def _outcome(one: Outcome) -> dict[str, Any]:
    texts = {name: getattr(one, name) for name in ("name", "status", "said", "page")}
    lists = {name: list(getattr(one, name)) for name in ("remarks", "guilty", "advice")}
    return texts | lists | {"comparison": None if one.result is None else verdict(one.result)}


def _trial(one: Trial) -> dict[str, Any]:
    return {
        "name": one.name, "off": list(one.off), "directory": str(one.directory), "seconds": round(one.seconds, 3),
        "failed": one.failed or None, "losses": {str(step): json_number(loss) for step, loss in one.losses.items()},
        "remarks": list(one.remarks),
    }  # fmt: skip


def render_page(found: Triage) -> str:
    """Return the text of index.html."""
    scripts = [ours("page.js")]
    steps = sorted({step for one in found.trials for step in one.losses})
    return environment().get_template("triage.html.j2").render(
        found=found,
        tone={"explained": "deviates", "could not tell": "inconclusive"}.get(found.verdict, "aligned"),
        head=found.verdict.upper(),
        steps=steps,
        trials=[(one, curve(one), one.directory.name) for one in found.trials],
        style=Markup(ours("style.css")),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts),
    )  # fmt: skip


def save(found: Triage) -> Path:
    """Write ``index.html`` and ``triage.json`` into the folder of the triage.

    Raises:
        TrueupError: they cannot be written.
    """
    text = json.dumps(document(found), indent=2, allow_nan=False) + "\n"
    page = render_page(found)
    for name, content in (("triage.json", text), ("index.html", page)):
        with replaced(found.directory / name, "a directory that can be written") as temporary:
            temporary.write_text(content, encoding="utf-8", errors="backslashreplace")
    return found.directory
