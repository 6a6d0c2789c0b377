"""The life of a capture within one process: calls begin, slots are added, parts reach the disk, the capture ends.

Rows are appended under a lock by whatever thread executes the call (backward runs on its own on an accelerator) and written by
a background thread every second or 24 MB, so a killed process loses no more than that. Where the disk is slower than the training,
up to 120 MB wait for it before the training does.

A recorder that writes nothing: the rows of the present step stay in memory, for somebody to look at, and go when it ends.

Memory is bounded whatever a step does (an evaluation has no optimizer step to end it): beyond `MOST_ROWS` rows the counts of what
is there are looked at early, and only the calls that hold a number of interest, and the latest ones, stay.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.model import NUMBERS, PACKED, RunStopped, TrueupError
from trueup.foundation.store import Displaced
from trueup.foundation.words.wording import say
from trueup.recording.recorder import flusher
from trueup.recording.recorder.flusher import Flusher, Stalled
from trueup.recording.recorder.options import CaptureOptions, Patterns, Seen, in_ranges
from trueup.recording.recorder.rows import FIELDS, Call, Kind, Payload, Place, Rows, Slabs, Slot, Statistics, Tensor, fields
from trueup.recording.recorder.sites import Sites

if TYPE_CHECKING:
    from trueup.foundation.store import Writer

ROW_BYTES = 1024  # a row with its sketch, roughly
ROWS_TOGETHER = 4096
"""Most rows that wait for a part when their payload is written."""

KNOWN_PAYLOADS = 1 << 15
"""Payloads that are known by their digest, so as not to be kept again; some 100 bytes each. Where they lie is known of 8 times as
many, for what is known is yet to be written while it waits for the disk (at most 160,000 rows)."""

ARGUMENTS = Slot("arguments", None)

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dictionary of the ``limit`` entries that were used last.

    >>> recent = Recent(2)
    >>> for name in "abac":
    ...     recent.put(name, name.upper())
    >>> [recent.get(name) for name in "abc"]
    ['A', None, 'C']
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the entry and count it as used; None where it is not known, or no longer."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)


class Recorder:
    """Collects the calls of this process and writes them to a capture directory, created with the first row, for which
    ``identify`` gives ``(rank, root manifest, rank manifest)``; ``resolve`` brings the statistics of many buffers from their
    device in one transfer, ``internal`` are directories whose stack frames are the framework's."""

    def __init__(
        self, directory: Path, options: CaptureOptions, identify: Callable[[], tuple[int, dict[str, Any], dict[str, Any]]],
        resolve: Callable[[list[Statistics]], None], internal: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.directory, self.options = directory, options
        self.step = self.calls = 0
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
        self._unwritten: tuple[Rows, list[Place | None]] = [], []  # rows whose payload is on the disk, and where it lies
        self._settled = time.monotonic()
        self._places: Recent[tuple[int, str], Place] = Recent(8 * KNOWN_PAYLOADS)
        self._lock = threading.RLock()
        self._flusher: Flusher[Rows] = Flusher(load, self._hand_over, self._write, self._settle, self._fail, self._tell_waiting)
        self._writer: Writer | None = None
        self._closed = self._cut_off = False
        self._over = self._gathered = self._said_over = False
        """Whether no later step is wanted, whether all rows up to there are in the backlog, and whether the manifest says so."""
        self.failure: str | None = None
        self.displaced: str | None = None  # why this process gave way to those that have a rank
        self.policy: Callable[[], list[dict[str, Any]]] | None = None
        """Tells what a policy did so far, for the manifest (`trueup.foundation.store.declared`)."""
        self.settings: Callable[[], dict[str, Any] | None] | None = None
        """Tells what the run is set to, where something of it is new since it was asked last, for the manifest."""
        self.call_names: Callable[[], dict[str, Any]] | None = None
        """Tells what operators and their arguments are called, for the manifest."""
        self._named = -1  # of how many kinds of call it has them

    # ---------------------------------------------------------------- what adapters call
    def prepare(self) -> None:
        """Load what the writer's thread needs while nothing is recorded: beside the first step that would take as long again."""
        with suppress(Exception):  # the thread hears of it, too, and ends the capture
            load()

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
        if len(self._rows) // FIELDS * ROW_BYTES + self._payload_bytes > flusher.PORTION_BYTES:
            self._hand_over()
            self._flusher.hold()

    def keep(self, stats: Statistics, within: tuple[Statistics, tuple[int, ...]] | None = None) -> None:
        """Copy what ``stats.data`` shows unless the capture has it; ``within``: a copied buffer of that dtype, and which part of
        it this is."""
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
        """Return the calls that were executed in the selected steps, kept or not."""
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
        """Raise `RunStopped` in the training once the capture has failed, where the user asked for it (``on_error="stop"``)."""
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
        if self.settings is not None and (told := self.settings()) is not None:
            self._writer.update(settings=told)
        if self.call_names is not None and (kinds := len(self._kinds)) != self._named:  # of calls that came since
            self._named = kinds
            self._writer.update(**self.call_names())
        return self._writer

    def _finish(self, status: str) -> None:
        waited = self._flusher.backlog.waited
        if waited > flusher.LOUD_AFTER:
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
            say(f"capture stopped at step {self.step}: cannot write {self.directory}: {self.failure}. {going_on}")

    def _tell_waiting(self) -> None:
        megabytes = self._flusher.backlog.held / 2**20
        say(f"the run waits for the disk of {self.directory}: {megabytes:,.0f} MB are recorded and not written yet")


# ---------------------------------------------------------------- what writing takes, loaded with the first row
_loading = threading.RLock()
"""Held while Arrow and the store are imported, beside the training: 150 ms, most of what a capture would add to an import of the
adapter. A child that is forked in the middle of an import would wait for ever where it imports the same, for the thread that
holds the import's lock did not come along. So a fork waits."""


def load() -> None:
    """Import what the writer's thread needs; later calls cost nothing."""
    with _loading:
        from trueup.foundation.store import Writer as Writer
        from trueup.recording.recorder import columns as columns


def _forked() -> None:
    global _loading
    _loading = threading.RLock()


os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_forked)


