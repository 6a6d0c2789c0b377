"""Every slot of every call of both captures, side by side, read again in bounded memory.

The table of calls of a result says which calls are counterparts; what is in no pair exists on one side only and comes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.model import Result
from trueup.store import Capture, open_capture

Array = np.ndarray[Any, Any]
Record = dict[str, Any]

CALLS = 20_000
"""Calls whose slots are held at a time: some 100 MB."""
COLUMNS = (
    "rank", "step", "seq", "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "numel",
    "min", "max", "mean", "l2", "digest", "payload_segment", "payload_key", "payload_view", "value", "site",
)  # fmt: skip
JUDGED = ("seq_baseline", "seq_candidate", "state", "role", "rule", "error_in", "error_out", "expected", "ratio")


@dataclass(frozen=True, slots=True)
class SlotPair:
    """One slot on both sides; a side that lacks it is None."""

    baseline: Record | None
    candidate: Record | None

    @property
    def there(self) -> Record:
        """The candidate's record, else the baseline's: what both have in common is read here."""
        held = self.candidate or self.baseline
        assert held is not None
        return held


@dataclass(frozen=True, slots=True)
class CallPair:
    """One call with its slots; ``judged`` is its row of the table of calls, None where it exists on one side only."""

    slots: tuple[SlotPair, ...]
    judged: Record | None
    stack: tuple[str, ...]

    @property
    def side(self) -> str:
        """``both``, ``baseline`` or ``candidate``."""
        if self.judged is not None:
            return "both"
        return "candidate" if self.slots[0].candidate is not None else "baseline"


class SlotPairs:
    """All calls of a result, in the candidate's order of execution, those of the baseline alone where they ran.

    Raises:
        TrueupError: a capture is gone.
    """

    def __init__(self, result: Result) -> None:
        self.captures = open_capture(result.baseline.path), open_capture(result.candidate.path)
        self._calls = result.calls
        compared = pc.unique(self._calls["level"]).to_pylist()
        self._levels = compared or sorted({level for c in self.captures for level in c.root.get("levels", ())})

    def __iter__(self) -> Iterator[CallPair]:
        places = sorted({(step, rank) for capture in self.captures for step in capture.steps for rank in capture.ranks})
        for step, rank in places:
            yield from self._part(rank, step)

    def _part(self, rank: int, step: int) -> Iterator[CallPair]:
        here = pc.and_(pc.equal(self._calls["rank"], rank), pc.equal(self._calls["step"], step))
        judged = self._calls.filter(here).select(list(JUDGED))
        pairs = np.stack([judged[name].to_numpy() for name in JUDGED[:2]], axis=1).astype(np.int64)
        held = [self._seqs(capture, rank, step) for capture in self.captures]
        entries = _in_order(pairs, *held)
        rows = judged.to_pylist() if len(pairs) else []
        by_pair = {(row["seq_baseline"], row["seq_candidate"]): row for row in rows}
        for start in range(0, len(entries), CALLS):
            chunk = entries[start : start + CALLS]
            sides = [self._records(side, rank, step, chunk[:, side]) for side in (0, 1)]
            for before, after in chunk.tolist():
                yield self._call(rank, sides[0].get(before, []), sides[1].get(after, []), by_pair.get((before, after)))

    def _seqs(self, capture: Capture, rank: int, step: int) -> Array:
        table = capture.records(["seq"], rank=rank, step=step, level=self._levels)
        return np.unique(table["seq"].to_numpy().astype(np.int64))

    def _records(self, side: int, rank: int, step: int, seqs: Array) -> dict[int, list[Record]]:
        wanted = seqs[seqs >= 0]
        if not len(wanted):
            return {}
        found: dict[int, list[Record]] = {}
        for record in _records(self.captures[side].records(list(COLUMNS), rank=rank, step=step, seq=wanted)):
            found.setdefault(record["seq"], []).append(record)
        return found

    def _call(self, rank: int, before: list[Record], after: list[Record], judged: Record | None) -> CallPair:
        first, second = ({record["slot"]: record for record in side} for side in (before, after))
        names = dict.fromkeys([*second, *first])
        slots = tuple(SlotPair(first.get(name), second.get(name)) for name in names)
        record, capture = (after[0], self.captures[1]) if after else (before[0], self.captures[0])
        frames = capture.sites(rank).get(record["site"], ((), None))[0] if record["site"] is not None else ()
        return CallPair(slots, judged, tuple(frames))


def _records(table: pa.Table) -> Iterator[Record]:
    """Yield rows as objects, made column by column: some three times faster than one element after the other."""
    names = table.column_names
    for batch in table.to_batches(max_chunksize=10_000):
        for row in zip(*map(_values, batch.columns), strict=True):
            yield dict(zip(names, row, strict=True))


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        known = [*column.dictionary.to_pylist(), None]
        return [known[k] for k in column.indices.fill_null(len(known) - 1).to_pylist()]
    if column.null_count == len(column):
        return [None] * len(column)
    if column.null_count == 0 and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return list(column.to_numpy().tolist())
    return list(column.to_pylist())


def _in_order(pairs: Array, baseline: Array, candidate: Array) -> Array:
    """Return ``(n, 2)``: all calls, -1 where a side lacks one, by the candidate's order.

    A call of the baseline alone stands behind the counterpart of the last matched call before it.
    """
    only_before = np.setdiff1d(baseline, pairs[:, 0])
    only_after = np.setdiff1d(candidate, pairs[:, 1])
    matched = pairs[np.argsort(pairs[:, 0])]
    at = np.searchsorted(matched[:, 0], only_before) - 1
    behind = np.where(at >= 0, matched[np.maximum(at, 0), 1], -1) if len(matched) else np.full(len(only_before), -1)
    absent = np.full
    entries = np.concatenate([
        pairs,
        np.stack([absent(len(only_after), -1), only_after], axis=1),
        np.stack([only_before, absent(len(only_before), -1)], axis=1),
    ]).astype(np.int64)  # fmt: skip
    place = np.concatenate([pairs[:, 1], only_after, behind])
    later = np.concatenate([np.zeros(len(pairs) + len(only_after), np.int64), only_before + 1])
    return np.asarray(entries[np.lexsort((later, place))])
