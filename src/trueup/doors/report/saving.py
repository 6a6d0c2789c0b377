"""Writing a report: every file is rendered before the first is written, and each appears whole or not at all."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as parquet

from trueup.doors.report.document import document, dumps
from trueup.doors.report.html import render_page
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.store.durable import replacing, write_file
from trueup.foundation.words.wording import clean

if TYPE_CHECKING:
    from trueup.analysis.recipes.recipe import RecipeResult


def save(result: Result, directory: str | Path, recipe: RecipeResult | None = None) -> Path:
    """Write ``verdict.json``, ``calls.parquet`` and ``index.html`` into ``directory``, each atomically, and return its path. It
    is made if need be; an earlier report in it is replaced. The page shows the steps of ``recipe`` first. Raises TrueupError if
    it cannot be made or written."""
    target = Path(directory)
    rows = io.BytesIO()
    parquet.write_table(result.calls, rows, compression="zstd")
    files = {
        "verdict.json": dumps(document(result)).encode("ascii"),
        "calls.parquet": rows.getvalue(),
        "index.html": render_page(result, recipe).encode("utf-8", "backslashreplace"),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_file(target / name, [content])
    except OSError as error:
        expected = f"a directory that can be made and written, for {', '.join(files)}"
        raise _refused(error, "The report", target, expected, "name another directory with -o") from error
    return target


@contextmanager
def replaced(path: Path, expected: str) -> Iterator[Path]:
    """Give a temporary file beside ``path`` that is flushed to the disk and takes its place when the block ends well. Raises
    TrueupError if it cannot be written; ``expected`` says what was to be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise _refused(error, path.name, path.parent, expected, "name another file") from error


def write_text(text: str, path: Path, expected: str) -> Path:
    """Write text as UTF-8, what that cannot hold spelled out; raises TrueupError, with what was ``expected``, if it cannot."""
    with replaced(path, expected) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


def write_patch(text: str, path: Path) -> Path:
    """Write a patch, whose bytes that are no UTF-8 are those of the file it is for; raises TrueupError if it cannot."""
    with replaced(path, "a file that can be made and written, for the patch") as temporary:
        temporary.write_bytes(text.encode(errors="surrogateescape"))
    return path


def save_json(document: dict[str, Any], file: Path) -> Path:
    """Write a document as strict JSON and return its path; raises TrueupError where the file cannot be written."""
    return write_text(dumps(document), file, f"a file that can be made and written, for {document['schema']} as JSON")


def save_csv(head: Sequence[str], rows: Iterable[Sequence[object]], file: Path, expected: str) -> Path:
    """Write rows below their headings as CSV and return its path; raises TrueupError, with what was ``expected``, if it cannot."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([text_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return write_text(text.getvalue(), file, expected)


@lru_cache(maxsize=1 << 16)  # a table repeats its names
def text_cell(value: str) -> str:
    """Return text as a cell: no control characters, an apostrophe before what a spreadsheet would take for a formula."""
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


def _refused(error: OSError, what: str, target: Path, expected: str, instead: str) -> TrueupError:
    return TrueupError(
        f"{what} could not be written: {error.strerror or error}.\n"
        f"  where:    {error.filename or target}\n"
        f"  expected: {expected}\n"
        f"  got:      {_what(target)}\n"
        f"  next:     {instead}, or make this one writable"
    )


def _what(path: Path) -> str:
    for place in (path, *path.parents):
        if place.is_dir():
            writable = "writable" if os.access(place, os.W_OK) else "not writable"
            return f"{place} is a directory, {writable}"
        if place.exists():
            return f"{place} is a file"
    return f"{path} does not exist"
