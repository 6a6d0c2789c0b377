"""Reading a capture: what it holds, its records, its tensors, its call stacks, and what is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trueup.foundation.kernels import digest as digest_of
from trueup.foundation.kernels import hexadecimal
from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout, objects, parts, salvage, schema
from trueup.foundation.store.durable import side_by_side
from trueup.foundation.store.parts import BROKEN, Part, Run
from trueup.foundation.store.segment import Segment, open_segment

READERS = 2  # parts that are read at a time: more hide the waiting for a disk, and take turns at the interpreter instead

Stack = tuple[tuple[str, ...], str | None]  # a call's frames, innermost first, and the text of the innermost line

OPEN_SEGMENTS = 64  # segments that stay mapped

WRITTEN = "written"  # column that no file holds: the place of each row in the order in which rows were written


def open_capture(path: str | Path | Capture) -> Capture:
    """Open a capture for reading, salvaging what an interrupted run left; one that is open is returned as it is, one at a URL
    (``s3://bucket/run``, ``gs://``, ``az://``) is fetched first, and so is the folder into which one was.

    Raises:
        TrueupError: there is no such directory, it is not a capture, its format is newer, or its manifest is damaged.
    """
    if isinstance(path, Capture):
        return path
    lacking: list[str] = []
    root, payload = Path(path), None
    url = layout.url_of(path) or (objects.url_of_folder(root) if (root / layout.FETCHED).exists() else None)
    if url is not None:
        root, lacking, payload = objects.fetched(url)
    content = layout.read_root(root)
    found = salvage.scan(root, content)
    for text in lacking:
        found.lose(text)
    return Capture(root, content, found, payload)


@dataclass(frozen=True, slots=True)
class Piece:
    """The sketches of a part of the records of a rank and step, which lie where they can be read by themselves."""

    rows: int  # of the part; those that have statistics have a sketch
    count: int  # how many have
    read: Callable[[NDArray[np.float64] | None], NDArray[np.float64] | None]
    """Returns them, float64 ``(count, 64)``, in what it is given if that is large enough; None if they are damaged, which
    `Capture.problems` then tells."""
    mapped: Callable[[], NDArray[np.uint8] | None]  # returns them where the file is mapped, uint8 ``(count, 512)``; None likewise


class Capture:
    """A capture on disk. Cheap to hold: records are read when asked for, tensors are mapped.

    >>> capture = open_capture("runs/cpu")
    >>> table = capture.records(["step", "seq", "op", "slot", "l2"], level="aten", step=0)
    """

    path: Path
    root: dict[str, Any]  # the capture's manifest
    ranks: dict[int, dict[str, Any]]  # each rank's manifest, empty where it was lost
    problems: list[str]  # one sentence for each thing that is missing or damaged; grows when reading finds more
    lost: list[str]  # the problems that mean records or tensors were there once and cannot be read; an interrupted run lost none
    unfinished: list[str]  # the problems that mean the run or its capture ended before all was recorded that was wanted

    def __init__(
        self, root: Path, content: dict[str, Any], found: salvage.Found, payload: objects.Payload | None = None
    ) -> None:
        self.path, self.root, self.ranks, self.problems = root, content, found.ranks, found.problems
        self.lost, self.unfinished = found.lost, found.unfinished
        self._parts, self._site_files, self.left_behind = found.parts, found.sites, found.left_behind
        self._names = schema.NAMES.union(*{part.names for part in found.parts})
        self._levels = frozenset[str]().union(*(part.levels for part in found.parts))
        self._by_step: dict[int, dict[int, list[Part]]] = {}  # and by rank: of thousands, one is wanted at a time
        for part in sorted(found.parts, key=lambda part: part.step):
            self._by_step.setdefault(part.step, {}).setdefault(part.rank, []).append(part)
        self._sites: dict[int, dict[int, Stack]] = {}
        self._segments: dict[tuple[int, str], Segment] = {}
        self._kept: parts.Kept = {}  # what was read of a packed file and holds the next steps
        self._payload = payload
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Capture({str(self.path)!r}, {len(self.ranks)} ranks, {len(self.steps)} steps, {self.rows} rows)"

    def __getstate__(self) -> dict[str, Any]:  # for another process of this user, which maps and locks for itself
        return {**self.__dict__, "_segments": {}, "_kept": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_lock": threading.Lock()})

    def narrowed(self, ranks: Collection[int]) -> Capture:
        """Return this capture with the records of some ranks alone; steps, levels and columns are those of all."""
        found = copy(self)
        found.ranks = {rank: self.ranks[rank] for rank in ranks if rank in self.ranks}
        found.problems, found.lost, found._kept = list(self.problems), list(self.lost), {}
        held = {step: {rank: its[rank] for rank in ranks if rank in its} for step, its in self._by_step.items()}
        found._by_step, found._parts = held, [part for its in held.values() for several in its.values() for part in several]
        found._site_files = {rank: self._site_files[rank] for rank in ranks if rank in self._site_files}
        found._sites = {}
        return found

    @property
    def steps(self) -> list[int]:
        """Steps with records, in order."""
        return list(self._by_step)

    @property
    def names(self) -> frozenset[str]:
        """Columns that `records` can give: those of the format, what any part has beside, and `WRITTEN`."""
        return self._names | {WRITTEN}

    @property
    def parts(self) -> Sequence[Part]:
        """Its readable parts of records."""
        return self._parts

    @property
    def levels(self) -> frozenset[str]:
        """Levels of its calls."""
        return self._levels

    @property
    def imported(self) -> bool:
        """Whether it was made of another tool's dump."""
        return "imported" in self.root

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        """Rows of each rank and step that has any."""
        found: dict[tuple[int, int], int] = {}
        for part in self._parts:
            found[part.rank, part.step] = found.get((part.rank, part.step), 0) + part.rows
        return found

    @property
    def rows(self) -> int:
        """Rows of all readable parts."""
        return sum(part.rows for part in self._parts)

    def records(
        self,
        columns: Sequence[str] | None = None,
        *,
        rank: int | Collection[int] | None = None,
        step: int | Collection[int] | None = None,
        **where: Any,
    ) -> pa.Table:
        """Return records sorted by rank, step and seq, the slots of a call in the order in which they were written.

        Args:
            columns: names, in order; None for all, those that a newer writer added included. `WRITTEN` numbers the rows of a rank
                and step in the order in which they were written: a call's results after all that ran before they were there.
            rank: one or several, None for all.
            step: likewise; parts of other steps and ranks are not opened.
            where: any other column: the value, or the values, to keep (``level="aten"``, ``phase=("forward",)``).

        Returns:
            a table in the types of ``schema.RECORDS`` (names are Arrow dictionaries). A part that turns out to be
            damaged is left out and named in ``problems``.

        Raises:
            ValueError: a column is unknown.
        """
        wanted = {name: _values(value) for name, value in {"rank": rank, "step": step, **where}.items()}
        accepted = {name: values for name, values in wanted.items() if values is not None}
        unknown = sorted(({*(columns or ())} - self.names) | ({*accepted} - self._names))
        if unknown:
            raise ValueError(f"no columns {unknown} in {self.path}: there are {sorted(self._names)}")
        steps = sorted(accepted["step"]) if "step" in accepted else self._by_step
        chosen = [part for step in steps for part in self._of_step(step, accepted.get("rank"))]
        names = None if columns is None else [name for name in dict.fromkeys([*columns, *parts.KEYS]) if name != WRITTEN]
        others = {name: values for name, values in accepted.items() if name not in ("rank", "step")}  # each part has one of them
        together = [list(its) for _, its in groupby(chosen, lambda part: (part.path, part.group))]
        raw = side_by_side(lambda several: self._read(several, names, others), together, READERS)
        tables = self._settled([run for runs in raw for run in runs], names, others)
        if not tables:
            return _selected(schema.RECORDS.empty_table(), columns or schema.RECORDS.names)
        table = self._joined(tables).unify_dictionaries()
        if columns is not None and WRITTEN in columns:
            table = table.append_column(WRITTEN, pa.array(np.arange(len(table))))
        there = table.column_names
        ordered = [name for name in schema.RECORDS.names if name in there]
        extra = [name for name in there if name not in schema.NAMES]
        return _selected(parts.in_order(table), columns if columns is not None else [*ordered, *extra])

    def _of_step(self, step: int, ranks: Collection[int] | None) -> list[Part]:
        """Return the parts of a step and some ranks, all for None."""
        held = self._by_step.get(step, {})
        chosen = held if ranks is None or len(ranks) > len(held) else sorted(ranks)
        return [part for rank in chosen if ranks is None or rank in ranks for part in held.get(rank, ())]

    def pieces(self, rank: int, steps: Collection[int]) -> list[Piece] | None:
        """Return the sketches of a rank and some steps, part by part in the order of `records`, or None if no seal tells."""
        found, last = [], (-1, -1)
        for part in (part for step in sorted(steps) for part in self._of_step(step, (rank,))):
            if part.lanes is None or part.seqs is None or (part.step, part.seqs[0]) < last:
                return None
            last = part.step, part.seqs[1]
            place = part.path, part.lanes
            read = partial(self._sound, part, parts.read_sketches, *place)
            mapped = partial(self._sound, part, parts.mapped_sketches, *place)
            found.append(Piece(part.rows, part.lanes.count, read, mapped))
        return found

    def _sound(self, part: Part, read: Callable[..., NDArray[Any]], *given: Any) -> NDArray[Any] | None:
        try:
            return read(*given)
        except BROKEN as error:
            self._damaged(part, error)
            return None

    def _joined(self, tables: list[pa.Table]) -> pa.Table:
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:  # only columns that are not ours can disagree
            self._problem(f"unknown columns differ in type between parts and are left out: {error}")
            ours = [table.select([name for name in table.column_names if name in schema.NAMES]) for table in tables]
            return pa.concat_tables(ours)

    def _read(self, several: list[Part], names: list[str] | None, where: Collection[str]) -> list[Run]:
        try:
            return parts.read(several, names, where, self._kept)
        except BROKEN as error:
            for part in several:
                self._damaged(part, error)
            return []

    def _settled(
        self, read: list[Run], names: list[str] | None, where: dict[str, Collection[Any]]
    ) -> list[pa.Table]:
        """Return what is sound of the parts that were read, together if they are alike, which costs least."""
        if read and all(table.schema.equals(read[0][1].schema) for _, table in read):
            try:
                table = parts.settled(read, names, where)
            except BROKEN:  # one of them is damaged: below it is told which
                pass
            else:
                return [table] if table else []
        found = []
        for part, table in parts.apart(read):
            try:
                found.append(parts.settled([((part,), table)], names, where))
            except BROKEN as error:
                self._damaged(part, error)
        return [table for table in found if table]

    def _damaged(self, part: Part, error: BaseException) -> None:
        self._problem(salvage.damaged(part.path, part.rank, part.step, error), lost=True)

    def _problem(self, text: str, *, lost: bool = False) -> None:
        with self._lock:
            if text not in self.problems:
                self.problems.append(text)
                self.lost += [text] if lost else []

    def payload(
        self, rank: int, segment: str, key: str, view: Sequence[int] | None = None, digest: str | None = None
    ) -> NDArray[Any]:
        """Return a recorded tensor as a read-only array over the mapped file.

        Args:
            rank: that recorded it.
            segment: file that holds it; a record names it, ``key`` and ``view`` in its columns ``payload_...``.
            key: name of the tensor in that file.
            view: part of it; None: all, flat or in the shape in which it was written.
            digest: of the record, against which the bytes are checked; None: the record has none.

        Raises:
            TrueupError: the file is missing or damaged, lacks the tensor or holds other bytes; the message says what can be done.
        """
        with self._lock:
            opened = self._segment(rank, segment)
            if self._payload is not None and self._payload.bring(opened.path, *opened.place(key), checked=digest is not None):
                del self._segments[rank, segment]
                opened = self._segment(rank, segment)
        found = opened.tensor(key, view)
        if digest is not None and (got := hexadecimal(digest_of(found))) != digest:
            raise TrueupError(
                f"{opened.path}: tensor {key!r} is damaged: its bytes have the digest {got}, and those that were recorded had "
                f"{digest[:40]}; copy the file back from the machine that recorded the capture, or record again"
            )
        return found

    def _segment(self, rank: int, segment: str) -> Segment:
        opened = self._segments.get((rank, segment))
        if opened is None:
            path = salvage.segment_path(self.path, rank, segment)
            try:
                opened = open_segment(path)
            except OSError as error:
                raise TrueupError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
            if len(self._segments) >= OPEN_SEGMENTS:
                self._segments.pop(next(iter(self._segments)))
            self._segments[rank, segment] = opened
        return opened

    def sites(self, rank: int) -> dict[int, Stack]:
        """Return the call stacks of a rank: site -> (frames, innermost first; text of the innermost line or None)."""
        if rank not in self._sites:
            stacks: dict[int, Stack] = {}
            for path in self._site_files.get(rank, ()):
                try:
                    parts.check_seal(path)
                    stacks |= _stacks(path.read_bytes())
                except BROKEN as error:
                    reason = str(error).splitlines()[0][:200]
                    self._problem(f"rank {rank}: {path.name} is damaged ({reason}); its call stacks are missing")
            self._sites[rank] = stacks
        return self._sites[rank]

    def processes(self) -> list[dict[str, Any]]:
        """Return the reports of processes that were armed, those that recorded nothing included."""
        reports = []
        for path in sorted((self.path / layout.PROCESSES).glob("*.json")):
            try:
                reports.append(layout.read_object(self.path, path))
            except (OSError, TrueupError) as error:
                self._problem(str(error))
        return reports

    def query(self, sql: str) -> pa.Table:
        """Run SQL (DuckDB) over a view named ``records``; files and the network are out of its reach.

        The view has all columns; ``sketch`` only if the query names it, for it is most of the bytes.

        Raises:
            TrueupError: DuckDB refuses the query, or is not installed.
        """
        try:
            import duckdb
        except ModuleNotFoundError:
            raise TrueupError(f"the query on {self.path} needs DuckDB, which is not installed: pip install 'trueup[sql]'") from None

        connection = duckdb.connect(":memory:")
        try:
            connection.execute("SET python_enable_replacements = false")
            connection.register("records", self.records(sorted(self._names - ({"sketch"} if "sketch" not in sql else set()))))
            connection.execute("SET enable_external_access = false; SET lock_configuration = true")
            relation = connection.sql(sql)
            return pa.table({}) if relation is None else relation.to_arrow_table()
        except duckdb.Error as error:
            raise TrueupError(f"the query on {self.path} failed: {error}") from None
        finally:
            connection.close()


@lru_cache(maxsize=8)
def _stacks(file: bytes) -> dict[int, Stack]:
    """Return the call stacks in a file's bytes; thousands of ranks have the same. Raises one of ``BROKEN`` if they are damaged."""
    # pq.read_table would import pyarrow.dataset for one file
    table = pq.ParquetFile(pa.BufferReader(file), page_checksum_verification=True).read(schema.SITES.names, use_threads=False)
    table = table.cast(schema.SITES)
    table.validate(full=True)
    return {row["site"]: (tuple(row["frames"] or ()), row["line_text"]) for row in table.to_pylist()}


def _selected(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Select columns; one that only other parts have is null."""
    for name in set(columns).difference(table.column_names):
        table = table.append_column(name, pa.nulls(table.num_rows))
    return table.select(columns)


def _values(value: Any) -> Collection[Any] | None:
    if value is None:
        return None
    if isinstance(value, Iterable) and not isinstance(value, str):
        return frozenset(np.asarray(list(value)).tolist())
    return frozenset([value])
