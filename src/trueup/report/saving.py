"""Writing a report: every file is rendered before the first is written, and each appears whole or not at all."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path

import pyarrow.parquet as parquet

from trueup.model import Result, TrueupError
from trueup.report.document import dumps
from trueup.report.html import render_page


def save_report(result: Result, directory: str | Path) -> Path:
    """Write verdict.json, calls.parquet and index.html; see ``trueup.report.save``."""
    target = Path(directory)
    rows = io.BytesIO()
    parquet.write_table(result.calls, rows, compression="zstd")
    files = {
        "verdict.json": dumps(result).encode("ascii"),
        "calls.parquet": rows.getvalue(),
        "index.html": render_page(result).encode("utf-8", "backslashreplace"),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(target / name, content)
    except OSError as error:
        raise TrueupError(
            f"The report could not be written: {error.strerror or error}.\n"
            f"  where:    {error.filename or target}\n"
            f"  expected: a directory that can be made and written, for {', '.join(files)}\n"
            f"  got:      {_what(target)}\n"
            f"  next:     name another directory with -o, or make this one writable"
        ) from error
    return target


def _write(path: Path, content: bytes) -> None:
    """Write beside ``path``, flush to the disk, then rename over it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
