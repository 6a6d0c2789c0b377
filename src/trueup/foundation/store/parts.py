"""Parts of records and their seals; each is read by itself, so that a damaged one costs only its own rows.

The seal of a Parquet file is what its writer says that it holds, and a checksum of that and of the footer. Pages carry checksums of
their own, the footer has none; a flipped bit there can move a column or, in pyarrow 26, abort the process. Between the last page
and the footer, where no Parquet reader looks, stand::

    the contents (JSON, may be empty) | TRUEUP02 | their length (4 bytes) | xxh3_64 of them and of everything after (8 bytes)

integers little-endian. With it a capture of 10,000 parts is opened without parsing as many footers. A file without a seal was
written by somebody else, and is read unsealed; one of ``TRUEUP01`` is checked, and says nothing of its contents.

The sketches of a part are read where they lie in its file. Parquet keeps them in one page, plain: 512 bytes each, one after the
other, without nulls. Its reader copies them twice and checks the page's CRC, which takes twice as long as all the rest. So the seal
tells their place, number and xxh3_64.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from trueup.foundation.model import LANES
from trueup.foundation.store import layout, schema

MAGIC = b"TRUEUP02"
_BEFORE = b"TRUEUP01"
_END = 8  # length of the footer (4 bytes, little-endian), then PAR1
_SEAL = 20
PAGE_BYTES = 1 << 29  # bytes up to which sketches of a part lie in one page
_TAIL = 1 << 14  # bytes read at once: the footer of a part, its seal and what that tells take 6,000


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the sketches of all rows that have statistics lie: ``count`` of them, ``at`` bytes from the beginning of the file."""

    at: int
    count: int
    checksum: str

    @classmethod
    def of(cls, told: Mapping[str, Any] | None) -> Lanes | None:
        """Take the word of a seal; raises ValueError, TypeError or KeyError if it tells no such place."""
        if told is None:
            return None
        found = cls(int(told["at"]), int(told["count"]), str(told["xxh3"]))
        if found.at < 0 or found.count < 0:
            raise ValueError(f"its sketches cannot be {found.count} at byte {found.at}")
        return found

    def told(self) -> dict[str, Any]:
        """Return what a seal tells."""
        return {"at": self.at, "count": self.count, "xxh3": self.checksum}


def sealed(file: pa.Buffer, told: Mapping[str, Any] | None = None) -> Iterator[memoryview | bytes]:
    """Yield the chunks of a Parquet file with its seal, whose contents are ``told``."""
    view = memoryview(file)
    start = len(view) - _END - int.from_bytes(view[-_END : -_END + 4], "little")
    said = b"" if told is None else json.dumps(told, separators=(",", ":")).encode()
    yield view[:start]
    yield said + MAGIC + len(said).to_bytes(4, "little") + _checksum(said, view[start:])
    yield view[start:]


