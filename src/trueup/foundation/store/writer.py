"""Writing one rank of a capture: parts of records, payload segments, call stacks, manifest.

Every file appears whole or not at all, and refers only to files already written: a process killed at any point leaves a capture
that is readable up to its last flush, synced or not. A thread syncs parts and payload behind, and the manifest that calls a
capture complete after all of them. What is not synced is at stake only when the machine goes down; `wait` tells when nothing is.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trueup.foundation.model import TrueupError
from trueup.foundation.progress import tell_written
from trueup.foundation.redaction import redacted
from trueup.foundation.store import durable, layout, packing, schema
from trueup.foundation.store.durable import Displaced, check_run, holder, take
from trueup.foundation.store.parts import PAGE_BYTES, Lanes, contents, located_sketches, sealed, told_part
from trueup.foundation.store.segment import PendingSegment

KNOWN_KEYS = 1 << 18  # payloads whose segment is remembered, some 250 bytes each
MANY = 32  # steps of a portion from which on they are packed: of 30 ms, as portions come each second
SEGMENT_BYTES = 64 * 2**20  # payload that is gathered before a segment is written


class Writer:
    """One rank's side of a capture; the methods may be called from several threads.

    >>> writer = Writer(Path("runs/cpu"), claim(Path("runs/cpu"), 0), root={...}, manifest={...})
    >>> segment, key = writer.add_payload(digest, "float32", (2, 3), array.tobytes())
    >>> writer.write_records(0, {"seq": [0], "op": ["aten::mm"], "payload_segment": [segment], "payload_key": [key]})
    >>> writer.close("complete")
    """

    def __init__(self, directory: Path, rank: int, root: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Take the rank's folder and write both manifests.

        ``directory`` is the capture, made if need be; ``rank`` is as given by ``claim`` (or free). The first rank writes
        ``root``, what all ranks share (trueup_version, command, levels, detail, config, run ...), with ``format_version`` and
        ``created``. ``manifest`` is this rank's (framework, devices, versions, seeds, world_size, environment ...); ``rank``,
        ``pid``, ``status`` and ``notes`` are added. Raises TrueupError if the folder holds a capture, or the directory one of
        another format; OSError if it cannot be written.
        """
        self.directory = Path(directory)
        self.rank = rank
        self.folder = self.directory / layout.rank_name(rank)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        lock = take(self.directory, rank, root.get("run"))
        self._write_root(root)
        notes = [str(note) for note in manifest.get("notes", ())]
        if lock.get("preferred_rank") not in (rank, None):
            notes.append(f"rank {lock.get('preferred_rank')} was taken by another process; this one is rank {rank}")
        self._manifest = {**manifest, "rank": rank, "pid": self._pid, "status": "recording", "notes": notes}
        self._manifest["writer"] = os.urandom(8).hex()  # of two runs, the process may have the same number
        self._counts = {"parts": 0, "rows": 0, "payload_bytes": 0}
        self._packed = 0  # files of packed parts
        self._written = 0  # bytes of parts
        self._parts: dict[int, int] = {}
        self._keys: dict[str, str] = {}
        self._segments = 0
        self._pending = self._next_segment()
        self._sites: list[tuple[int, list[str], str | None]] = []
        self._site_parts = 0
        self._noted = False
        self._syncer = Syncer()
        self._write_manifest()

    def write_records(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write one part of records, after what it refers to; see `write_parts`."""
        self.write_parts({step: columns})

    def write_parts(self, parts: Mapping[int, Mapping[str, Any] | pa.Table]) -> None:
        """Write a part of records for each of several steps (from 0), after what they refer to: step -> columns for
        ``schema.table``, or the table made of them; ``rank`` and ``step`` are filled in.

        The parts of many short steps are packed (`packing`): as files of their own each would wait twice for the disk. They are
        one file, so a killed process leaves all of them or none. Raises OSError if a part was not written (nothing of it is left),
        ValueError if the columns do not make a table.
        """
        with self._lock:
            self._flush()
            tables = {step: part if isinstance(part, pa.Table) else schema.table(part) for step, part in parts.items()}
            work = [(step, table) for step, table in tables.items() if table.num_rows]
            kinds = [{field.name: field.type for field in table.schema} for _, table in work]
            alike = [len(work) > MANY and kind == kinds[0] for kind in kinds]  # a file has columns of one type
            if any(alike):
                self._write_packed([one for one, like in zip(work, alike, strict=True) if like], kinds[0])
            for (step, table), like in zip(work, alike, strict=True):
                if not like:
                    self._write_part(step, table)
            tell_written(len(self._parts), self._counts["rows"], self._written + self._counts["payload_bytes"])

    def _told(self, step: int, table: pa.Table) -> dict[str, Any]:
        """Return what the seal of a step's next part tells, of its place among all parts of this rank too."""
        before = {"parts": self._counts["parts"], "rows": self._counts["rows"]}
        place = {"part": self._parts.get(step, 0), "writer": self._manifest["writer"], "before": before}
        return contents(table, self.rank, step) | place

    def _count(self, step: int, table: pa.Table) -> None:
        self._counts["parts"] += 1
        self._counts["rows"] += table.num_rows
        self._parts[step] = self._parts.get(step, 0) + 1

    def _write_part(self, step: int, table: pa.Table) -> None:
        folder = self.folder / layout.step_name(step)
        folder.mkdir(exist_ok=True)  # without parents: a capture that was removed is not half resurrected
        file, lanes = encode_records(schema.filled(table, step=step, rank=self.rank))
        told = self._told(step, table) | {"sketches": lanes and lanes.told()}
        self._write(folder / layout.records_name(told["part"]), sealed(file, told))
        self._count(step, table)
        self._written += file.size

    def _write_packed(self, several: Sequence[tuple[int, pa.Table]], types: dict[str, pa.DataType]) -> None:
        place, held = list(types).index("sketch"), []
        for step, table in several:
            told, whole = self._told(step, table), schema.filled(table, step=step, rank=self.rank)
            whole = whole.set_column(place, "sketch", schema.stored_sketches(whole["sketch"]))
            held.append((replace(told_part(self.folder, told), number=told["part"]), whole))
            self._count(step, table)  # if they cannot be written, that leaves a gap in the count
        path = self.folder / f"packed-{self._packed:04d}.parquet"
        self._write(path, packing.encoded(held, types | {"sketch": schema.STORED_SKETCH}, self._packed))
        self._packed += 1
        self._written += path.stat().st_size

    def add_payload(self, digest: str, dtype: str, shape: Sequence[int], raw: Any) -> tuple[str, str]:
        """Keep a tensor's bytes, once; return ``(payload_segment, payload_key)`` for its record.

        Equal digest (16 hexadecimal digits), dtype and shape are taken for equal bytes (xxh3 has 64 bits: among a million
        tensors, one chance in 40 million that two differ unseen). ``raw`` is bytes-like in logical C order, kept until the
        segment is written, so it must not change. Raises OSError if a full segment could not be written; its tensors are lost,
        and noted.
        """
        raw = memoryview(raw).cast("B")
        key = f"{digest}-{dtype}-{'x'.join(map(str, shape))}"
        with self._lock:
            segment = self._keys.get(key)
            if segment is None:
                start = durable.address(raw)
                if self._pending.full(start, raw.nbytes):
                    self._write_segment()
                if len(self._keys) >= KNOWN_KEYS:  # what comes again is stored again
                    self._keys = dict.fromkeys((name for name, *_ in self._pending.tensors), self._pending.name)
                segment = self._keys[key] = self._pending.name
                self._pending.add(key, dtype, tuple(int(size) for size in shape), raw, start)
                if self._pending.size >= SEGMENT_BYTES:
                    self._write_segment()
            return segment, key

    def add_sites(self, rows: Iterable[tuple[int, Sequence[str], str | None]]) -> None:
        """Keep call stacks ``(site, frames, line_text)``: innermost frame first, site unique in the rank."""
        with self._lock:
            self._sites.extend((site, list(frames), text) for site, frames, text in rows)

    def note(self, text: str) -> None:
        """Add an observer note to the manifest (once per text); it is written with the next flush."""
        with self._lock:
            if text not in self._manifest["notes"]:
                self._manifest["notes"].append(text)
                self._noted = True

    def update(self, **fields: Any) -> None:
        """Set fields of the rank's manifest (seeds, devices that appeared later); written with the next flush."""
        with self._lock:
            self._manifest |= fields
            self._noted = True

    def flush(self) -> None:
        """Bring payload, stacks and notes to disk; after an OSError payload is lost, stacks and notes are tried again."""
        with self._lock:
            self._flush()

    def close(self, status: str = "complete") -> None:
        """Flush and write the final status into the manifest, once; after an OSError the capture reads as interrupted."""
        with self._lock:
            if self._manifest["status"] != "recording":
                return
            self._flush()
            self._syncer.wait()
            self._write_manifest(status)

    def displaced(self) -> bool:
        """Whether a process that knows its rank took this folder's place; see ``durable``."""
        lock = holder(self.folder)
        return bool(lock) and (lock.get("pid"), lock.get("host")) != (self._pid, socket.gethostname())

    def _flush(self) -> None:
        if os.getpid() != self._pid:
            raise TrueupError(f"rank {self.rank} belongs to process {self._pid}: a forked child must claim its own rank")
        if self.displaced():
            raise Displaced(f"it has no rank, and rank {self.rank} is captured in another process")
        if self._pending.tensors:
            self._write_segment()
        if self._sites:
            self._write_sites()
        if self._noted:
            self._write_manifest()

    def _next_segment(self) -> PendingSegment:
        self._segments += 1
        return PendingSegment(f"tensors-{self._segments - 1:04d}.safetensors")

    def _write_segment(self) -> None:
        full = self._pending
        self._pending = self._next_segment()  # whatever happens: memory must not grow on a full disk
        try:
            self._write(self.folder / full.name, full.chunks())
            self._counts["payload_bytes"] += full.size
        except OSError as error:
            for key, *_ in full.tensors:
                self._keys.pop(key, None)
            self.note(f"{len(full.tensors)} tensors ({full.size} bytes) were lost: {error.strerror or error}")
            raise

    def _write_sites(self) -> None:
        columns = [list(column) for column in zip(*self._sites, strict=True)]
        table = pa.table(columns, schema=schema.SITES)
        path = self.folder / f"sites-{self._site_parts:04d}.parquet"
        self._write(path, sealed(_encode(table, compression="zstd", write_page_checksum=True)))
        self._site_parts += 1
        self._sites = []

    def _write(self, path: Path, chunks: Iterable[Any]) -> None:
        durable.write_file(path, chunks, sync=False)
        self._syncer.add(path)

    def _write_manifest(self, status: str = "recording") -> None:
        content = {**self._manifest, "status": status, "written": dict(self._counts)}
        durable.write_json(self.folder / layout.MANIFEST, redacted(content))
        self._manifest["status"] = status
        self._noted = False

    def _write_root(self, root: Mapping[str, Any]) -> None:
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = {"created": created, **root, "format_version": layout.FORMAT_VERSION}
        try:
            durable.write_json(self.directory / layout.MANIFEST, redacted(content), replace=False)
        except FileExistsError:
            check_run(self.directory, root.get("run"))


def encode_records(table: pa.Table) -> tuple[pa.Buffer, Lanes | None]:
    """Return a records part as Parquet, and where its sketches lie. Dictionaries, LZ4, page checksums; sketches plain, for they
    are noise. LZ4 takes two thirds of zstd's time for 2 % more bytes. No minima and maxima: nobody searches by them, which saves
    a third."""
    if (place := table.schema.get_field_index("sketch")) >= 0:
        table = table.set_column(place, "sketch", schema.stored_sketches(table["sketch"]))
    leaves = [schema.leaf(field) for field in table.schema]
    metadata: list[pq.FileMetaData] = []
    file = _encode(
        table,
        compression={leaf: "none" if leaf == "sketch" else "lz4" for leaf in leaves},
        use_dictionary=[leaf for leaf in leaves if leaf in schema.DICTIONARIES],
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=PAGE_BYTES,
        metadata_collector=metadata,
    )
    return file, located_sketches(file, metadata[0], table)


def _encode(table: pa.Table, **options: Any) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


PATIENCE = 300.0  # seconds in which the disk has to finish a file before it is given up


class Syncer:
    """Syncs files and their folders in the order in which they were written."""

    def __init__(self) -> None:
        self._waiting: deque[Path] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def add(self, path: Path) -> None:
        """Sync a file soon; raises OSError if the disk failed to keep an earlier one."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._waiting.append(path)
            if self._thread is None:
                try:
                    self._start()
                except RuntimeError:  # the interpreter is ending
                    self._waiting.clear()
                    _sync(path)

    def wait(self) -> None:
        """Return when everything is on disk; raises OSError if it failed, or took nothing for `PATIENCE` seconds."""
        with self._changed:
            while self._thread is not None:
                left = len(self._waiting)
                if not self._changed.wait(PATIENCE) and len(self._waiting) == left:
                    raise OSError(f"the disk took nothing for {PATIENCE:.0f} seconds")
            if self._error is not None:
                raise self._error

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="trueup-sync", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._error is not None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                path = self._waiting[0]
            error = _sync(path)
            with self._changed:
                self._error = error
                self._waiting.popleft()
                self._changed.notify_all()


def _sync(path: Path) -> OSError | None:
    """Sync a file and the folder that names it; a file that is gone was removed with its capture, which is noticed elsewhere."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        os.fsync(descriptor)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
    durable.sync_folder(path.parent)
    return None
