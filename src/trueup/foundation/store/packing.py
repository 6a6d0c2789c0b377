"""Packed records: the parts of many steps of a rank in one Parquet file, with an index.

A step of few rows costs a folder, a file and 400 bytes a row. Packed, the rows of many lie one after the other::

    rank-00000/packed-0000.parquet      row groups of whole parts, each of up to `GROUP` rows or of one part
                                        seal: what the seal of each part said, its row group, and where it begins there

Sketches are stored once where they are the same (a tensor is one call's output and another's input), and all is compressed with
zstd: 50 to 100 bytes a row in place of 400, and bit by bit what was there. Whoever reads a capture, and counts what is missing
(`salvage`), sees the same parts as before.

`compact` removes a part only when its rows were read back from the packed file and are the same. One that is killed leaves parts
in both places, which are read once, and the next one removes them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from trueup.foundation.model import TrueupError
from trueup.foundation.progress import advance
from trueup.foundation.store import durable, layout, schema
from trueup.foundation.store.durable import alive, holder
from trueup.foundation.store.parts import BROKEN, ROWS_PER_BYTE, Part, apart, check_seal, read, sealed, told_part

if TYPE_CHECKING:
    from trueup.foundation.store.reader import Capture

GROUP = 1 << 15  # rows of a row group: what a comparison reads at once
FILE = 1 << 17  # rows of a file, which is made in memory: 90 MB
PARTS = 1 << 12  # parts of a file


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
