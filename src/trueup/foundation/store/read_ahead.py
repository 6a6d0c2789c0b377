"""Reading the records of what is compared next meanwhile: a step of a rank, or several small ones that are compared at once.

Sketches of slots are most of the bytes of records, and looked at once: parts that tell where they lie are read, compared with those
of the other run and forgotten one by one, and read again if asked for later, for new memory costs more than reading into old.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from trueup.foundation.kernels import distance, distances
from trueup.foundation.model import LANES
from trueup.foundation.progress import advance
from trueup.foundation.store.columns import NONE, Array, Numbers, distinct
from trueup.foundation.store.reader import Capture, Piece
from trueup.foundation.store.schema import SKETCH_BYTES, sketch_rows

BLOCK = 1 << 10  # sketches that are copied at a time

KEPT = 1 << 16  # sketches of a side that are held after they were read: 32 MB

MANY = 1 << 8  # slots of which whole parts are read for their distances

AT_ONCE = 1 << 13  # slots from which on comparing parts is worth a task of its own

Found = TypeVar("Found")
Given = TypeVar("Given")

Read = Callable[[Sequence[str]], pa.Table]  # reads columns of the records of one rank and some steps, sorted by step and ``seq``

SKETCH = ("sketch",)

ROWS = 1 << 15  # rows up to which steps are compared at once. A single step may have more.


@dataclass(frozen=True)
class Chunk:
    """Sketches that lie one after the other."""

    lanes: Array  # float64 ``(m, 64)``, or their bytes, uint8 ``(m, 512)``
    places: Numbers | None  # which of them each slot has, `NONE` for null; None: they are all there, in order

    @cached_property
    def addresses(self) -> Numbers:
        """Where each slot's lies; 0: it is null."""
        start = self.lanes.__array_interface__["data"][0]
        if self.places is None:
            return np.asarray(start + SKETCH_BYTES * np.arange(len(self.lanes)))
        return np.where(self.places == NONE, 0, start + SKETCH_BYTES * self.places)

    def taken(self, slots: Numbers) -> Array:
        """Return the sketches of slots, NaN for null."""
        if self.places is None:
            return np.asarray(self.lanes[slots].view("<f8"))
        found = np.full((len(slots), LANES), np.nan)
        there = self.places[slots] != NONE
        found[there] = self.lanes[self.places[slots[there]]].view("<f8")
        return found


