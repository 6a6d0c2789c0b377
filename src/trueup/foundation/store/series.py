"""Numbers by step in a capture's rank folders, as a monitor writes them: a row a step, a column a series, some steps a file.

::

    run/manifest.json                    has the key ``monitor``
        rank-00000/lock, manifest.json
                   series-0000.parquet   step | time | loss | gradient_norm/encoder.layers.0 | ...      steps 0 to 511
                   series-0001.parquet                                                                  steps 512 to 1,023

A null was not taken in that step, a NaN is a NaN. A training that goes on appends: a step that was made again stands twice, and the
last one counts. Each file is whole or not there, and sealed as a part of records is; a killed process loses what it did not flush.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trueup.foundation.model import TrueupError
from trueup.foundation.redaction import redacted
from trueup.foundation.store import durable, layout
from trueup.foundation.store.durable import alive, holder
from trueup.foundation.store.layout import MONITOR
from trueup.foundation.store.parts import BROKEN, ROWS_PER_BYTE, check_seal, sealed
from trueup.foundation.store.reader import Capture, open_capture

SERIES = re.compile(r"series-([0-9]{4,9})\.parquet")
BLOCK = 2048  # most steps of a file
SECONDS = (1.0, 60.0)  # after which a file is written, however few steps it has: a tenth of the run so far, within these
SHARE = 1 / 1000  # of the process's CPU time that writing may take, within the longest of those: many series take long to encode
FEW = 64  # steps of a file that is not compressed: that would take longer than all else of it
MOST_SERIES = 100_000  # of a rank; a file that claims more is no monitor's
AT_A_TIME = 512  # columns that are read together

Numbers = NDArray[np.float64]
Names = tuple[str, ...]


def is_monitor(capture: Capture) -> bool:
    """Tell whether a capture holds series of a monitor."""
    return MONITOR in capture.root


class SeriesWriter:
    """One rank's side. Made again on a capture of a monitor it appends.

    >>> writer = SeriesWriter(Path("runs/monitor"), 0, root={"monitor": {}}, manifest={})
    >>> writer.append(0, [(("loss", "lr/0"), np.array([2.3, 1e-3]))])
    >>> writer.close("complete")
    """

    def __init__(self, directory: Path, rank: int, root: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Take the rank's folder. Raises TrueupError if the directory holds something else, or a living process writes that rank;
        OSError if it cannot be written."""
        self.directory, self.rank = Path(directory), rank
        self.folder = self.directory / layout.rank_name(rank)
        _take_root(self.directory, root)
        _take_rank(self.folder, rank)
        numbers = [number for one in self.folder.iterdir() if (number := layout.number(SERIES, one.name)) is not None]
        self._next = max(numbers, default=-1) + 1
        self.last_step = _last_step(self.folder / f"series-{self._next - 1:04d}.parquet") if numbers else -1
        self.resumed = bool(numbers)
        self._places: dict[str, int] = {}
        self._known: dict[int, tuple[Names, NDArray[np.intp]]] = {}  # by identity of a block's names, which stay alive here
        self._values, self._there = np.zeros((BLOCK, 0)), np.zeros((BLOCK, 0), bool)
        self._steps, self._times = np.zeros(BLOCK, np.int64), np.zeros(BLOCK)
        self._writing: threading.Thread | None = None
        self._took = 0.0  # CPU seconds of the last file
        self._error: OSError | None = None
        self._rows, self._began = 0, time.monotonic()
        self._due, self._latest = self._began + SECONDS[0], self._began + SECONDS[1]
        self._earned = 0.0  # CPU time of the process from which a file may be written: on a busy machine seconds pass for nothing
        self._manifest = {**manifest, "rank": rank, "pid": os.getpid()}
        self.write_manifest("recording")

    @property
    def series(self) -> int:
        """How many series were taken so far."""
        return len(self._places)

    def append(self, step: int, blocks: Sequence[tuple[Names, Numbers]]) -> None:
        """Add a step: names of series and their numbers, in blocks whose tuples of names are the same object in each step."""
        row = self._rows
        self._steps[row], self._times[row] = step, time.time()
        for names, values in blocks:
            known = self._known.get(id(names))
            places = known[1] if known is not None and known[0] is names else self._place(names)
            self._values[row, places] = values
            self._there[row, places] = True
        self._rows += 1
        self.last_step = step
        if self._rows == BLOCK or self._is_due(time.monotonic()):
            self._begin_writing()

    def _is_due(self, now: float) -> bool:
        return now > self._due and (now > self._latest or time.process_time() > self._earned)

    def _place(self, names: Names) -> NDArray[np.intp]:
        for name in names:
            self._places.setdefault(name, len(self._places))
        missing = len(self._places) - self._values.shape[1]
        if missing:
            self._values = np.concatenate([self._values, np.zeros((BLOCK, missing))], axis=1)
            self._there = np.concatenate([self._there, np.zeros((BLOCK, missing), bool)], axis=1)
        places = np.array([self._places[name] for name in names], np.intp)
        if len(self._known) > 4096:  # names that are made anew in each step would fill the memory
            self._known.clear()
        self._known[id(names)] = names, places
        return places

    def flush(self) -> None:
        """Write what there is; raises OSError if it cannot."""
        self._begin_writing()
        self._finish_writing()

    def _begin_writing(self) -> None:
        """Take what there is and write it beside the training: to encode it takes milliseconds, and a disk tens of them."""
        rows, now = self._rows, time.monotonic()
        self._due, self._latest = now + min(SECONDS[1], max(SECONDS[0], (now - self._began) / 10)), now + SECONDS[1]
        self._earned = time.process_time() + self._took / SHARE
        if not rows:
            return
        self._finish_writing()
        arrays = {"step": pa.array(self._steps[:rows].copy()), "time": pa.array(self._times[:rows].copy())}
        taken = list(self._places), self._values[:rows].copy(), self._there[:rows].copy()
        file, told = self._next, {"rows": rows, "first": int(self._steps[0]), "last": int(self._steps[rows - 1])}
        self._next += 1
        self._rows = 0
        self._there[:rows] = False
        self._writing = threading.Thread(target=self._write, args=(file, arrays, taken, told), name="trueup monitor", daemon=True)
        self._writing.start()

    def _finish_writing(self) -> None:
        """Wait for what is being written; raises OSError if it could not be."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(
        self, number: int, arrays: dict[str, pa.Array], taken: tuple[list[str], Numbers, NDArray[np.bool_]], told: Mapping[str, Any]
    ) -> None:  # fmt: skip
        few, began = told["rows"] < FEW, time.thread_time()
        try:
            arrays |= _columns(*taken)
            sink = pa.BufferOutputStream()
            pq.write_table(
                pa.table(arrays), sink, compression="none" if few else "zstd", use_dictionary=False, write_statistics=False,
                write_page_checksum=True, use_byte_stream_split=False if few else [name for name in arrays if name != "step"],
            )  # fmt: skip
            durable.write_file(self.folder / f"series-{number:04d}.parquet", sealed(sink.getvalue(), told))
        except OSError as error:
            self._error = error
        self._took = time.thread_time() - began

    def write_manifest(self, status: str, **more: Any) -> None:
        """Write the rank's manifest."""
        self._manifest |= more
        durable.write_json(self.folder / layout.MANIFEST, redacted({**self._manifest, "status": status}))

    def close(self, status: str, **more: Any) -> None:
        """Write what is left and how it ended; raises OSError if it cannot."""
        self.flush()
        self.write_manifest(status, **more)


