"""A recorder that writes nothing: the rows of the present step stay in memory, for somebody to look at, and go when it ends.

Memory is bounded whatever a step does (an evaluation has no optimizer step to end it): beyond `MOST_ROWS` rows the counts of what
is there are looked at early, and only the calls that hold a number of interest, and the latest ones, stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.model import NUMBERS, PACKED, TrueupError
from trueup.recording.recorder.options import CaptureOptions
from trueup.recording.recorder.recorder import Recorder
from trueup.recording.recorder.rows import FIELDS, Rows, Statistics
from trueup.recording.recorder.sites import Sites

MOST_ROWS = 1 << 16
"""Rows of a step that are held: some 64 MB with their sketches, on the device or the host."""
MOST_KEPT = 1 << 13
"""Rows that stay of those that were looked at early."""

WATCHED = ("n_nan", "n_posinf", "n_neginf", "n_saturated")
"""The counts that are looked at; a `counts` column each."""
_PLACES = [NUMBERS.index(name) for name in WATCHED]


class Keeper(Recorder):
    """Collects rows as any recorder does, and keeps the last ones.

    Args:
        directory: named in messages; nothing is written there.
        options: what to keep.
        identify: not asked.
        resolve: brings the statistics of many buffers from their device, in one transfer.
        internal: directories whose stack frames are the framework's.
    """

    def __init__(
        self, directory: Path, options: CaptureOptions, identify: Callable[[], tuple[int, dict[str, Any], dict[str, Any]]],
        resolve: Callable[[list[Statistics]], None], internal: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(directory, options, identify, resolve, internal)
        self.dropped = 0
        """Rows of the present step that were looked at and let go."""

    def added(self) -> None:
        """Make room where a step has very many rows."""
        if len(self._rows) >= MOST_ROWS * FIELDS:
            self._thin_out()

    def rows(self, start: int = 0) -> Rows:
        """Return the rows of the step, from the ``start``-th on; safe while another thread adds some."""
        rows = self._rows
        return rows[start * FIELDS : len(rows) // FIELDS * FIELDS]

    def next_seq(self) -> int:
        """Return the number that the next call gets."""
        return self._last + 1

    def counts(self, rows: Rows) -> NDArray[np.int64]:
        """Return ``(rows, 4)``: how many elements of each are what `WATCHED` names; 0 where nothing was measured.

        What is still on a device comes over, in one transfer for each: the one wait of a step.
        """
        statistics: Sequence[Statistics | None] = rows[FIELDS - 1 :: FIELDS]
        found = np.zeros((len(statistics), len(WATCHED)), np.int64)
        distinct = list({id(stats): stats for stats in statistics if stats is not None}.values())
        self._resolve(distinct)
        number: dict[int, int] = {}
        packed: list[bytes] = []
        for stats in distinct:
            if stats.values is not None:
                number[id(stats)] = len(packed)
                packed.append(bytes(stats.values))
        if packed:
            numbers = np.frombuffer(b"".join(packed)).reshape(-1, PACKED)[:, _PLACES].astype(np.int64)
            places = np.array([number.get(id(stats), -1) for stats in statistics], np.int64)
            found[places >= 0] = numbers[places[places >= 0]]
        return found

    def clear(self) -> Rows:
        """Let the rows go, and return them."""
        rows, self._rows = self._rows, []
        self.dropped = 0
        return rows

    def close(self, status: str = "complete") -> None:  # noqa: ARG002
        """End; there is nothing to write."""
        self._closed = True

    def _thin_out(self) -> None:
        with self._lock:
            rows = self.rows()
            if len(rows) < MOST_ROWS * FIELDS:  # another thread was first
                return
            half = len(rows) // 2 // FIELDS
            early = rows[: half * FIELDS]
            calls = early[1::FIELDS]
            marked = {call.seq for call, counts in zip(calls, self.counts(early), strict=True) if counts.any()}
            kept: Rows = []
            for k, call in enumerate(calls):
                if call.seq in marked and len(kept) < MOST_KEPT * FIELDS:
                    kept += early[k * FIELDS : (k + 1) * FIELDS]
            self._rows[: half * FIELDS] = kept
            self.dropped += half - len(kept) // FIELDS


def last_calls(rows: Rows, count: int) -> Rows:
    """Return the rows of the last ``count`` calls, in the order in which they began."""
    if not count:
        return []
    first = sorted({call.seq for call in rows[1::FIELDS]})[-count:]
    return rows_from(rows, first[0]) if first else []


def rows_from(rows: Rows, first: int, last: int | None = None) -> Rows:
    """Return the rows of calls whose number is at least ``first`` and, where it is given, at most ``last``."""
    found: Rows = []
    for k in range(0, len(rows), FIELDS):
        if first <= rows[k + 1].seq and (last is None or rows[k + 1].seq <= last):
            found += rows[k : k + FIELDS]
    return found


class _Written(Recorder):
    """A recorder of rows that are there already; it writes them on the thread that asks."""

    def added(self) -> None:
        """Nothing is added."""

    def selects(self, level: str, phase: str, scope: str, op: str) -> bool:  # noqa: ARG002
        return True


def write_rows(
    directory: Path, options: CaptureOptions, identify: Callable[[], tuple[int, dict[str, Any], dict[str, Any]]], rows: Rows,
    sites: Sites, notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write rows as a capture of detail ``tensor``: the bytes of those whose statistics hold some.

    Args:
        directory: a new capture, or one that other ranks write too.
        options: named in the manifest.
        identify: ``(rank, root manifest, rank manifest)``.
        rows: with statistics on the host.
        sites: the call stacks that they refer to.
        notes: for the manifest.

    Raises:
        TrueupError: it could not be written.
    """
    recorder = _Written(directory, dataclasses.replace(options, detail="tensor"), identify, lambda _: None)
    recorder.sites = sites.of({call.site for call in rows[1::FIELDS]})
    for note in notes:
        recorder.note(note)
    recorder._rows = list(rows)
    recorder.close()
    if recorder.failure is not None or recorder.displaced is not None:
        raise TrueupError(f"cannot write {directory}: {recorder.failure or recorder.displaced}")