class Column:
    """Chunks of a column that was read as a whole; chunk ``n`` has the slots ``starts[n]`` to ``starts[n + 1]``."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._chunks = []
        for chunk in column.chunks:
            rows, there = sketch_rows(chunk)
            self._chunks.append(Chunk(rows, None if there is None else np.where(there, np.arange(len(rows)), NONE)))
        self.starts: Numbers = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])

    def __getitem__(self, n: int) -> Chunk:
        return self._chunks[n]

    def taken(self, n: int, slots: Numbers) -> Array:
        """Return the sketches of slots of a chunk, counted from its first: float64 ``(len(slots), 64)``, NaN for null."""
        return self._chunks[n].taken(slots)


class Parts:
    """The same, read when asked for; of few slots of many parts, mapped. ``there``: bool ``(slots,)``, which have a sketch."""

    def __init__(self, pieces: Sequence[Piece], there: Array) -> None:
        self._pieces, self._there = pieces, there
        self.starts: Numbers = np.cumsum([0, *(piece.rows for piece in pieces)])
        self.largest = max((piece.count for piece in pieces), default=0)  # sketches of the largest part
        self._kept: OrderedDict[int, Chunk] = OrderedDict()
        self._mapped: dict[int, Chunk] = {}
        self._lock = threading.Lock()

    def taken(self, n: int, slots: Numbers) -> Array:
        """Return the sketches of slots of a part."""
        found = self._mapped.get(n)
        if found is None:
            found = self._mapped[n] = self._chunk(n, self._pieces[n].mapped())
        return found.taken(slots)

    def __getitem__(self, n: int) -> Chunk:
        with self._lock:
            found = self._kept.get(n)
        if found is None:
            found = self.read(n)
        with self._lock:
            self._kept[n] = found
            self._kept.move_to_end(n)
            while len(self._kept) > 1 and sum(len(chunk.lanes) for chunk in self._kept.values()) > KEPT:
                self._kept.popitem(last=False)
        return found

    def read(self, n: int, into: Array | None = None) -> Chunk:
        """Read a part, into memory that is large enough or into new one."""
        return self._chunk(n, self._pieces[n].read(into))

    def _chunk(self, n: int, lanes: Array | None) -> Chunk:
        start, stop = self.starts[n : n + 2].tolist()
        there = self._there[start:stop]
        if lanes is None or len(lanes) != np.count_nonzero(there):  # damaged, or forged
            return Chunk(np.empty((0, LANES)), np.full(stop - start, NONE))
        return Chunk(lanes, None if len(lanes) == len(there) else np.where(there, np.cumsum(there) - 1, NONE))


class SideBySide:
    """How far the slots of two runs are apart that stand in the same place, found out while somebody else works."""

    def __init__(self, first: Parts, second: Parts, pool: Executor) -> None:
        self.first, self.second = first, second
        self._found = np.full(int(first.starts[-1]), np.nan)
        self._memory = threading.local()
        tasks = distinct(np.searchsorted(first.starts, np.arange(0, first.starts[-1] + AT_ONCE, AT_ONCE)))
        edges = [0, *tasks[(tasks > 0) & (tasks < len(first.starts) - 1)].tolist(), len(first.starts) - 1]
        self._tasks: list[Future[None]] = [pool.submit(self._compare, range(*edge)) for edge in pairwise(edges)]

    @cached_property
    def distances(self) -> Array:
        """float64 ``(slots,)``; NaN where `distance` has to look at the lanes."""
        for task in self._tasks:
            task.result()
        return self._found

    def _compare(self, parts: range) -> None:
        for n in parts:
            start, end = self.first.starts[n : n + 2].tolist()
            mine = self._read(self.first, n)
            while start < end:
                m = int(np.searchsorted(self.second.starts, start, "right")) - 1
                other, begins = self._read(self.second, m), int(self.second.starts[m])
                stop = min(end, int(self.second.starts[m + 1]))
                apart = distances(mine.addresses[start - end : stop - end or None], other.addresses[start - begins : stop - begins])
                if apart is not None:
                    self._found[start:stop] = apart
                start = stop

    def _read(self, side: Parts, n: int) -> Chunk:
        """Read a part over the one of that side that this thread read before."""
        name = "first" if side is self.first else "second"
        held = getattr(self._memory, name, None)
        if held is None:
            setattr(self._memory, name, held := np.empty((side.largest, LANES)))
        return side.read(n, held)


class Sketches:
    """The sketches of slots ``start`` to ``stop`` (None: all) of chunks: ``sketches[k]`` is float64 ``(64,)`` or ``(len(k),
    64)``, NaN where there is none. ``side_by_side``: what is meanwhile found out about them and another run's."""

    def __init__(
        self, chunks: Column | Parts, side_by_side: SideBySide | None = None, start: int = 0, stop: int | None = None
    ) -> None:
        self._chunks, self._side_by_side, self._start = chunks, side_by_side, start
        self._stop = int(chunks.starts[-1]) if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, k: Any) -> Array:
        found = self._taken(np.atleast_1d(k) + self._start)
        return found if np.ndim(k) else found[0]

    def distances(self, k: Array, other: Sketches, j: Array) -> Array:
        """Estimate how far slots are from slots of another stream: float64 ``(len(k),)``, as `kernels.distance`."""
        found = np.full(len(k), np.nan)
        rest = np.arange(len(k))
        k, j = k + self._start, j + other._start
        beside = self._side_by_side
        if beside is not None and (beside.first, beside.second) == (self._chunks, other._chunks):
            rest = np.flatnonzero(k != j)
            found = beside.distances[k]
            found[rest] = np.nan
        if len(rest) >= MANY:
            self._natively(found, rest, k, other, j)
        left = np.flatnonzero(np.isnan(found))
        for part in np.split(left, range(BLOCK, len(left), BLOCK)):  # copies of so many stay in a cache
            found[part] = distance(self._taken(k[part]), other._taken(j[part]))
        return found

    def _taken(self, wanted: Numbers) -> Array:
        of = self._chunk_of(wanted)
        found = np.empty((len(wanted), LANES))
        for n in distinct(of).tolist():
            at = np.flatnonzero(of == n)
            found[at] = self._chunks.taken(n, wanted[at] - self._chunks.starts[n])
        return found

    def _natively(self, found: Array, rest: Numbers, k: Array, other: Sketches, j: Array) -> None:
        """Put the distances of some entries where they belong, pair of chunks by pair of chunks."""
        mine, theirs = self._chunk_of(k[rest]), other._chunk_of(j[rest])
        of = mine * len(other._chunks.starts) + theirs
        order = np.argsort(of, kind="stable")
        for at in np.split(order, np.flatnonzero(np.diff(of[order])) + 1) if len(order) else ():
            entries, n, m = rest[at], int(mine[at[0]]), int(theirs[at[0]])
            first, second = self._chunks[n], other._chunks[m]  # held while their addresses are in use
            places = k[entries] - self._chunks.starts[n], j[entries] - other._chunks.starts[m]
            apart = distances(first.addresses[places[0]], second.addresses[places[1]])
            if apart is not None:
                found[entries] = apart

    def _chunk_of(self, k: Array) -> Numbers:
        return np.asarray(np.searchsorted(self._chunks.starts, k, "right") - 1)


