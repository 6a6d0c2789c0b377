"""What stands around a call: who made its inputs, who reads its outputs, what ran right before and after it.

One step of one rank is held as columns, so that a capture of millions of rows costs arrays and no objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation.model import Edge, Neighbour
from trueup.foundation.store import Capture
from trueup.foundation.store.columns import distinct

Array = np.ndarray[Any, Any]

COLUMNS = ("step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "producer_seq", "producer_slot")
HOPS = 2
NEAR, FAR = 6, 8
"""Most calls shown one hop away, and two, on each side of the call: a card holds no more that can be read."""

UPDATES = 2
"""Most optimizer calls among them where other calls are there: all weights' updates read gradients, and say little of the data."""

DEPTH = 64
"""Most levels of enclosing calls that are followed."""

INSIDE = 4096
"""Most calls inside a call whose results are followed."""

Pair = tuple[int, int]


class Link(NamedTuple):
    """A tensor that one call made and another read."""

    source: int
    target: int
    source_slot: str
    target_slot: str


class Surroundings:
    """One rank and step of a capture, and the step before it for what was made there."""

    def __init__(self, capture: Capture, rank: int, step: int) -> None:
        before = [s for s in capture.steps if s < step][-1:]
        table = capture.records(list(COLUMNS), rank=rank, step=[*before, step])
        self._table = table.combine_chunks()  # single cells are read: with hundreds of chunks each would be looked for
        self._seq = table["seq"].to_numpy()
        self._producer = pc.fill_null(table["producer_seq"], -1).to_numpy()
        self._parent = pc.fill_null(table["parent"], -1).to_numpy()
        starts = np.flatnonzero(np.r_[True, self._seq[1:] != self._seq[:-1]]) if len(self._seq) else np.empty(0, np.int64)
        level = table["level"].take(pa.array(starts)).combine_chunks()
        self._by_level = {name: self._seq[starts[_is(level, name)]] for name in pc.unique(level).to_pylist()}
        self._children = np.argsort(self._parent, kind="stable")
        self._sorted_parents = self._parent[self._children]
        self._readers = np.argsort(self._producer, kind="stable")
        self._sorted_producers = self._producer[self._readers]

    def facts(self, seq: int) -> dict[str, Any] | None:
        """Return step, phase, level, scope, op and ordinal of a call, None where these steps do not hold it."""
        row = int(np.searchsorted(self._seq, seq))
        if row >= len(self._seq) or self._seq[row] != seq:
            return None
        names = ("step", "phase", "level", "scope", "op", "ordinal")
        return {name: self._table[name][row].as_py() for name in names}

    def producers(self, seq: int) -> list[Link]:
        """Return what a call reads of which other call."""
        low, high = np.searchsorted(self._seq, [seq, seq + 1])
        return [self._link(row) for row in range(low, high) if self._producer[row] >= 0]

    def consumers(self, seq: int) -> list[Link]:
        """Return which calls read what a call made, and which of its level read what the calls inside it made."""
        links = self._read_by(seq)
        known = {link.target for link in links}
        facts = self.facts(seq)
        level = None if facts is None else facts["level"]
        for inner in self.inside(seq):
            for link in self._read_by(inner):
                reader = self.facts(link.target)
                if link.target not in known and reader is not None and reader["level"] == level:
                    links.append(link)
        return links

    def inside(self, seq: int) -> list[int]:
        """Return the calls inside a call, at any depth; of very many the first."""
        found: list[int] = []
        pending = [seq]
        while pending and len(found) < INSIDE:
            around = pending.pop()
            low, high = np.searchsorted(self._sorted_parents, [around, around + 1])
            fresh = distinct(self._seq[self._children[low:high]]).tolist()
            found += fresh
            pending += fresh
        return found

    def _read_by(self, seq: int) -> list[Link]:
        low, high = np.searchsorted(self._sorted_producers, [seq, seq + 1])
        return [self._link(row) for row in np.sort(self._readers[low:high]).tolist()]

    def ancestors(self, seq: int) -> list[int]:
        """Return the calls around a call, innermost first."""
        found: list[int] = []
        while len(found) < DEPTH:
            row = int(np.searchsorted(self._seq, seq))
            if row >= len(self._seq) or self._seq[row] != seq or self._parent[row] < 0 or self._parent[row] in found:
                break
            seq = int(self._parent[row])
            found.append(seq)
        return found

    def beside(self, seq: int, level: str) -> tuple[int | None, int | None]:
        """Return the calls of a level that ran right before and right after one."""
        calls = self._by_level.get(level, np.empty(0, np.int64))
        before, after = int(np.searchsorted(calls, seq)) - 1, int(np.searchsorted(calls, seq, side="right"))
        return (int(calls[before]) if before >= 0 else None), (int(calls[after]) if after < len(calls) else None)

    def _link(self, row: int) -> Link:
        slots = (self._table[name][row].as_py() or "" for name in ("producer_slot", "slot"))
        return Link(int(self._producer[row]), int(self._seq[row]), *slots)


