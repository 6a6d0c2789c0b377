"""Runs of calls that only one side has: what goes into them, what comes out, and whether the difference starts there.

A device may compute an LSTM in one operator and another in a hundred. Without a function around them that could be compared as
a whole, what such calls did shows where their results are read by calls that do have a counterpart (the exits). Walking back
from an exit through calls without counterpart to those that have one gives the sources.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from trueup.verdict import few
from trueup.verdict.criteria import FLIPPED, UNIT_ROUNDOFF, Criterion
from trueup.verdict.criteria import Row as CriterionRow
from trueup.verdict.judged import FEW, LASTING, RULES, Judged
from trueup.verdict.measure import Measured, SlotError
from trueup.verdict.origins import Origins
from trueup.verdict.streams import NONE, Array, Numbers, Row, Stream, is_input, is_output
from trueup.verdict.tree import Tree


@dataclass(slots=True)
class Region:
    """Calls without counterpart between their sources and one exit or several."""

    exit: Judged | None
    """The first call with a counterpart that read a result, None where nobody did."""
    slot: SlotError | None
    """What it read, where it differs most."""
    tree: Tree
    calls: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    """Of the baseline and of the candidate."""
    sources: dict[str, SlotError] = field(default_factory=dict)
    earlier: float = 0.0
    """Largest relative error of calls of earlier steps whose results go in: weights, states."""
    known: bool = True
    """Whether all sources that a recorded call produced were compared."""

    @property
    def worst(self) -> float:
        """Largest relative error of what goes in."""
        return max([self.earlier, *(source.relative for source in self.sources.values())])

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest dtype that goes in."""
        stream = self.tree.streams[0]
        return max((UNIT_ROUNDOFF.get(stream.dtype_of(s.baseline) or "", 0.0) for s in self.sources.values()), default=0.0)

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

    def __init__(self, tree: Tree, loose: tuple[list[int], list[int]], origins: Origins) -> None:
        self.tree, self.origins = tree, origins
        self.loose = tuple(_mask(calls, len(stream)) for calls, stream in zip(loose, tree.streams, strict=True))
        self.readers: tuple[set[int], set[int]] = set(), set()
        """Loose calls whose result somebody reads."""
        self.settled: tuple[set[int], set[int]] = set(), set()
        """Loose calls whose results agree with what the other side wrote (`lasting`)."""
        self.uncompared: set[tuple[int, int]] = set()
        """``(side, call)`` of loose calls whose result a call with counterpart reads and was not compared there."""
        self.found: list[Region] = []
        self._holding: dict[tuple[str, int, int], int] = {}
        """By phase, side and call: the first of them that holds the call."""
        self.unmatched = tuple(_mask(calls.tolist(), len(s)) for calls, s in zip(tree.unmatched, tree.streams, strict=True))
        self.ends = tuple(_ends(stream, mask) for stream, mask in zip(tree.streams, self.unmatched, strict=True))
        """By side, and call of a backward without counterpart whose optimizer was not recorded: its results that nobody reads.

        A module around it that was compared as a whole says nothing of them.
        """
        if loose[0] or loose[1]:
            producers = [stream.producers for stream in tree.streams]
            for side in (0, 1):
                self._read_by_unmatched(side, producers[side])
            for pair in self._pairs_that_read(producers):
                self._exits(tree.verdicts.at(pair))

    def _read_by_unmatched(self, side: int, producers: Numbers) -> None:
        stream = self.tree.streams[side]
        reads = stream.names.table(is_input)[stream.slot] & (self.tree.pairs[side][stream.call] == NONE)
        self.readers[side].update(producers[reads & (producers >= 0) & (producers != stream.call)].tolist())

    def _pairs_that_read(self, producers: list[Numbers]) -> list[int]:
        """Return the matched calls that read a result of a loose call, in order."""
        found: list[Numbers] = []
        for side, stream in enumerate(self.tree.streams):
            reads = stream.names.table(is_input)[stream.slot] & self.loose[side][producers[side]]
            found.append(self.tree.pairs[side][stream.call[reads]])
        pairs = np.unique(np.concatenate(found))
        return list(pairs[pairs >= 0].tolist())

    def _exits(self, judged: Judged) -> None:
        rows = judged.call.baseline, judged.call.candidate
        names = [s for s in dict.fromkeys([*rows[0].slots, *rows[1].slots]) if is_input(s)]
        for name in names:
            starts = [self._producer(side, rows[side].slots.get(name)) for side in (0, 1)]
            loose = [(side, call) for side, call in enumerate(starts) if self.loose[side][call]]
            if not loose:
                continue
            for side, call in loose:
                self.readers[side].add(call)
            error = judged.call.slots.get(name)
            if error is None or math.isnan(error.absolute):
                self.uncompared.update(loose)
            else:
                self._add(self.walk(judged, error, loose))

    def _producer(self, side: int, k: int | None) -> int:
        stream = self.tree.streams[side]
        return NONE if k is None else stream.find(stream.producer_of(k))

    def walk(
        self, judged: Judged | None, error: SlotError | None, starts: list[tuple[int, int]], *, covered: bool = False
    ) -> Region:
        """Gather the loose calls from ``(side, call)`` back to their sources; with ``covered`` those inside compared calls too."""
        region, among = Region(judged, error, self.tree), self.unmatched if covered else self.loose
        pending = list(starts)
        while pending:
            side, call = pending.pop()
            if call in region.calls[side]:
                continue
            region.calls[side].add(call)
            stream = self.tree.streams[side]
            for number, k in self._given(side, call):
                seq = stream.producer_of(k) if is_input(stream.names.names[number]) else None
                if seq is None or seq == stream.seq[call]:
                    continue
                producer = stream.find(seq)
                if among[side][producer]:
                    pending.append((side, producer))
                else:
                    self._source(region, side, seq, producer, stream.names.name(int(stream.producer_slot[k])))
        return region

    def _given(self, side: int, call: int) -> list[tuple[int, int]]:
        """Return a call's slots; between frameworks a backward's forward's too, of which it saved what no common operator shows."""
        stream = self.tree.streams[side]
        found = list(stream.slots(call).items())
        forward = stream.find(int(stream.forward_seq[call])) if stream.mixed else NONE
        return found if forward == NONE else found + list(stream.slots(forward).items())

    def _source(self, region: Region, side: int, seq: int, producer: int, slot: str | None) -> None:
        judged = self.tree.judged(side, producer)
        if judged is not None:
            error = judged.call.slots.get(slot or "")
            if error is None or math.isnan(error.absolute):
                region.known = False
            else:
                region.sources[f"{judged.call.candidate.seq} {slot}"] = error
        elif producer != NONE or seq in self.origins.loose[side]:
            region.known = False  # inside a function that was compared as a whole, or without counterpart itself
        elif side == 1:
            region.earlier = max(region.earlier, self.origins.error(seq))

    def _add(self, region: Region) -> None:
        """Keep a region, as part of an earlier one of its phase when they share calls; the worse exit speaks for both.

        What is wrong in the forward shows there, where its sources may be clean. In the backward other errors go in, too.
        """
        phase = _phase(region)
        calls = [(phase, side, call) for side in (0, 1) for call in region.calls[side]]
        first = min((self._holding[call] for call in calls if call in self._holding), default=len(self.found))
        for call in calls:
            self._holding[call] = min(first, self._holding.get(call, first))
        if first == len(self.found):
            self.found.append(region)
            return
        other = self.found[first]
        for mine, its in zip(other.calls, region.calls, strict=True):
            mine |= its
        other.sources |= region.sources
        other.known &= region.known
        other.earlier = max(other.earlier, region.earlier)
        if region.slot is not None and (other.slot is None or region.slot.relative > other.slot.relative):
            other.slot, other.exit = region.slot, region.exit

    def lasting(self) -> Iterator[tuple[int, Row]]:
        """Yield ``(side, call)`` of the loose calls whose results later steps read."""
        told = set(self.untold())
        for side, stream in enumerate(self.tree.streams):
            phases = [stream.names.number(phase) for phase in LASTING]
            done = self._with_family(side, self.readers[side] | self.settled[side])
            for call in np.flatnonzero(self.loose[side][:-1]).tolist():
                if stream.phase[call] in phases and call not in done:
                    yield side, stream.row(call)
            ends = [call for call in self.ends[side] if call not in self.settled[side] and (side, call) not in told]
            yield from ((side, stream.row(call)) for call in ends)

    def untold(self) -> Iterator[tuple[int, int]]:
        """Yield ``(side, call)`` of the loose calls of which it is not known who reads their results, for a dump does not say.

        Of a native capture they are those that a dump on the other side might have had and whose results nobody reads.
        """
        streams = self.tree.streams
        for side, stream in enumerate(streams):
            other = streams[1 - side]
            if not stream.imported and not other.imported:
                continue
            listed = set(zip(other.op.tolist(), other.phase.tolist(), strict=True))
            for call in np.flatnonzero(self.loose[side][:-1]).tolist():
                is_listed = (int(stream.op[call]), int(stream.phase[call])) in listed and call not in self.readers[side]
                if is_listed or (stream.imported and not _passes_on(stream, call)):
                    yield side, call

    def _with_family(self, side: int, calls: set[int]) -> set[int]:
        """Add the loose calls inside and around calls: an operator and the function that is no more than it write one result.

        Only one of the two is named as the producer of what is read.
        """
        stream, loose, found = self.tree.streams[side], self.loose[side], set(calls)
        for call in calls:
            inner, outer = call, int(stream.parents[call])
            while len(inside := stream.inside(inner)) == 1 and loose[inside[0]]:
                inner = int(inside[0])
                found.add(inner)
            while outer != NONE and loose[outer] and len(stream.inside(outer)) == 1:
                found.add(outer)
                outer = int(stream.parents[outer])
        return found


