"""Reading the records of the next step while this one is compared."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType

import pyarrow as pa

from trueup.store import Capture
from trueup.verdict.streams import NEEDED, Read

SKETCH = ("sketch",)


class Ahead:
    """Records of both captures, one rank and step after the other.

    Args:
        captures: baseline and candidate.
        levels: levels to read, None for all.
        places: ``(rank, step)`` in the order in which they are compared. Of the next one the columns that every comparison needs
            are read early, and the sketches too, which are most of the bytes, if this one needed them.
    """

    def __init__(self, captures: Sequence[Capture], levels: Sequence[str] | None, places: Sequence[tuple[int, int]]) -> None:
        self._captures, self._levels, self.places = captures, levels, list(places)
        self._pool = ThreadPoolExecutor(len(captures), "trueup-reader")
        self._waiting: dict[tuple[int, int, int], Future[pa.Table]] = {}
        self._held: dict[tuple[int, int, int], pa.Table] = {}
        """What was read of the place that is compared now."""
        self._sketched = False

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def reads(self, at: int) -> list[Read]:
        """Return what reads the records of the ``at``-th place, of each capture; begin with those of the next."""
        sketched, self._sketched = self._sketched, False
        columns = NEEDED + SKETCH if sketched else NEEDED
        for place in self.places[at : at + 2]:
            for side in range(len(self._captures)):
                self._begin(side, place, columns)
        return [partial(self._read, side, self.places[at]) for side in range(len(self._captures))]

    def done(self, at: int) -> None:
        """Forget what was read of a place and not asked for."""
        for key in [key for key in self._waiting if key[1:] == self.places[at]]:
            self._waiting.pop(key).cancel()
        self._held.clear()

    def _begin(self, side: int, place: tuple[int, int], columns: tuple[str, ...]) -> None:
        key = (side, *place)
        if key not in self._waiting and key not in self._held:
            self._waiting[key] = self._pool.submit(self._records, side, place, columns)

    def _read(self, side: int, place: tuple[int, int], columns: Sequence[str]) -> pa.Table:
        self._sketched |= tuple(columns) == SKETCH
        key = (side, *place)
        if key in self._waiting:
            self._held[key] = self._waiting.pop(key).result()
        held = self._held.get(key)
        if held is not None and set(columns) <= set(held.column_names):
            return held.select(list(columns))
        return self._records(side, place, columns)

    def _records(self, side: int, place: tuple[int, int], columns: Sequence[str]) -> pa.Table:
        rank, step = place
        capture = self._captures[side]
        known = [name for name in columns if name in capture.names]
        found = capture.records(columns=known, rank=rank, step=step, level=self._levels)
        for name in columns:
            if name not in known:  # a column of imported captures
                found = found.append_column(name, pa.nulls(len(found)))
        return found