def check_seal(path: Path) -> tuple[int, Any]:
    """Return a Parquet file's size in bytes, and what the seal at its end tells, None if nothing. Raises ValueError if it is no
    whole Parquet file, or its footer does not match its seal."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        at = max(0, size - _TAIL)
        file.seek(at)
        tail = file.read()
        start = size - _END - int.from_bytes(tail[-_END:-4], "little")
        if tail[-4:] != b"PAR1" or start < 4:
            raise ValueError("it does not end as a Parquet file does")

        def since(first: int) -> bytes:
            if first >= at:
                return tail[first - at :]
            file.seek(first)
            return file.read()

        begin = max(0, start - _SEAL)
        seal, footer = since(begin)[: start - begin], since(start)
        if seal[-16:-8] == _BEFORE and seal[-8:] != _checksum(b"", footer):
            raise ValueError("its footer does not match its checksum")
        if seal[:8] != MAGIC:
            return size, None
        told = min(int.from_bytes(seal[8:12], "little"), begin)
        said = since(begin - told)[:told]
        if seal[12:] != _checksum(said, footer):
            raise ValueError("its footer does not match its checksum")
    try:
        return size, json.loads(said) if said else None
    except (ValueError, RecursionError):
        raise ValueError("what its seal tells is no JSON") from None


def _checksum(said: bytes, footer: bytes | memoryview) -> bytes:
    found = xxhash.xxh3_64(said)
    found.update(footer)
    return found.intdigest().to_bytes(8, "little")


BROKEN = (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError)
"""What reading a damaged Parquet file raises."""

KEYS = ("rank", "step", "seq")  # columns by which records are sorted

ROWS_PER_BYTE = 64  # most rows a part may claim for a byte of its file; ours stay 10 times below. More is a bomb.


@dataclass(frozen=True, slots=True)
class Part:
    """A readable part of records."""

    path: Path
    rank: int
    step: int
    rows: int
    names: tuple[str, ...]
    segments: frozenset[str]
    levels: frozenset[str]
    has_sites: bool
    seqs: tuple[int, int] | None = None  # ``seq`` of the first row and of the last, where the rows are in order
    lanes: Lanes | None = None  # where its sketches lie
    before: tuple[int, int] | None = None  # the rank's parts and rows before this one; None where the seal does not tell
    writer: str | None = None  # which process wrote it, as in its rank's manifest; likewise
    number: int = 0  # among the parts of its step
    group: int | None = None  # of a packed one (`packed`): the row group of its file in which it lies, from row ``start`` on
    start: int = 0


def inspect(path: Path, rank: int, step: int) -> Part:
    """Find out by its seal, else its columns, what a part holds and refers to; raises one of ``BROKEN`` if it is damaged."""
    size, told = check_seal(path)
    found = told_part(path, told) if told is not None else _looked_up(path)
    if found.rows > ROWS_PER_BYTE * size:
        raise ValueError(f"claims {found.rows} rows in a file of {size} bytes")
    for name, expected, given in (("step", step, found.step), ("rank", rank, found.rank)):
        if given != expected:
            raise ValueError(f"rows are not of {name} {expected}, as the folder is")
    if told is not None and (number := told.get("part")) not in (None, layout.number(layout.RECORDS, path.name)):
        raise ValueError(f"it is a copy of {layout.records_name(int(number))}")
    return replace(found, number=layout.number(layout.RECORDS, path.name) or 0)


def contents(table: pa.Table, rank: int, step: int) -> dict[str, Any]:
    """Return what the seal of a part of records tells."""
    there = table.column_names
    held = {name: table[name].unique().drop_null().to_pylist() if name in there else [] for name in ("level", "payload_segment")}
    seq = table["seq"].to_numpy() if "seq" in there and not table["seq"].null_count else np.empty(0, np.int64)
    in_order = len(seq) > 0 and bool((seq[1:] >= seq[:-1]).all())
    return {
        "rank": rank, "step": step, "rows": table.num_rows, "names": there, "levels": held["level"],
        "segments": held["payload_segment"], "sites": "site" in there and table["site"].null_count < table.num_rows,
        "seqs": [int(seq[0]), int(seq[-1])] if in_order else None,
    }  # fmt: skip


def told_part(path: Path, told: Any) -> Part:
    """Take the word of a seal; reading the rows checks it again."""
    rank, step, rows = (int(told[name]) for name in ("rank", "step", "rows"))
    names, levels, segments = (tuple(map(str, told[name])) for name in ("names", "levels", "segments"))
    if rows < 0:
        raise ValueError(f"claims {rows} rows")
    seqs = None if told.get("seqs") is None else (int(told["seqs"][0]), int(told["seqs"][1]))
    lanes = Lanes.of(told.get("sketches"))
    counted = told.get("before")
    before = None if counted is None else (int(counted["parts"]), int(counted["rows"]))
    writer = None if told.get("writer") is None else str(told["writer"])
    has_sites = bool(told["sites"])
    return Part(path, rank, step, rows, names, frozenset(segments), frozenset(levels), has_sites, seqs, lanes, before, writer)


def _looked_up(path: Path) -> Part:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        # Nothing more of the metadata: in pyarrow 26 its accessors let a C++ exception end the process.
        rows, names = file.metadata.num_rows, file.schema_arrow.names
        if rows > ROWS_PER_BYTE * path.stat().st_size:
            raise ValueError(f"claims {rows} rows in a file of {path.stat().st_size} bytes")
        wanted = [name for name in ("step", "rank", "payload_segment", "level", "site") if name in names]
        references = file.read(wanted, use_threads=False)
    references.validate(full=True)
    rank, step = (_the_only(references, name) for name in ("rank", "step"))
    found = {name: references[name].unique().drop_null().to_pylist() for name in references.column_names}
    segments, levels = (frozenset(map(str, found.get(name, ()))) for name in ("payload_segment", "level"))
    return Part(path, rank, step, rows, tuple(names), segments, levels, bool(found.get("site")))


KEPT = 4  # row groups of a packed file of which steps are still to come: columns of all calls, sketches, and what only some need

Kept = dict[tuple[Any, ...], pa.Table]
Run = tuple[Sequence[Part], pa.Table]  # parts of one file that lie one after the other and have the same columns, and their rows


def read(
    several: Sequence[Part], columns: Collection[str] | None, where: Collection[str], kept: Kept | None = None
) -> list[Run]:
    """Read columns (None: all), and those ``where`` `settled` will choose, of a part, or of several in one row group of a packed
    file; as in the file. Who reads the parts one after the other keeps in ``kept`` a row group that has more of them. Raises one
    of ``BROKEN``."""
    first = several[0]
    chosen = None if columns is None else {*columns, *where, *KEYS}
    runs = _runs(several)
    wanted = [[name for name in run[0].names if chosen is None or name in chosen] for run in runs]
    needed = list(dict.fromkeys(name for names in wanted for name in names))
    key = (first.path, first.group, *needed)
    raw = None if kept is None else kept.pop(key, None)
    if raw is None:
        raw = _read(first, needed)
    end = max(part.start + part.rows for part in several)
    if (first.group is None and raw.num_rows != first.rows) or raw.num_rows < end:
        raise ValueError(f"holds {raw.num_rows} rows, expected {end}")
    if kept is not None and first.group is not None and end < raw.num_rows:
        kept[key] = raw
        for oldest in list(kept)[:-KEPT]:
            kept.pop(oldest, None)
    rows = [sum(part.rows for part in run) for run in runs]
    return [(run, raw.select(names).slice(run[0].start, count)) for run, names, count in zip(runs, wanted, rows, strict=True)]


def _runs(several: Sequence[Part]) -> list[list[Part]]:
    runs: list[list[Part]] = []
    for part in several:
        last = runs[-1][-1] if runs else None
        if last is not None and last.names == part.names and last.start + last.rows == part.start:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def apart(runs: Sequence[Run]) -> Iterator[tuple[Part, pa.Table]]:
    """Yield each part of runs with its rows."""
    for parts, table in runs:
        for part in parts:
            yield part, table.slice(part.start - parts[0].start, part.rows)


def _read(part: Part, needed: list[str]) -> pa.Table:
    """Read columns of a part's file, or of its row group where it is packed."""
    with pa.OSFile(str(part.path)) as source:
        file = pq.ParquetFile(source, page_checksum_verification=True)
        if part.group is None:
            return file.read(needed, use_threads=False)
        return file.read_row_group(part.group, needed, use_threads=False)