def _phase(region: Region) -> str:
    """Return the phase in which a region's result is read."""
    return "" if region.exit is None else region.exit.call.candidate.phase


def _passes_on(stream: Stream, call: int) -> bool:
    """Tell whether all results of a call are what it got, by what is known of both: a module that does nothing (``Dropout(0)``)."""
    slots = np.arange(*stream.starts[call : call + 2].tolist())
    read, made = (slots[stream.names.table(of)[stream.slot[slots]]] for of in (is_input, is_output))
    return len(made) > 0 and bool((_told(stream, made)[:, None] == _told(stream, read)).all(axis=2).any(axis=1).all())


def _told(stream: Stream, slots: Numbers) -> Array:
    digests = np.where(stream.has_digest[slots], stream.digest[slots].astype(np.float64), 0)
    return np.stack([stream.numel[slots], stream.mean[slots], stream.l2[slots], digests], axis=1)


def _ends(stream: Stream, unmatched: Array) -> dict[int, list[int]]:
    """Return gradients that go to no recorded call: those of what no forward call made, and what a hook on a gradient computes.

    Who reads them is the optimizer; where it was recorded, they are compared there.
    """
    number = stream.names.number
    if stream.imported or (stream.phase == number("optimizer")).any():
        return {}
    fine = stream.level == number("aten")  # where who reads a result of a backward cannot be told from the end of it
    calls = np.flatnonzero(unmatched[:-1] & (stream.phase == number("backward")) & ~fine).tolist()
    read = set(zip(stream.producer.tolist(), stream.producer_slot.tolist(), strict=True)) if calls else set()
    found = {}
    for call in calls:
        forward = stream.find(int(stream.forward_seq[call]))
        given = stream.slots(forward) if forward != NONE else {}
        slots = [
            k for slot, k in stream.slots(call).items()
            if is_output(stream.names.names[slot]) and (int(stream.seq[call]), slot) not in read
            and (forward == NONE or _is_made_by_none(stream, given, stream.names.names[slot]))
            and not (stream.mixed and _is_told(stream, call, k))
        ]  # fmt: skip
        if slots:
            found[call] = slots
    return found