def _is(column: pa.Array, name: str) -> Array:
    return np.asarray(pc.equal(column, name).to_numpy(zero_copy_only=False), bool)


class Compared:
    """What the table of calls says of one rank in the steps asked about: state, errors and counterpart of a call."""

    def __init__(self, calls: pa.Table, rank: int, steps: Iterable[int]) -> None:
        here = pc.and_(pc.equal(calls["rank"], rank), pc.is_in(calls["step"], pa.array([*steps], pa.int32())))
        self._rows = calls.filter(here).select(["state", "role", "error_in", "error_out", "seq_baseline", "seq_candidate"])
        self._seqs = tuple(self._rows[name].to_numpy() for name in ("seq_baseline", "seq_candidate"))
        self._orders = tuple(np.argsort(seqs, kind="stable") for seqs in self._seqs)
        self._sorted = tuple(seqs[order] for seqs, order in zip(self._seqs, self._orders, strict=True))

    def pair(self, seq: int, side: int) -> Pair:
        """Return both execution numbers of a call of one side; -1 where it has no counterpart."""
        row = self._row(seq, side)
        if row is None:
            return (seq, -1) if side == 0 else (-1, seq)
        return int(self._seqs[0][row]), int(self._seqs[1][row])

    def row(self, pair: Pair) -> dict[str, Any]:
        """Return state, role and errors of a matched call; nothing of another."""
        row = self._row(pair[1], 1) if min(pair) >= 0 else None
        return {} if row is None else {name: self._rows[name][row].as_py() for name in self._rows.column_names}

    def _row(self, seq: int, side: int) -> int | None:
        at = int(np.searchsorted(self._sorted[side], seq))
        found = at < len(self._sorted[side]) and self._sorted[side][at] == seq
        return int(self._orders[side][at]) if found else None


