"""Reading the records of what is compared next meanwhile: a step of a rank, or several small ones that are compared at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TypeVar

import numpy as np
import pyarrow as pa

from trueup.foundation.progress import advance
from trueup.foundation.store.reader import Capture, Piece
from trueup.foundation.store.sketches import Parts, SideBySide, Sketches

Found = TypeVar("Found")
Given = TypeVar("Given")

Read = Callable[[Sequence[str]], pa.Table]  # reads columns of the records of one rank and some steps, sorted by step and ``seq``

SKETCH = ("sketch",)

ROWS = 1 << 15  # rows up to which steps are compared at once. A single step may have more.


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
