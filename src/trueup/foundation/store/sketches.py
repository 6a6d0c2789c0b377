"""The sketches of slots where they lie, and how far those of two runs are apart.

They are most of the bytes of records, and looked at once: parts that tell where they lie are read, compared and forgotten one by
one, and read again if asked for later, for new memory costs more than reading into old.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.foundation.kernels import distance, distances
from trueup.foundation.model import LANES
from trueup.foundation.store.columns import NONE, Array, Numbers, distinct
from trueup.foundation.store.reader import Piece
from trueup.foundation.store.schema import SKETCH_BYTES, sketch_rows

BLOCK = 1 << 10  # sketches that are copied at a time

KEPT = 1 << 16  # sketches of a side that are held after they were read: 32 MB

MANY = 1 << 8  # slots of which whole parts are read for their distances

AT_ONCE = 1 << 13  # slots from which on comparing parts is worth a task of its own


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