@dataclass(frozen=True)
class Place:
    """What is compared at once."""

    rank: int
    steps: tuple[int, ...]


def places(captures: Sequence[Capture], ranks: Sequence[int], steps: Sequence[int]) -> list[Place]:
    """Group the small steps of each rank, in the order in which they are compared. The first step stands alone (its inputs have
    no past); so does one that not all captures hold, or that was imported: there a ``seq`` may mean another call in each step."""
    sizes = [capture.sizes for capture in captures]
    found = []
    for rank in ranks:
        group: list[int] = []
        held = 0
        for step in steps:
            here = [size.get((rank, step), 0) for size in sizes]
            alone = step == steps[0] or not all(here) or any(capture.imported for capture in captures)
            if group and (alone or held + max(here) > ROWS):
                found.append(Place(rank, tuple(group)))
                group, held = [], 0
            if alone:
                found.append(Place(rank, (step,)))
            else:
                group, held = [*group, step], held + max(here)
        if group:
            found.append(Place(rank, tuple(group)))
    return sorted(found, key=lambda place: place.steps[0])


class Records:
    """Records of one capture at one place: each column is read once, by ``more``; of columns not in ``names`` all is null."""

    def __init__(self, table: pa.Table, names: Collection[str], more: Read) -> None:
        self._table, self._names, self._more = table, names, more
        self.sketched = False  # whether the sketches were asked for
        self.asked: dict[str, None] = {}  # the columns that were asked for, in order
        self.parts: Parts | None = None  # the sketches, to be read part by part
        self.side_by_side: SideBySide | None = None  # their distances from another capture's here, in the making
        self.coming: Future[pa.Table] | None = None  # the sketches on their way, where they are read as a whole

    def __call__(self, columns: Sequence[str]) -> pa.Table:
        """Return these columns; of fewer rows if a part was damaged since."""
        self.sketched |= "sketch" in columns
        self.asked |= dict.fromkeys(columns)
        there = self._table.column_names
        lacking = [name for name in columns if name not in there]
        for name in [name for name in lacking if name not in self._names]:  # a column of imported captures, or of tensors
            self._table = self._table.append_column(name, pa.nulls(len(self._table)))
            lacking.remove(name)
        if lacking:
            found = self._more(lacking) if self.coming is None or lacking != [*SKETCH] else self.coming.result()
            if len(found) != len(self._table):
                return pa.table({name: (found if name in lacking else self._table)[name].slice(0, 0) for name in columns})
            for name in lacking:
                self._table = self._table.append_column(name, found[name])
        return self._table.select(list(columns))

    def __len__(self) -> int:
        return len(self._table)

    def sketches(self, start: int = 0, stop: int | None = None) -> Sketches | None:
        """Return the sketches of all rows or of some, if they are read part by part."""
        if self.parts is None:
            return None
        self.sketched = True
        return Sketches(self.parts, self.side_by_side, start, stop)

    def in_parts(self, pieces: Sequence[Piece] | None) -> Parts | None:
        """Have the sketches read part by part, if these are all the rows there are."""
        if pieces is not None and sum(piece.rows for piece in pieces) == len(self._table):
            self.parts = Parts(pieces, self._table["n_nan"].is_valid().to_numpy())
        return self.parts

    def of(self, step: int) -> Records | RecordsOfStep:
        """Return what reads the records of one step alone."""
        start, stop = np.searchsorted(self._table["step"].to_numpy(), [step, step + 1]).tolist()
        return self if stop - start == len(self) else RecordsOfStep(self, start, stop)


