"""Writing a report: every file is rendered before the first is written, and each appears whole or not at all."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as parquet

from trueup.doors.report.document import dumps
from trueup.doors.report.html import render_page
from trueup.foundation.model import Result, TrueupError

if TYPE_CHECKING:
    from trueup.analysis.recipes.found import RecipeResult


def save_report(result: Result, directory: str | Path, recipe: RecipeResult | None = None) -> Path:
    """Write verdict.json, calls.parquet and index.html; see ``report.save``. The page shows the steps of a recipe first."""
    target = Path(directory)
    rows = io.BytesIO()
    parquet.write_table(result.calls, rows, compression="zstd")
    files = {
        "verdict.json": dumps(result).encode("ascii"),
        "calls.parquet": rows.getvalue(),
        "index.html": render_page(result, recipe).encode("utf-8", "backslashreplace"),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(target / name, content)
    except OSError as error:
        expected = f"a directory that can be made and written, for {', '.join(files)}"
        raise _refused(error, "The report", target, expected, "name another directory with -o") from error
    return target


@contextmanager
def replaced(path: Path, expected: str) -> Iterator[Path]:
    """Give a temporary file beside ``path`` that is flushed to the disk and takes its place when the block ends well.

    Raises:
        TrueupError: it cannot be written; ``expected`` says what was to be.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _beside(path) as temporary:
            yield temporary
    except OSError as error:
        raise _refused(error, path.name, path.parent, expected, "name another file") from error


def _write(path: Path, content: bytes) -> None:
    with _beside(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _refused(error: OSError, what: str, target: Path, expected: str, instead: str) -> TrueupError:
    return TrueupError(
        f"{what} could not be written: {error.strerror or error}.\n"
        f"  where:    {error.filename or target}\n"
        f"  expected: {expected}\n"
        f"  got:      {_what(target)}\n"
        f"  next:     {instead}, or make this one writable"
    )


def _umask() -> int:
    """Read the process' umask; there is no call that reads it without setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _what(path: Path) -> str:
    for place in (path, *path.parents):
        if place.is_dir():
            writable = "writable" if os.access(place, os.W_OK) else "not writable"
            return f"{place} is a directory, {writable}"
        if place.exists():
            return f"{place} is a file"
    return f"{path} does not exist"