MOST_ROWS = 1 << 16
"""Rows of a step that are held: some 64 MB with their sketches, on the device or the host."""
MOST_KEPT = 1 << 13
"""Rows that stay of those that were looked at early."""

WATCHED = ("n_nan", "n_posinf", "n_neginf", "n_saturated")
"""The counts that are looked at; a `counts` column each."""
_PLACES = [NUMBERS.index(name) for name in WATCHED]


class Keeper(Recorder):
    """Collects rows as any recorder does, and keeps the last ones; nothing is written, and nobody asked who this process is."""

    dropped = 0  # rows of the present step that were looked at and let go

    def prepare(self) -> None:
        """Load nothing."""

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
        """Return ``(rows, 4)``: how many elements of each are what `WATCHED` names; 0 where nothing was measured. What is still
        on a device comes over, in one transfer for each: the one wait of a step."""
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
        """Return the rows and forget them."""
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
    last = set(sorted({call.seq for call in rows[1::FIELDS]})[-count:])
    return [cell for k in range(0, len(rows), FIELDS) if rows[k + 1].seq in last for cell in rows[k : k + FIELDS]]


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
    """Write rows with statistics on the host, and the call stacks (``sites``) that they refer to, as a capture of detail
    ``tensor``, new or shared by other ranks: the bytes of those whose statistics hold some. ``options`` and ``notes`` are named
    in the manifest, ``identify`` is ``(rank, root manifest, rank manifest)``. Raises TrueupError where it could not be
    written."""
    recorder = _Written(directory, dataclasses.replace(options, detail="tensor"), identify, lambda _: None)
    recorder.sites = sites.of({call.site for call in rows[1::FIELDS]})
    for note in notes:
        recorder.note(note)
    recorder._rows = list(rows)
    recorder.close()
    if recorder.failure is not None or recorder.displaced is not None:
        raise TrueupError(f"cannot write {directory}: {recorder.failure or recorder.displaced}")