@dataclass(frozen=True)
class RecordsOfStep:
    """Rows ``start`` to ``stop`` of records of several steps."""

    records: Records
    start: int
    stop: int

    def __call__(self, columns: Sequence[str]) -> pa.Table:
        """Return columns of them, as `Records` does."""
        return self.records(columns).slice(self.start, self.stop - self.start)

    def sketches(self) -> Sketches | None:
        """Return their sketches if they are read part by part."""
        return self.records.sketches(self.start, self.stop)


class Ahead:
    """Records of all captures, one place after the other. While one place is compared, columns ``needed`` by every comparison are
    read of the next, with those that the place before asked for besides, and its sketches are compared if this place needed them
    (``sketches`` False: nobody does). Columns ``shared`` are alike in two runs of one structure. ``levels``: None reads all."""

    def __init__(
        self, captures: Sequence[Capture], levels: Sequence[str] | None, places: Sequence[Place], needed: Sequence[str],
        shared: Collection[str], *, sketches: bool = True,
    ) -> None:  # fmt: skip
        self._captures, self._levels, self.places, self._needed = captures, levels, list(places), needed
        self._sketches = sketches
        self._apart = {*SKETCH, *shared}
        self._pool = ThreadPoolExecutor(len(captures), "trueup-reader")
        self._next: list[Future[pa.Table]] = []
        self._now: list[Records] = []
        self._kind = "steps" if len({place.rank for place in self.places}) == 1 else "steps over all ranks"
        self._passed, self._steps = 0, sum(len(place.steps) for place in self.places)

    def __enter__(self) -> Ahead:
        self._memory = pa.default_memory_pool()
        if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
            # Arrow's own allocator asks for huge pages, which the kernel has to make first: half of the time of a first comparison.
            pa.set_memory_pool(pa.system_memory_pool())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._now, self._next = [], []  # they know how to read more, which is a method of this
        pa.set_memory_pool(self._memory)

    def reads(self, at: int) -> list[Records]:
        """Return the records of the ``at``-th place, of each capture; begin with those of the next."""
        sketched = not self._now or any(records.sketched for records in self._now)
        asked = [name for records in self._now for name in tuple(records.asked) if name not in SKETCH]
        place, following = self.places[at], self.places[at + 1 : at + 2]
        advance("comparing", self._kind, self._passed, self._steps)
        self._passed += len(place.steps)
        now = self._next if self._now else self._begin(place)
        self._now = [
            Records(table.result(), capture.names, partial(self._read, side, place))
            for side, (table, capture) in enumerate(zip(now, self._captures, strict=True))
        ]
        if self._sketches:
            self._sketch(place, now=sketched)
        if following:
            self._next = self._begin(following[0], asked)
        return self._now

    def meanwhile(self, work: Callable[[Given], Found], given: Given) -> Future[Found]:
        """Do something while somebody else works, after the sketches were compared."""
        return self._pool.submit(work, given)

    def _sketch(self, place: Place, *, now: bool) -> None:
        """Prepare for reading the sketches of this place, and begin to if that is wanted."""
        pieces = [capture.pieces(place.rank, place.steps) for capture in self._captures]
        first, second, *_ = [records.in_parts(its) for records, its in zip(self._now, pieces, strict=True)]
        if now and first is not None and second is not None and len(self._now[0]) == len(self._now[1]):
            self._now[0].side_by_side = SideBySide(first, second, self._pool)
        for side, records in enumerate(self._now):
            if now and records.parts is None:
                records.coming = self._pool.submit(self._read, side, place, SKETCH)

    def _begin(self, place: Place, asked: Sequence[str] = ()) -> list[Future[pa.Table]]:
        """Begin to read the columns of a place, of those that were ``asked`` for before it what a capture has."""
        has = [dict.fromkeys([*self._needed, *(name for name in asked if name in one.names)]) for one in self._captures]
        return [self._pool.submit(self._read, side, place, [*columns]) for side, columns in enumerate(has)]

    def _read(self, side: int, place: Place, columns: Sequence[str]) -> pa.Table:
        capture = self._captures[side]
        found = capture.records(columns=columns, rank=place.rank, step=place.steps, level=self._levels)
        # A part of the records is a chunk; what is done to a column is done to each. Sketches are too large to copy here, and what
        # the baseline as a rule holds alike is only compared with it.
        apart = SKETCH if side == 0 else self._apart
        return pa.table({name: found[name] if name in apart else found[name].combine_chunks() for name in columns})
