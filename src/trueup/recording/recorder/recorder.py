"""The life of a capture within one process: calls begin, slots are added, parts reach the disk, the capture ends.

Rows are appended under a lock by whatever thread executes the call (backward runs on its own on an accelerator) and written by
a background thread every second or 24 MB, so a killed process loses no more than that. Where the disk is slower than the training,
up to 120 MB wait for it before the training does.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.foundation.model import RunStopped, TrueupError
from trueup.foundation.store import Displaced
from trueup.recording.recorder import backlog, flusher
from trueup.recording.recorder.backlog import Stalled
from trueup.recording.recorder.filters import Patterns
from trueup.recording.recorder.flusher import Flusher
from trueup.recording.recorder.loading import load
from trueup.recording.recorder.options import CaptureOptions, in_ranges
from trueup.recording.recorder.recent import Recent
from trueup.recording.recorder.rows import FIELDS, Call, Kind, Place, Rows, Slot, Statistics, Tensor, fields
from trueup.recording.recorder.seen import Seen
from trueup.recording.recorder.sites import Sites
from trueup.recording.recorder.slabs import Payload, Slabs

if TYPE_CHECKING:
    from trueup.foundation.store import Writer

ROW_BYTES = 1024  # a row with its sketch, roughly
ROWS_TOGETHER = 4096
"""Most rows that wait for a part when their payload is written."""

KNOWN_PAYLOADS = 1 << 15
"""Payloads that are known by their digest, so as not to be kept again; some 100 bytes each. Where they lie is known of 8 times as
many, for what is known is yet to be written while it waits for the disk (at most 160,000 rows)."""

ARGUMENTS = Slot("arguments", None)


class Recorder:
    """Collects the calls of this process and writes them to a capture directory.

    Args:
        directory: the capture directory; created when the first row is written.
        options: what to keep.
        identify: called once, when the first row is written: ``(rank, root manifest, rank manifest)``.
        resolve: brings the statistics of many buffers from their device, in one transfer.
        internal: directories whose stack frames are the framework's.
    """

    def __init__(
        self,
        directory: Path,
        options: CaptureOptions,
        identify: Callable[[], tuple[int, dict[str, Any], dict[str, Any]]],
        resolve: Callable[[list[Statistics]], None],
        internal: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.options = options
        self.step = 0
        self.calls = 0
        self.notes: dict[str, None] = {}
        self.sites = Sites(internal)
        self._identify, self._resolve = identify, resolve
        self._include, self._exclude = Patterns(options.include), Patterns(options.exclude)
        self._kinds: dict[tuple[str, str, str, str], Kind] = {}
        self._seqs = itertools.count()
        self._last = -1
        self._rows: Rows = []
        self._payload_bytes = 0
        self._payloads: Recent[tuple[int, str], bool] = Recent(KNOWN_PAYLOADS)
        self._slabs = Slabs()
        self._copies: list[Payload] = []
        self._unwritten: tuple[Rows, list[Place | None]] = [], []
        """Rows whose payload is on the disk, and where it lies."""
        self._settled = time.monotonic()
        self._places: Recent[tuple[int, str], Place] = Recent(8 * KNOWN_PAYLOADS)
        self._lock = threading.RLock()
        self._flusher: Flusher[Rows] = Flusher(load, self._hand_over, self._write, self._settle, self._fail, self._tell_waiting)
        self._writer: Writer | None = None
        self._closed = False
        self._cut_off = False
        self._over = self._gathered = self._said_over = False
        """Whether no later step is wanted, whether all rows up to there are in the backlog, and whether the manifest says so."""
        self.failure: str | None = None
        self.displaced: str | None = None
        """Why this process gave way to those that have a rank."""
        self.policy: Callable[[], list[dict[str, Any]]] | None = None
        """Tells what a policy did so far, for the manifest (`trueup.foundation.store.policy_uses`)."""

    # ---------------------------------------------------------------- what adapters call
    @property
    def active(self) -> bool:
        """Whether the present step is one that the options select and recording still works."""
        return not self._closed and self.failure is None and in_ranges(self.step, self.options.steps)

    def begin(
        self, level: str, phase: str, scope: str, op: str, *, parent: int | None = None, site: int | None = None,
        forward_seq: int | None = None,
    ) -> Call:  # fmt: skip
        """Number a call. Its ordinal counts calls of this op in this scope, phase and step, kept or not."""
        if self.failure is not None:
            self.stop_if_asked()
        kind = self._kinds.get((level, phase, scope, op)) or self._new_kind(level, phase, scope, op)
        self._last = seq = next(self._seqs)
        return Call(seq, kind, next(kind.ordinals), parent, site, forward_seq)

    def slot(
        self, call: Call, name: str, tensor: Tensor, stats: Statistics | None, producer: tuple[int, str] | None = None
    ) -> None:
        """Add a tensor of a call."""
        self.add(call, Slot(name, tensor), None, producer, stats)

    def value(self, call: Call, text: str | tuple[str | None, str | None]) -> None:
        """Add the non-tensor arguments of a call, as JSON; a pair: those, and how exactly it was made."""
        self.add(call, ARGUMENTS, text, None, None)

    def add(
        self, call: Call, slot: Slot, value: str | tuple[str | None, str | None] | None, producer: tuple[int, str] | None,
        stats: Statistics | None,
        step: int | None = None,
    ) -> None:  # fmt: skip
        """Add a row, of another step where it is known late only. No lock is taken: one call of a list's method is atomic."""
        if self._closed or self.failure is not None:
            return
        self._rows.extend((self.step if step is None else step, call, slot, value, producer, stats))
        self.added()

    def added(self) -> None:
        """Start to write, or hold the training back, where the rows added so far ask for it."""
        self._flusher.start()
        if len(self._rows) // FIELDS * ROW_BYTES + self._payload_bytes > backlog.PORTION_BYTES:
            self._hand_over()
            self._flusher.hold()

    def keep(self, stats: Statistics, within: tuple[Statistics, tuple[int, ...]] | None = None) -> None:
        """Copy the bytes that ``stats.data`` shows, unless the capture has them; the rows that show them come after.

        Args:
            stats: of a buffer.
            within: a buffer of the same dtype that was copied before and holds them, and which part of it they are.
        """
        array = stats.data
        if not isinstance(array, np.ndarray) or stats.digest is None:
            return
        key = (stats.digest, array.dtype.name)
        with self._lock:
            known = self._payloads.get(key) is not None
            self._payloads.put(key, True)
            if known or within is not None:
                stats.data, stats.within = None, None if known else within
                return
            self._payload_bytes += array.nbytes
        stats.data = self._slabs.copy(array)

    @property
    def selected(self) -> bool:
        """Whether the options kept any call."""
        return any(kind.recorded for kind in self._kinds.values())

    def seen(self) -> Seen:
        """Return what was executed in the steps selected, kept or not."""
        return Seen(self._last + 1, self.step, tuple(self._kinds))

    def note(self, text: str) -> None:
        """Say what could not be seen; kept once, written to the manifest, shown in every report."""
        self.notes.setdefault(text)

    def cut_off(self, text: str) -> None:
        """Note that an error ended the run: what it would have done later is missing, unless no later step was wanted."""
        self.note(text)
        self._cut_off = True

    def end_step(self) -> None:
        """Finish the present step: ordinals start anew."""
        with self._lock:
            self.step += 1
            self._over = self.options.has_all(self.step)
            for kind in self._kinds.values():
                kind.ordinals = itertools.count()
        self.stop_if_asked()  # here too: it may be that no later call is recorded

    def stop_if_asked(self) -> None:
        """Raise in the training once the capture has failed, where the user asked for it.

        Raises:
            RunStopped: ``on_error="stop"``, and it has.
        """
        if self.failure is not None and self.options.on_error == "stop":
            raise RunStopped(f"capture stopped, and the run with it, as asked: {self.failure}")

    def flush(self) -> None:
        """Write what was recorded so far, and return when a reader of the capture finds it."""
        self._flusher.flush()

    def close(self, status: str = "complete") -> None:
        """Write what is left and end the capture, however slow the disk. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self._flusher.close() or self._writer is None:  # the disk hangs, or there was nothing to write
            return
        try:
            self._finish(status)
        except Exception as error:  # noqa: BLE001 - what goes wrong in the observer stays there
            self._flusher.ended(error)

    def abandon(self) -> None:
        """Forget everything without touching the disk: this process gives way to one that has a rank."""
        self._closed, self._rows, self._unwritten, self._writer = True, [], ([], []), None
        self._flusher.forget()

    def forked(self) -> None:
        """Forget everything in a forked child: its parent owns the capture. The fork may have come at any moment."""
        self._lock = threading.RLock()  # another thread may have held it, and is not here to release it
        self._flusher.forked()
        self.abandon()

    # ---------------------------------------------------------------- inside
    def _new_kind(self, level: str, phase: str, scope: str, op: str) -> Kind:
        with self._lock:  # two threads must not count the same calls twice
            return self._kinds.setdefault(
                (level, phase, scope, op), Kind(level, phase, scope, op, self.selects(level, phase, scope, op))
            )

    def selects(self, level: str, phase: str, scope: str, op: str) -> bool:
        """Tell whether the options keep calls of this kind."""
        if level not in self.options.levels or phase not in self.options.phases:
            return False
        if self._exclude and self._exclude.match(scope, op):
            return False
        return not self._include or self._include.match(scope, op)

    def _hand_over(self) -> None:
        """Put the rows gathered so far into the backlog."""
        with self._lock:  # nobody else takes from the list
            self._gathered = self._over
            rows = self._rows[: len(self._rows)]
            del self._rows[: len(rows)]
            payload, self._payload_bytes = self._payload_bytes, 0
            self._slabs.cut()
            if rows:
                self._flusher.backlog.put(rows, len(rows) // FIELDS * ROW_BYTES + payload)

    def _write(self, rows: Rows) -> None:
        """Bring a portion to the disk: payload now; rows then wait for others, as a part has its price however few they are."""
        writer = self._open()
        try:
            places = self._bring_payload(writer, rows)
        except BaseException:
            with suppress(Exception):
                self._write_rows()  # what they show is on the disk
            raise
        early = bool(self._copies)  # it is payload that made it a portion
        for payload in self._copies:
            payload.release()
        self._copies.clear()
        self._unwritten[0].extend(rows)
        self._unwritten[1].extend(places)
        if not early or len(self._unwritten[1]) > ROWS_TOGETHER:
            self._write_rows()

    def _bring_payload(self, writer: Writer, rows: Rows) -> list[Place | None]:
        """Write what the rows show, as far as it is kept; return where it lies."""
        _, _, slots, _, _, statistics = fields(rows)
        self._resolve([stats for stats in statistics if stats is not None])
        if self.options.detail != "tensor":
            return [None] * len(slots)
        places = [self._store_payload(writer, slot, stats) for slot, stats in zip(slots, statistics, strict=True)]
        if self._copies:
            writer.flush()
        return places

    def _settle(self, at_once: bool) -> None:
        """Write the rows that wait, every second, at the end, and when somebody asks for them."""
        if at_once or self._closed or time.monotonic() - self._settled >= flusher.FLUSH_SECONDS:
            self._write_rows()
            if self._gathered and not self._said_over and self._writer is not None:
                self._said_over = True
                self._writer.update(steps_over=True)
                self._writer.flush()

    def _write_rows(self) -> None:
        (rows, places), self._unwritten = self._unwritten, ([], [])  # whatever happens: memory must not grow on a full disk
        self._settled = time.monotonic()
        if not rows:
            return
        from trueup.recording.recorder.columns import parts

        writer = self._open()
        if new_sites := self.sites.take_new():
            writer.add_sites(new_sites)
        writer.write_parts(parts(rows, places))
        self.calls = max(self.calls, rows[1 - FIELDS].seq + 1)

    def _store_payload(self, writer: Writer, slot: Slot, stats: Statistics | None) -> Place | None:
        if stats is None or slot.tensor is None or stats.digest is None:
            return None
        if stats.place is not None:
            return stats.place
        dtype = slot.tensor.dtype
        key = (stats.digest, dtype)
        if isinstance(payload := stats.data, Payload):
            # Kept flat: a view of the same bytes in another shape is the same payload.
            # As bytes: NumPy hands out no buffer of the dtypes of ml_dtypes.
            raw = payload.array.view(np.uint8)
            segment = writer.add_payload(f"{stats.digest:016x}", dtype, (payload.array.size,), raw)
            self._places.put(key, (*segment, None))
            self._copies.append(payload)
            stats.data = None
        elif stats.within is not None:
            (whole, view), stats.within = stats.within, None
            if whole.place is not None:
                self._places.put(key, (*whole.place[:2], view))
        stats.place = self._places.get(key)
        return stats.place

    def _open(self) -> Writer:
        if self._writer is None:
            from trueup.foundation.store import Writer

            rank, root, manifest = self._identify()
            self._writer = Writer(self.directory, rank, root, manifest)
        for note in list(self.notes):
            self._writer.note(note)
        if self.policy is not None and (said := self.policy()):
            self._writer.update(policy=said)
        return self._writer

    def _finish(self, status: str) -> None:
        waited = self._flusher.backlog.waited
        if waited > backlog.LOUD_AFTER:
            self.note(f"the training waited {waited:.0f} s for the disk, which was slower than the capture")
        writer = self._open()
        cut_off = self._cut_off and not self._over
        writer.close("stopped" if self.failure is not None else "interrupted" if cut_off else status)

    def _fail(self, error: BaseException) -> None:
        """End the capture because of ``error``, loudly, and never the training, unless the user asked for that."""
        writer = None if isinstance(error, Stalled) else self._writer  # a disk that hangs is not asked
        if isinstance(error, Displaced) or (writer is not None and writer.displaced()):
            self.displaced = str(error)
            self.abandon()
            return
        with self._lock:
            first = self.failure is None
            self._rows.clear()
            if first:
                known = isinstance(error, (OSError, TrueupError))
                self.failure = str(error) if known else f"{type(error).__name__}: {error}"
                self.note(f"the capture stopped at step {self.step}: {self.failure}; what ran later is missing")
        if first:
            going_on = "The training goes on without it." if self.options.on_error == "continue" else "Stopping, as asked."
            _say(f"capture stopped at step {self.step}: cannot write {self.directory}: {self.failure}. {going_on}")

    def _tell_waiting(self) -> None:
        megabytes = self._flusher.backlog.held / 2**20
        _say(f"the run waits for the disk of {self.directory}: {megabytes:,.0f} MB are recorded and not written yet")


def _say(text: str) -> None:
    print(f"trueup: {text}", file=sys.stderr, flush=True)
