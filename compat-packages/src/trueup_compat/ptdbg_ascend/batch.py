"""Two folders of ``.npy`` compared file by file: the table of the parse shell's ``vc``."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from trueup.doors.report.capture_view import read_npy
from trueup.doors.report.saving import replaced, text_cell
from trueup.foundation.kernels import digest
from trueup.foundation.kernels.metrics import Metrics
from trueup.foundation.model import TrueupError

COLUMNS = ("NPU File Name", "Bench File Name", "Mean", "Bench Mean", "Md5 Consistency", "Max Abs Error", "Max Relative Error")
UNKNOWN = "N/A"
TIME = re.compile(r"\.\d{8,}(?=\.(?:in|out)put\.\d+\.npy$)")
"""When a kernel ran, in the name of its dump."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a comparison of two folders came to."""

    table: Path
    files: int
    equal: int
    alone: int
    """Files that only one folder has."""
    unread: int

    @property
    def sentence(self) -> str:
        """Say it."""
        said = [f"{self.files:,} files: {self.equal:,} bitwise equal"]
        said += [f"{self.alone:,} on one side alone"] if self.alone else []
        said += [f"{self.unread:,} could not be compared"] if self.unread else []
        return f"{', '.join(said)}\ntable: {self.table}"

    @property
    def exit_code(self) -> int:
        """0 all are equal, 1 some are not, 2 could not tell."""
        return 2 if self.unread or not self.files else int(self.equal < self.files)


def compare_folders(npu: Path, bench: Path, output: Path) -> Batch:
    """Compare the files of two folders that have the same names; write ``batch_compare_{time}.csv``. Dumps of kernels become
    ``.npy`` first, beside the table; the time in their names is passed over.

    Args:
        npu: of the device under suspicion.
        bench: the trusted one.
        output: folder of the table.

    Raises:
        TrueupError: a folder is none, or holds neither.
    """
    sides = [_files(folder, output / side) for folder, side in ((npu, "npu_npy"), (bench, "bench_npy"))]
    names = sorted(set(sides[0]) | set(sides[1]))
    path = output / f"batch_compare_{datetime.now():%Y%m%d%H%M%S}.csv"
    equal = alone = unread = 0
    with replaced(path, "a file for the table") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for name in names:
            mine, golden = (side.get(name) for side in sides)
            cells = list(_row(mine, golden))
            alone += mine is None or golden is None
            unread += mine is not None and golden is not None and cells[2] == UNKNOWN
            equal += cells[2] is True
            table.writerow([text_cell(one.name) if one is not None else "" for one in (mine, golden)] + cells)
    return Batch(path, len(names), equal, alone, unread)


def _files(folder: Path, converted: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise TrueupError(f"{folder} is no folder: give one of .npy files")
    entries = sorted(entry for entry in folder.iterdir() if entry.is_file())
    if not entries:
        raise TrueupError(f"{folder} holds no files: give one of .npy files, or of dumps of kernels")
    if all(entry.suffix == ".npy" for entry in entries):
        return {entry.name: entry for entry in entries}
    from trueup_compat.dumper.converting import convert

    fresh = converted / datetime.now().strftime("%Y%m%d%H%M%S%f")
    _, said = convert(folder, fresh)
    unread = [line for line in said if "private format" not in line]
    if unread:
        raise TrueupError(f"{folder} holds what is neither .npy nor a dump of a kernel.\n  got:      {unread[0]}")
    found: dict[str, Path] = {}
    seen: Counter[str] = Counter()
    for entry in sorted(fresh.iterdir(), key=lambda entry: entry.name):
        name = TIME.sub("", entry.name)
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name}#{seen[name]}"] = entry
    return found


def _row(mine: Path | None, golden: Path | None) -> Iterator[Any]:
    """Yield both means, whether the bytes are equal, and the two errors."""
    arrays = []
    for path in (mine, golden):
        try:
            arrays.append(None if path is None else read_npy(path))
        except TrueupError:
            arrays.append(None)
    yield from (UNKNOWN if array is None else _mean(array) for array in arrays)
    a, b = arrays[1], arrays[0]
    if a is None or b is None or a.shape != b.shape or not a.size:
        yield from (UNKNOWN,) * 3
        return
    yield a.dtype == b.dtype and digest(np.asarray(a)) == digest(np.asarray(b))
    try:
        found = Metrics.of(a, b)
    except TypeError:
        yield from (UNKNOWN,) * 2
        return
    yield from (found.max_absolute, found.max_relative)


def _mean(array: Any) -> Any:
    """Return the mean in float64; of complex numbers that of their absolutes, as in the tool."""
    if not array.size or array.dtype.kind not in "biufc":
        return UNKNOWN
    return float(np.abs(array).mean() if array.dtype.kind == "c" else array.mean(dtype=np.float64))
