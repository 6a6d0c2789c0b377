"""``align.json``: what following a recipe gave, for a program. The comparison behind it is as in ``verdict.json``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trueup.analysis.recipes.found import RecipeResult
from trueup.doors.report.document import document as verdict
from trueup.doors.report.recipe_terminal import conclusion
from trueup.doors.report.saving import replaced

SCHEMA_VERSION = 1


def document(found: RecipeResult) -> dict[str, Any]:
    """Return it as JSON-ready data."""
    what, commands = found.advice or ("", ())
    return {
        "schema": "trueup-align",
        "schema_version": SCHEMA_VERSION,
        "recipe": found.recipe,
        "verdict": found.verdict,
        "exit_code": found.exit_code,
        "sentence": conclusion(found),
        "steps": [dataclasses.asdict(outcome) for outcome in found.outcomes],
        "next": {"what": what, "commands": list(commands)} if found.advice else None,
        "comparison": verdict(found.result),
    }


def save_json(found: RecipeResult, file: Path) -> Path:
    """Write it.

    Raises:
        TrueupError: the file cannot be written.
    """
    text = json.dumps(document(found), indent=2, allow_nan=False) + "\n"
    with replaced(file, "a file that can be written") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return file


def save(found: RecipeResult, directory: Path) -> Path:
    """Write ``index.html`` with the steps above the comparison, ``align.json``, and what `trueup.doors.report.save` writes.

    Raises:
        TrueupError: the directory cannot be written.
    """
    from trueup.doors.report.saving import save_report

    save_report(found.result, directory, recipe=found)
    save_json(found, directory / "align.json")
    return directory