def _is_told(stream: Stream, call: int, k: int) -> bool:
    """Tell whether the backward of the layer around a call has a gradient as one of its parameters'."""
    around = int(stream.parents[call])
    slots = {} if around == NONE else stream.slots(around)
    named = [j for name, j in slots.items() if stream.names.names[name].startswith("grad_param.")]
    return any(stream.numel[j] == stream.numel[k] and stream.l2[j] == stream.l2[k] for j in named)


def _is_made_by_none(stream: Stream, given: dict[int, int], gradient: str) -> bool:
    """Tell whether a gradient is one of an input that no recorded call made."""
    k = given.get(stream.names.number(gradient.removeprefix("grad_")))
    return k is not None and stream.producer_of(k) is None


def _mask(calls: list[int], count: int) -> Array:
    """Return a mask of calls; its last entry, for `NONE`, is false."""
    found = np.zeros(count + 1, bool)
    found[calls] = True
    return found


def judge_region(region: Region, criterion: Criterion) -> Judged:
    """Judge a region that somebody reads as one call of its last operator, by the row for what has no name."""
    assert region.exit is not None
    assert region.slot is not None
    tree, exit_, error = region.tree, region.exit.call, region.slot
    calls = [[tree.streams[side].row(call) for call in sorted(region.calls[side])] for side in (0, 1)]
    row = criterion.rows[-1]
    baseline, candidate = (rows[-1] if rows else None for rows in calls)
    # A side without calls of its own stands where the result is read.
    first = baseline or replace(exit_.baseline, slots={})
    last = candidate or replace(baseline or exit_.candidate, seq=exit_.candidate.seq, slots={})
    unit = max(UNIT_ROUNDOFF.get(tree.streams[0].dtype_of(error.baseline) or "", 0.0), region.unit)
    own, worst = explained(row, unit, max(map(len, calls)), 0.0), region.worst
    slots = {f"input.{n}": replace(s, slot=f"input.{n}") for n, s in enumerate(region.sources.values())}
    slots["output.0"] = replace(error, slot="output.0")
    expected = explained(row, unit, max(map(len, calls)), worst)
    judged = Judged(Measured(first, last, slots, None, ()), row, worst, error.relative, own, expected, "output.0")
    if worst == 0 and region.known and not math.isnan(limit := few.of_slot(tree.verdicts.errors, error, own, unit)):
        judged.own = judged.expected = min(limit, expected)
        judged.decided = RULES[FEW] if limit < expected else ""
    judged.slot_expected["output.0"] = judged.expected
    judged.unsized = error.unsized
    if not region.known:
        judged.incomparable = "not all of its sources were compared"
    return judged


def explained(row: CriterionRow, unit: float, calls: int, worst: float) -> float:
    """Return the relative error that a run of calls may have, given the worst of what goes in."""
    own = row.ulps * unit * math.sqrt(max(1, calls))
    return own + row.factor * worst + FLIPPED * math.sqrt(worst) if math.isfinite(worst) else math.inf


def operators(region: Region) -> tuple[str, ...]:
    """Return the operators of a region, each once, in order: the candidate's, or the baseline's where it has none."""
    stream = region.tree.streams[1 if region.calls[1] else 0]
    calls = sorted(region.calls[1] or region.calls[0])
    return tuple(dict.fromkeys(stream.names.names[int(stream.op[call])] for call in calls))


def loose_calls(tree: Tree) -> tuple[list[int], list[int]]:
    """Return the unmatched calls of each side that no compared call around them accounts for."""
    found: list[list[int]] = []
    for side, calls in enumerate(tree.unmatched):
        covered: dict[int, bool] = {}  # by the call around them
        parents = tree.streams[side].parents
        kept = []
        for call in calls.tolist():
            above = int(parents[call])
            if above not in covered:
                covered[above] = tree.covers(call, side)
            if not covered[above]:
                kept.append(call)
        found.append(kept)
    return found[0], found[1]