def _columns(names: Sequence[str], values: Numbers, there: NDArray[np.bool_]) -> dict[str, pa.Array]:
    """Return the series that have a number in any of these steps, each in place: to copy them one by one takes twice as long."""
    rows = len(values)
    numbers = pa.py_buffer(np.ascontiguousarray(values.T))
    bits = np.ascontiguousarray(np.packbits(there.T, axis=1, bitorder="little"))
    valid, width = pa.py_buffer(bits), bits.shape[1]
    some, whole = np.atleast_1d(there.any(axis=0)), np.atleast_1d(there.all(axis=0))
    return {
        name: pa.Array.from_buffers(pa.float64(), rows, [
            None if whole[k] else valid.slice(k * width, width), numbers.slice(8 * rows * k, 8 * rows),
        ])
        for k, name in enumerate(names) if some[k]
    }  # fmt: skip


def _numbers(column: pa.ChunkedArray) -> Numbers:
    values: Numbers = column.to_numpy(zero_copy_only=False)
    there = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    bad = np.isnan(values) if there is None else np.isnan(values) & there
    return np.where(bad, np.inf, values) if bad.any() else values


def _take_root(directory: Path, root: Mapping[str, Any]) -> None:
    durable.make_folder(directory, parents=True)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    content = {"created": created, **root, "format_version": layout.FORMAT_VERSION}
    if any(directory.glob("rank-*")) and not (directory / layout.MANIFEST).exists():  # in this order: another rank may begin now
        raise _occupied(directory, "folders of ranks without a manifest")
    try:
        durable.write_json(directory / layout.MANIFEST, redacted(content), replace=False)
    except FileExistsError:
        if MONITOR not in layout.read_root(directory):
            raise _occupied(directory, "a capture of calls") from None


def _occupied(directory: Path, got: str) -> TrueupError:
    return TrueupError(
        f"The monitor cannot write there.\n  where:    {directory}\n  expected: a new directory, or an earlier monitor's to go on\n"
        f"  got:      {got}\n  next:     name another directory"
    )


def _take_rank(folder: Path, rank: int) -> None:
    durable.make_folder(folder)
    lock = holder(folder)
    mine = lock.get("pid") == os.getpid() and lock.get("host") == socket.gethostname()
    if lock and not mine and lock.get("host") == socket.gethostname() and alive(lock.get("pid")):
        raise _occupied(folder, f"process {lock.get('pid')} writes it now")
    durable.write_json(folder / layout.LOCK, {"pid": os.getpid(), "host": socket.gethostname(), "preferred_rank": rank})


