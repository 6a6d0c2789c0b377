"""What a person reads: one renderer per format.

Renderers take a finished ``Result`` (or a table of records, for ``trueup show``) and return text, a document or bytes;
only ``save`` writes files. Nothing here imports a framework, and pyarrow, rich, jinja2 and bokeh are imported by the
renderer that needs them, so that ``trueup --help`` stays quick. Sentences come from `trueup.foundation.words`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from trueup.foundation.model import Result

__all__ = ["save"]


def save(result: Result, directory: str | Path) -> Path:
    """Write ``verdict.json``, ``calls.parquet`` and ``index.html`` into ``directory``, each atomically.

    Args:
        result: what ``trueup.compare`` returned.
        directory: made if it does not exist; files of an earlier report in it are replaced.

    Returns:
        The directory.

    Raises:
        TrueupError: the directory cannot be made or written.
    """
    from trueup.doors.report.saving import save_report

    return save_report(result, directory)
