"""Writing one rank of a capture: parts of records, payload segments, call stacks, manifest.

Every file appears whole or not at all, and refers only to files already written: a process killed at any point leaves a capture
that is readable up to its last flush, synced or not. A thread syncs parts and payload behind, and the manifest that calls a
capture complete after all of them. What is not synced is at stake only when the machine goes down; `wait` tells when nothing is.

A step of few rows costs a folder, a file and 400 bytes a row. Packed, the rows of many lie one after the other, in one Parquet file
with an index::

    rank-00000/packed-0000.parquet      row groups of whole parts, each of up to `GROUP` rows or of one part
                                        seal: what the seal of each part said, its row group, and where it begins there

Sketches are stored once where they are the same (a tensor is one call's output and another's input), and all is compressed with
zstd: 50 to 100 bytes a row in place of 400, and bit by bit what was there. Whoever reads a capture, and counts what is missing
(`salvage`), sees the same parts as before.

`compact` removes a part only when its rows were read back from the packed file and are the same. One that is killed leaves parts
in both places, which are read once, and the next one removes them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from dataclasses import replace as replaced
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from trueup.foundation.model import TrueupError
from trueup.foundation.progress import advance, tell_written
from trueup.foundation.redaction import redacted
from trueup.foundation.store import durable, layout, schema
from trueup.foundation.store.durable import Displaced, alive, check_run, holder, take
from trueup.foundation.store.parts import (
    BROKEN,
    PAGE_BYTES,
    ROWS_PER_BYTE,
    Lanes,
    Part,
    apart,
    check_seal,
    contents,
    located_sketches,
    read,
    sealed,
    told_part,
)
from trueup.foundation.store.segment import PendingSegment

if TYPE_CHECKING:
    from trueup.foundation.store.reader import Capture

KNOWN_KEYS = 1 << 18  # payloads whose segment is remembered, some 250 bytes each
MANY = 32  # steps of a portion from which on they are packed: of 30 ms, as portions come each second
SEGMENT_BYTES = 64 * 2**20  # payload that is gathered before a segment is written

GROUP = 1 << 15  # rows of a row group: what a comparison reads at once
FILE = 1 << 17  # rows of a file, which is made in memory: 90 MB
PARTS = 1 << 12  # parts of a file


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
        self._write(path, encoded(held, types | {"sketch": schema.STORED_SKETCH}, self._packed))
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


@dataclass(slots=True)
class Packed:
    """What `compact` did."""

    rows: int = 0
    parts: int = 0  # that were packed, into so many ``files``; bytes ``before`` and ``after``
    files: int = 0
    before: int = 0
    after: int = 0


def inspect_packed(path: Path, rank: int) -> list[Part]:
    """Return the parts of a packed file of a rank, by its seal; raises one of ``BROKEN`` if it is damaged."""
    size, told = check_seal(path)
    if told is None or int(told["number"]) != layout.number(layout.PACKED, path.name) or int(told["rank"]) != rank:
        raise ValueError("its seal does not say that it is this file")
    found = []
    for one in told["parts"]:
        part = told_part(path, {**one, "rank": rank, "names": told["names"][one["names"]], "levels": told["levels"][one["levels"]]})
        number, group, start = (int(one[name]) for name in ("number", "group", "start"))
        if min(number, group, start, part.step) < 0:
            raise ValueError(f"its seal tells of a part at {group}, {start}")
        found.append(replaced(part, number=number, group=group, start=start))
    if sum(part.rows for part in found) > ROWS_PER_BYTE * size:
        raise ValueError(f"claims {sum(part.rows for part in found)} rows in a file of {size} bytes")
    return found


def compact(capture: Capture) -> Packed:
    """Pack the parts of a capture's records; what is packed already stays, and so does what cannot be read. Raises TrueupError if
    the capture is being recorded, or what was packed does not read back as what was there: then no part of that file was removed.
    OSError: the disk is full, or read-only."""
    path, done = capture.path, Packed()
    for rank, manifest in capture.ranks.items():
        lock = holder(path / layout.rank_name(rank))
        if manifest.get("status") == "recording" and lock.get("host") == socket.gethostname() and alive(lock.get("pid")):
            raise TrueupError(f"{path} is being recorded: rank {rank} by process {lock.get('pid')}\n  next:     wait for its end")
    runs = [*_runs([part for part in capture.parts if part.group is None and part.rows])]
    if runs and capture.root["format_version"] < layout.FORMAT_VERSION:  # first: an older reader would miss what is packed
        durable.write_json(path / layout.MANIFEST, {**capture.root, "format_version": layout.FORMAT_VERSION})
    for n, run in enumerate(runs):
        advance("packing", "files", n, len(runs))
        rest = run
        while rest:
            rest = _pack(path, rest, done)
    _remove(capture.left_behind)  # of a `compact` that was killed
    for rank in capture.ranks:
        for folder in (path / layout.rank_name(rank)).iterdir():
            if layout.number(layout.STEP, folder.name) is not None:
                with suppress(OSError):  # what is not ours is left in it
                    folder.rmdir()
    return done


def _runs(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts of each file: of one rank, in their order."""
    run: list[Part] = []
    rows = 0
    for part in sorted(parts, key=lambda part: (part.rank, part.step, part.number)):
        if run and (part.rank != run[0].rank or rows + part.rows > FILE or len(run) >= PARTS):
            yield run
            run, rows = [], 0
        run.append(part)
        rows += part.rows
    if run:
        yield run