def settled(
    several: Sequence[Run], columns: Collection[str] | None, where: Mapping[str, Collection[Any]]
) -> pa.Table:
    """Check what `read` gave of parts, all with the same columns and types; return the rows whose columns have one of the
    accepted values in ``where`` (step and rank are the part's), in the schema's types. A known column that the parts lack is
    null; ``columns`` None: all they have. Raises one of ``BROKEN`` if a part is damaged."""
    raw = pa.concat_tables([table for _, table in several])
    raw.validate(full=True)
    arrays = {name: _typed(raw[name], name) for name in raw.column_names}
    _check_keys(arrays, [part for its, _ in several for part in its])
    lacking = schema.RECORDS.names if columns is None else [*columns, *where]
    for name in lacking:
        if name not in arrays and name in schema.NAMES:
            arrays[name] = pa.chunked_array([pa.nulls(raw.num_rows, schema.TYPES[name])])
    table = pa.table(arrays)
    if not set(where) <= set(arrays):  # an unknown column that these parts lack has no accepted value here
        return table.slice(0, 0)
    return _filter(table, where) if where else table


def _check_keys(arrays: Mapping[str, pa.ChunkedArray], several: Sequence[Part]) -> None:
    """Refuse parts whose rows are not of the step and rank of their folders, or of no call."""
    rows = [part.rows for part in several]
    for name, expected in (("step", [part.step for part in several]), ("rank", [part.rank for part in several])):
        column = arrays.get(name)
        if column is None or column.null_count:
            raise ValueError(f"rows have no {name}")
        if not bool((column.to_numpy() == np.repeat(expected, rows)).all()):
            raise ValueError(f"rows are not of {name} {expected[0]}, as the folder is")
    if "seq" not in arrays or arrays["seq"].null_count:
        raise ValueError("rows have no seq")


def _the_only(table: pa.Table, name: str) -> int:
    """Return the one number that stands in all rows of a column."""
    column = table[name] if name in table.column_names else None
    if column is None or column.null_count or not len(column):
        raise ValueError(f"rows have no {name}")
    values = column.to_numpy()
    if not bool((values == values[0]).all()):
        raise ValueError(f"rows are of more than one {name}")
    return int(values[0])


