"""Runs of calls that only one side has: what goes into them, what comes out, and whether the difference starts there.

A device may compute an LSTM in one operator and another in a hundred. Without a function around them that could be compared as
a whole, what such calls did shows where their results are read by calls that do have a counterpart (the exits). Walking back
from an exit through calls without counterpart to those that have one gives the sources.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from trueup.verdict.criteria import UNIT_ROUNDOFF, Criterion
from trueup.verdict.judge import Judged
from trueup.verdict.measure import Measured, SlotError
from trueup.verdict.origins import Origins
from trueup.verdict.streams import Row, is_input
from trueup.verdict.tree import Tree

LASTING = ("optimizer", "collective")
"""Phases whose results are read in a later step, or on another rank: nobody reading them here does not make them harmless."""


@dataclass(slots=True)
class Region:
    """Calls without counterpart between their sources and one exit or several."""

    exit: Judged
    """The first call with a counterpart that read a result."""
    slot: SlotError
    """What it read, where it differs most."""
    calls: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    """``seq`` on the baseline and on the candidate."""
    sources: dict[str, SlotError] = field(default_factory=dict)
    earlier: float = 0.0
    """Largest relative error of calls of earlier steps whose results go in: weights, states."""
    known: bool = True
    """Whether all sources that a recorded call produced were compared."""

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether it has calls on the baseline, and on the candidate."""
        return bool(self.calls[0]), bool(self.calls[1])


class Regions:
    """The regions of one rank and step.

    Args:
        tree: both sides' calls.
        loose: calls without counterpart and without a compared call around them, by side.
        origins: what is known of earlier steps.
    """

    def __init__(self, tree: Tree, loose: tuple[dict[int, Row], dict[int, Row]], origins: Origins) -> None:
        self.tree, self.loose, self.origins = tree, loose, origins
        self.readers: tuple[set[int], set[int]] = set(), set()
        """Loose calls whose result somebody reads."""
        self.uncompared: set[tuple[int, int]] = set()
        """``(side, seq)`` of loose calls whose result a call with counterpart reads and was not compared there."""
        self.found: list[Region] = []
        if loose[0] or loose[1]:
            self._read_by_loose()
            for judged in sorted(tree.judged[1].values(), key=lambda j: j.call.candidate.seq):
                self._exits(judged)

    def _read_by_loose(self) -> None:
        for side, stream in enumerate(self.tree.streams):
            for seq in self.tree.unmatched[side]:
                for slot, k in stream.by_seq[seq].slots.items():
                    producer = stream.producer[k]
                    if is_input(slot) and producer is not None and producer != seq:
                        self.readers[side].add(producer)

    def _exits(self, judged: Judged) -> None:
        rows = judged.call.baseline, judged.call.candidate
        names = [s for s in dict.fromkeys([*rows[0].slots, *rows[1].slots]) if is_input(s)]
        for name in names:
            starts = [self._producer(side, rows[side].slots.get(name)) for side in (0, 1)]
            loose = [(side, seq) for side, seq in enumerate(starts) if seq is not None and seq in self.loose[side]]
            if not loose:
                continue
            for side, seq in loose:
                self.readers[side].add(seq)
            error = judged.call.slots.get(name)
            if error is None or math.isnan(error.absolute):
                self.uncompared.update(loose)
            else:
                self._add(self._walk(judged, error, loose))

    def _producer(self, side: int, k: int | None) -> int | None:
        return None if k is None else self.tree.streams[side].producer[k]

    def _walk(self, judged: Judged, error: SlotError, starts: list[tuple[int, int]]) -> Region:
        region = Region(judged, error)
        pending = list(starts)
        while pending:
            side, seq = pending.pop()
            if seq in region.calls[side]:
                continue
            region.calls[side].add(seq)
            stream = self.tree.streams[side]
            for slot, k in stream.by_seq[seq].slots.items():
                producer = stream.producer[k] if is_input(slot) else None
                if producer is None or producer == seq:
                    continue
                if producer in self.loose[side]:
                    pending.append((side, producer))
                else:
                    self._source(region, side, producer, stream.producer_slot[k])
        return region

    def _source(self, region: Region, side: int, producer: int, slot: str | None) -> None:
        judged = self.tree.judged[side].get(producer)
        if judged is not None:
            error = judged.call.slots.get(slot or "")
            if error is None or math.isnan(error.absolute):
                region.known = False
            else:
                region.sources[f"{judged.call.candidate.seq} {slot}"] = error
        elif producer in self.tree.streams[side].by_seq or producer in self.origins.loose[side]:
            region.known = False  # inside a function that was compared as a whole, or without counterpart itself
        elif side == 1:
            region.earlier = max(region.earlier, self.origins.errors.get(producer, 0.0))

    def _add(self, region: Region) -> None:
        """Keep a region, as part of an earlier one when they share calls; the worse exit speaks for both."""
        for other in self.found:
            if other.calls[0] & region.calls[0] or other.calls[1] & region.calls[1]:
                for mine, its in zip(other.calls, region.calls, strict=True):
                    mine |= its
                other.sources |= region.sources
                other.known &= region.known
                other.earlier = max(other.earlier, region.earlier)
                if region.slot.relative > other.slot.relative:
                    other.slot, other.exit = region.slot, region.exit
                return
        self.found.append(region)

    def lasting(self) -> Iterator[tuple[int, Row]]:
        """Yield ``(side, call)`` of the loose calls whose results later steps read."""
        for side in (0, 1):
            for seq, row in self.loose[side].items():
                if row.phase in LASTING and seq not in self.readers[side]:
                    yield side, row