def last_step(folder: Path) -> int | None:
    """Return the last step of a rank's newest file of series, None where there is none."""
    files = sorted((n, one) for one in folder.iterdir() if (n := layout.number(SERIES, one.name)) is not None)
    return _last_step(files[-1][1]) if files else None


def _last_step(file: Path) -> int:
    try:
        told = check_seal(file)[1]
        return int(told["last"])
    except (*BROKEN, TypeError, KeyError):
        return -1


class SeriesReader:
    """What the monitor of a run wrote: for each rank the steps, and each series by its name."""

    def __init__(self, path: str | Path | Capture) -> None:
        """Raises TrueupError if it is no capture, or none of a monitor."""
        self.capture = open_capture(path)
        if not is_monitor(self.capture):
            raise TrueupError(
                f"The capture has no series.\n  where:    {self.capture.path}\n  expected: what `trueup monitor` wrote\n"
                "  got:      a capture of calls\n  next:     name a monitored run"
            )
        self.problems = list(self.capture.problems)
        self._files: dict[int, list[tuple[Path, list[str], NDArray[np.int64]]]] = {}
        for rank in sorted(self.capture.ranks):
            self._files[rank] = self._scanned(self.capture.path / layout.rank_name(rank), rank)
        self._kept: dict[int, NDArray[np.intp]] = {}
        self._steps = {rank: self._counting(rank) for rank in self._files}

    @property
    def ranks(self) -> list[int]:
        """Ranks with any step."""
        return [rank for rank, steps in self._steps.items() if len(steps)]

    def steps(self, rank: int) -> NDArray[np.int64]:
        """Return the steps of a rank, ascending."""
        return self._steps[rank]

    def names(self, rank: int) -> list[str]:
        """Return the series of a rank in the order in which they were first taken, which is forward order."""
        every = dict.fromkeys(name for _, names, _ in self._files[rank] for name in names)
        return [name for name in every if name not in ("step", "time")]

    def column(self, rank: int, name: str) -> Numbers:
        """Return a series over all steps of a rank: what was not taken is NaN, and a NaN that was taken is Inf."""
        return self.columns(rank, [name])[name]

    def columns(self, rank: int, names: Sequence[str]) -> dict[str, Numbers]:
        """Return several at once, which costs less; `AT_A_TIME` is a good number."""
        parts: dict[str, list[Numbers]] = {name: [] for name in names}
        for file, there, steps in self._files[rank]:
            wanted = set(there).intersection(names)
            table = self._read(file, [name for name in names if name in wanted]) if wanted else None
            for name in names:
                held = None if table is None or name not in wanted else table[name]
                parts[name].append(np.full(len(steps), np.nan) if held is None else _numbers(held))
        kept = self._kept[rank]
        return {name: np.concatenate(held)[kept] if held else np.zeros(0) for name, held in parts.items()}

    def _scanned(self, folder: Path, rank: int) -> list[tuple[Path, list[str], NDArray[np.int64]]]:
        numbered = sorted((n, one) for one in folder.iterdir() if (n := layout.number(SERIES, one.name)) is not None)
        found = []
        for number, (given, file) in enumerate(numbered):
            if given != number and not any("is missing" in text for text in self.problems):
                self.problems.append(f"rank {rank}: series-{number:04d}.parquet is missing, and its steps")
            try:
                check_seal(layout.real_file(self.capture.path, file))
                with pq.ParquetFile(file) as opened:
                    names = opened.schema_arrow.names
                    most = ROWS_PER_BYTE * file.stat().st_size
                    if len(names) > MOST_SERIES or "step" not in names or opened.metadata.num_rows > most:
                        raise ValueError("it is no file of series")
                    steps = opened.read(["step"])["step"].to_numpy()
                if steps.dtype != np.int64 or (steps < 0).any():
                    raise ValueError("its steps are no numbers from 0 on")
                found.append((file, names, steps))
            except (*BROKEN, TrueupError) as error:
                why = str(error).splitlines()[0][:200]
                self.problems.append(f"rank {rank}: {file.name} is damaged ({why}); its steps are missing")
        return found

    def _counting(self, rank: int) -> NDArray[np.int64]:
        every = np.concatenate([steps for _, _, steps in self._files[rank]] or [np.zeros(0, np.int64)])
        found, first = np.unique(every[::-1], return_index=True)  # of a step that was made again the last row
        self._kept[rank] = len(every) - 1 - first
        return found

    def _read(self, file: Path, names: list[str]) -> pa.Table | None:
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as opened:
                table = opened.read(names)
            return table.cast(pa.schema([(name, pa.float64()) for name in table.column_names]))
        except BROKEN as error:
            said = f"{file.parent.name}: {file.name} is damaged ({str(error).splitlines()[0][:200]}); its steps are missing"
            if said not in self.problems:
                self.problems.append(said)
            return None