def _typed(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    kind = schema.TYPES.get(name)
    if kind is None:
        return column
    if column.type == schema.STORED_SKETCH:
        return schema.read_sketches(column)
    return column if column.type == kind else column.cast(kind)


def _filter(table: pa.Table, where: Mapping[str, Collection[Any]]) -> pa.Table:
    import pyarrow.compute as pc  # here: it takes 0.1 s, for which a process that only records need not wait

    mask = None
    for name, accepted in where.items():
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        one = pc.is_in(column, value_set=pa.array(list(accepted), column.type))
        mask = one if mask is None else pc.and_(mask, one)
    # As a rule all rows of a part are wanted, and a copy of them costs as much as reading them.
    return table if mask is None or pc.all(mask, skip_nulls=False).as_py() else table.filter(mask)


def in_order(table: pa.Table) -> pa.Table:
    """Sort by rank, step and seq; rows of a call keep the order in which they were written."""
    keys = [table[name].to_numpy() for name in reversed(KEYS)]
    sorted_ = np.ones(max(len(table) - 1, 0), bool)
    for key in keys:  # from the last key to the first, of which a rise outweighs those before
        before, after = key[:-1], key[1:]
        sorted_ = (before < after) | ((before == after) & sorted_)
    if sorted_.all():
        return table
    return table.take(pa.array(np.lexsort(keys)))  # stable


def located_sketches(file: pa.Buffer, metadata: pq.FileMetaData, table: pa.Table) -> Lanes | None:
    """Find out where the sketches of a part, as Parquet with its ``metadata``, lie; None where that cannot be said in short."""
    if not {"sketch", "n_nan"} <= set(table.column_names) or metadata.num_row_groups != 1:
        return None
    sketches = table["sketch"].combine_chunks()
    count, there = len(sketches) - sketches.null_count, sketches.is_valid()
    if schema.SKETCH_BYTES * count > PAGE_BYTES or not there.equals(table["n_nan"].combine_chunks().is_valid()):
        return None
    group = metadata.row_group(0)
    chunk = next(group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema == "sketch")
    end = chunk.data_page_offset + chunk.total_compressed_size
    held = memoryview(file)[end - schema.SKETCH_BYTES * count : end]
    first = sketches[int(np.argmax(there.to_numpy(zero_copy_only=False)))].as_buffer() if count else b""
    if held[:schema.SKETCH_BYTES] != memoryview(first):  # they are not alone in their page
        return None
    return Lanes(end - len(held), count, xxhash.xxh3_64_hexdigest(held))


def read_sketches(path: Path, lanes: Lanes, into: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return the sketches of a part, float64 ``(count, 64)``: at the beginning of ``into`` if that is large enough. Raises
    OSError if the file cannot be read, ValueError if it is too short or does not match its checksum."""
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < lanes.at + schema.SKETCH_BYTES * lanes.count:
            raise ValueError(f"it ends before its {lanes.count} sketches do")
        found: NDArray[Any] = np.empty((lanes.count, LANES)) if into is None or len(into) < lanes.count else into[: lanes.count]
        file.seek(lanes.at)
        left = found.reshape(-1).view(np.uint8).data
        while left:
            read = file.readinto(left)
            if not read:
                raise ValueError(f"it ends before its {lanes.count} sketches do")
            left = left[read:]
    _check_sketches(found.data, lanes)
    return found


def mapped_sketches(path: Path, lanes: Lanes) -> NDArray[np.uint8]:
    """Return the sketches of a part as mapped, uint8 ``(count, 512)``, for looking at a few here and there. Raises OSError if the
    file cannot be read, ValueError if it is too short or does not match its checksum."""
    size, before = schema.SKETCH_BYTES * lanes.count, lanes.at % mmap.ALLOCATIONGRANULARITY
    if not size:
        return np.empty((0, schema.SKETCH_BYTES), np.uint8)
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < lanes.at + size:
            raise ValueError(f"it ends before its {lanes.count} sketches do")
        held = mmap.mmap(file.fileno(), before + size, access=mmap.ACCESS_READ, offset=lanes.at - before)
    found = np.frombuffer(held, np.uint8, size, before)
    _check_sketches(found.data, lanes)
    return found.reshape(lanes.count, schema.SKETCH_BYTES)


def _check_sketches(found: memoryview, lanes: Lanes) -> None:
    if xxhash.xxh3_64_hexdigest(found) != lanes.checksum:
        raise ValueError("its sketches do not match their checksum")