def _pack(root: Path, run: Sequence[Part], done: Packed) -> list[Part]:
    """Pack the parts of one file, and remove them when it was read back; return those whose columns are of other types."""
    held: list[tuple[Part, pa.Table]] = []
    types: dict[str, pa.DataType] = {}
    others: list[Part] = []
    for part in run:
        try:
            ((_, table),) = read([part], None, ())
        except BROKEN:  # it stays where it is, and whoever reads the capture tells of it
            continue
        if others or any(types.get(field.name, field.type) != field.type for field in table.schema):
            others.append(part)
            continue
        types |= {field.name: field.type for field in table.schema}
        held.append((part, table))
    if not held:
        return others
    folder = root / layout.rank_name(run[0].rank)
    known = [layout.number(layout.PACKED, entry.name) for entry in folder.iterdir()]
    number = max((one for one in known if one is not None), default=-1) + 1
    path = folder / f"packed-{number:04d}.parquet"
    durable.write_file(path, encoded(held, types, number))
    _check(path, held)
    files = [part.path for part, _ in held]
    done.before += sum(file.stat().st_size for file in files)
    done.after += path.stat().st_size
    done.rows, done.parts, done.files = done.rows + sum(part.rows for part, _ in held), done.parts + len(held), done.files + 1
    _remove(files)
    return others


@dataclass(slots=True)
class _Group:
    """A row group in the making."""

    rows: int = 0
    tables: list[pa.Table] = field(default_factory=list)


def encoded(held: Sequence[tuple[Part, pa.Table]], types: dict[str, pa.DataType], number: int) -> Iterator[memoryview | bytes]:
    """Return the chunks of a packed file."""
    groups, index = [_Group()], []
    names, levels = list(dict.fromkeys(part.names for part, _ in held)), list(dict.fromkeys(part.levels for part, _ in held))
    for part, table in held:
        if groups[-1].tables and groups[-1].rows + part.rows > GROUP:
            groups.append(_Group())
        group = groups[-1]
        index.append({
            "step": part.step, "number": part.number, "rows": part.rows, "group": len(groups) - 1, "start": group.rows,
            "names": names.index(part.names), "levels": levels.index(part.levels), "segments": sorted(part.segments),
            "sites": part.has_sites, "seqs": part.seqs, "writer": part.writer,
            "before": None if part.before is None else {"parts": part.before[0], "rows": part.before[1]},
        })  # fmt: skip
        if (there := table.column_names) != list(types):
            table = pa.table({name: table[name] if name in there else pa.nulls(part.rows, kind) for name, kind in types.items()})
        group.tables.append(table)
        group.rows += part.rows
    whole = [pa.concat_tables(group.tables).unify_dictionaries().combine_chunks() for group in groups]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, whole[0].schema, compression="zstd", compression_level=3, write_statistics=False, write_page_checksum=True,
        use_dictionary=[leaf for leaf in map(schema.leaf, whole[0].schema) if leaf == "sketch" or leaf in schema.DICTIONARIES],
        dictionary_pagesize_limit=1 << 29,
    ) as writer:  # fmt: skip
        for table in whole:
            writer.write_table(table, row_group_size=max(len(table), 1))
    told: dict[str, Any] = {"rank": held[0][0].rank, "number": number, "names": names}
    return sealed(sink.getvalue(), {**told, "levels": [sorted(one) for one in levels], "parts": index})


def _check(path: Path, held: Sequence[tuple[Part, pa.Table]]) -> None:
    """Read a packed file as everybody will; raises TrueupError, and removes it, if it is not what it was made of."""
    same = False
    with suppress(*BROKEN):
        found = inspect_packed(path, held[0][0].rank)
        heaps = [list(parts) for _, parts in groupby(found, lambda part: part.group)]
        tables = [table for heap in heaps for _, table in apart(read(heap, None, ()))]
        before = [replaced(part, path=path, lanes=None) for part, _ in held]
        same = [replaced(part, group=None, start=0) for part in found] == before
        same = same and all(_same(table, was) for table, (_, was) in zip(tables, held, strict=True))
    if not same:
        path.unlink()
        raise TrueupError(f"{path} did not read back as what was packed, and was removed: the parts are all there; check the disk")


def _same(first: pa.Table, second: pa.Table) -> bool:
    return first.column_names == second.column_names and all(
        _bits(first[name]).equals(_bits(second[name])) for name in first.column_names
    )


def _bits(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column so that equal bits compare equal, NaN too."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    if pa.types.is_float64(column.type):
        return pa.chunked_array([chunk.view(pa.int64()) for chunk in column.chunks], pa.int64())
    return column


def _remove(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