class Graph:
    """The calls within two hops of one, on both sides, merged where they are counterparts."""

    def __init__(self, sides: tuple[Surroundings, Surroundings], compared: Compared, call: Pair, level: str) -> None:
        self._sides, self._compared, self._call, self._level = sides, compared, call, level
        self._hops: dict[Pair, int] = {call: 0}
        self._edges: dict[tuple[Pair, Pair, str], tuple[str, set[int]]] = {}
        self.omitted = 0
        for direction in (-1, 1):
            frontier = [call]
            for hop in range(1, HOPS + 1):
                frontier = self._expand(frontier, direction * hop)

    def _expand(self, frontier: list[Pair], hop: int) -> list[Pair]:
        """Add the next ring: the calls with the largest errors, the others are counted."""
        found: dict[Pair, list[tuple[Pair, Pair, str, str, int]]] = {}
        for call in frontier:
            for side in (0, 1):
                for link in self._links(call[side], side, hop):
                    found.setdefault(link[0] if hop < 0 else link[1], []).append((*link, side))
        fresh = [pair for pair in found if pair not in self._hops]
        same = [pair for pair in fresh if self._at_level(pair)]
        ranked = sorted(same or fresh, key=self._importance)
        data = [pair for pair in ranked if not self._updates(pair)]
        most = NEAR if abs(hop) == 1 else FAR
        kept = [*data, *(pair for pair in ranked if self._updates(pair))][: min(most, len(data) + UPDATES) if data else most]
        self.omitted += len(ranked) - len(kept)
        for pair in kept:
            self._hops[pair] = hop
        for pair in kept:
            for source, target, made, read, side in found[pair]:
                self._edges.setdefault((source, target, read), (made, set()))[1].add(side)
        return kept

    def _links(self, seq: int, side: int, hop: int) -> list[tuple[Pair, Pair, str, str]]:
        """Return the tensors of one call as ``(source, target, their slots)``, calls lifted to the level of the finding."""
        if seq < 0:
            return []
        held = self._sides[side]
        own = {seq, *held.ancestors(seq)}
        linked: set[int] = set()
        links = []
        for link in held.producers(seq) if hop < 0 else held.consumers(seq):
            other = self._lifted(link.source if hop < 0 else link.target, side)
            if other in own or seq in held.ancestors(other):
                continue
            inner = (link.target if hop < 0 else link.source) != seq
            if inner and other in linked:
                continue
            linked.add(other)
            ends = (other, seq) if hop < 0 else (seq, other)
            source, target = (self._call if end == self._call[side] else self._compared.pair(end, side) for end in ends)
            links.append((source, target, link.source_slot, link.target_slot))
        return links

    def _lifted(self, seq: int, side: int) -> int:
        held = self._sides[side]
        for candidate in (seq, *held.ancestors(seq)):
            facts = held.facts(candidate)
            if facts is not None and facts["level"] == self._level:
                return candidate
        return seq

    def _at_level(self, pair: Pair) -> bool:
        facts = self._facts(pair)
        return facts is not None and facts["level"] == self._level

    def _updates(self, pair: Pair) -> bool:
        """Tell whether a call is the optimizer's, and the one in question is not."""
        phases = [None if facts is None else facts["phase"] for facts in (self._facts(self._call), self._facts(pair))]
        return phases[1] == "optimizer" != phases[0]

    def _facts(self, pair: Pair) -> dict[str, Any] | None:
        return next((facts for side in (1, 0) if pair[side] >= 0 and (facts := self._sides[side].facts(pair[side]))), None)

    def _importance(self, pair: Pair) -> tuple[float, int]:
        error = self._compared.row(pair).get("error_out")
        return -(error if error is not None and not math.isnan(error) else 0.0), max(pair)

    def nodes(self) -> list[Neighbour]:
        """Return the calls, producers of producers first."""
        order = sorted(self._hops, key=lambda pair: (self._hops[pair], max(pair)))
        return [neighbour(self._hops[pair], pair, self._facts(pair), self._compared) for pair in order]

    def edges(self, nodes: list[Neighbour], known: Mapping[str, float]) -> list[Edge]:
        """Return the tensors between the calls; ``known`` are the errors of the finding's own slots."""
        places = {node.seq: k for k, node in enumerate(nodes)}
        sides = {(0,): "baseline", (1,): "candidate", (0, 1): "both"}
        made = []
        for (source, target, second), (first, on) in self._edges.items():
            if source not in places or target not in places:
                continue
            own = known.get(second) if target == self._call else known.get(first) if source == self._call else None
            error = own if own is not None else nodes[places[source]].error_out
            side: Any = sides[tuple(sorted(on))]
            made.append(Edge(places[source], places[target], (first, second), side, error))
        return made


def neighbour(hops: int, pair: Pair, facts: dict[str, Any] | None, compared: Compared) -> Neighbour:
    """Describe a call; one that the steps at hand do not hold is said to be of an earlier step."""
    known = facts or {"step": -1, "phase": "", "level": "", "scope": "", "op": "a call of an earlier step", "ordinal": 0}
    row = compared.row(pair)
    errors = (math.nan if row.get(name) is None else float(row[name]) for name in ("error_in", "error_out"))
    return Neighbour(
        hops, pair, known["step"], known["phase"], known["level"], known["scope"], known["op"], known["ordinal"],
        row.get("state") or "", row.get("role") or "", *errors,
    )  # fmt: skip