def judge_region(region: Region, tree: Tree, criterion: Criterion) -> Judged:
    """Judge a region as one call of its last operator, by the criterion's row for what it has no name for."""
    calls = [[tree.streams[side].by_seq[seq] for seq in sorted(region.calls[side])] for side in (0, 1)]
    row = criterion.rows[-1]
    exit_ = region.exit.call
    baseline, candidate = (rows[-1] if rows else None for rows in calls)
    # A side without calls of its own stands where the result is read.
    first = baseline or replace(exit_.baseline, slots={})
    last = candidate or replace(baseline or exit_.candidate, seq=exit_.candidate.seq, slots={})
    dtype = tree.streams[0].dtype[region.slot.baseline] or ""
    unit = max(UNIT_ROUNDOFF.get(dtype, 0.0), max((_unit(tree, s) for s in region.sources.values()), default=0.0))
    own = row.ulps * unit * math.sqrt(max(1, *map(len, calls)))
    worst = max([region.earlier, *(s.relative for s in region.sources.values())])
    slots = {f"input.{n}": replace(s, slot=f"input.{n}") for n, s in enumerate(region.sources.values())}
    slots["output.0"] = replace(region.slot, slot="output.0")
    expected = own + row.factor * (worst + math.sqrt(worst)) if math.isfinite(worst) else math.inf
    judged = Judged(
        Measured(first, last, slots, None, ()), row, worst, region.slot.relative, own, expected, "output.0"
    )
    judged.slot_expected["output.0"] = expected
    judged.unsized = region.slot.unsized
    if not region.known:
        judged.incomparable = "not all of its sources were compared"
    return judged


def _unit(tree: Tree, error: SlotError) -> float:
    return UNIT_ROUNDOFF.get(tree.streams[0].dtype[error.baseline] or "", 0.0)


def operators(region: Region, tree: Tree) -> tuple[str, ...]:
    """Return the operators of a region, each once, in order: the candidate's, or the baseline's where it has none."""
    side = 1 if region.calls[1] else 0
    return tuple(dict.fromkeys(tree.streams[side].by_seq[seq].op for seq in sorted(region.calls[side])))


def loose_calls(tree: Tree, unmatched: Iterable[Iterable[Row]]) -> tuple[dict[int, Row], dict[int, Row]]:
    """Return the unmatched calls of each side that no compared call around them accounts for."""
    found: list[dict[int, Row]] = []
    covered: defaultdict[tuple[int, int | None], bool | None] = defaultdict(lambda: None)
    for side, rows in enumerate(unmatched):
        kept = {}
        for row in rows:
            known = covered[side, row.parent]
            if known is None:
                known = covered[side, row.parent] = tree.covers(row.seq, side)
            if not known:
                kept[row.seq] = row
        found.append(kept)
    return found[0], found[1]
