"""What a report shows beside the verdict, read from the captures once the verdict is known.

At the end of a comparison `with_evidence` adds, for the first culprits, the spread and the worst elements of what deviates (where
the bytes were recorded) and the calls around; for unmatched calls their neighbours; for both runs the gradient norms; and the
rows of the criterion that judged. It decides nothing: what it cannot read it says, and the verdict stands. Tensors are read in
chunks from the mapped capture, so memory does not grow with them; their elements are counted in common bins.

What stands around a call (who made its inputs, who reads its outputs, what ran right before and after it) is told from one step of
one rank, held as columns, so that a capture of millions of rows costs arrays and no objects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation.model import Edge, Evidence, Finding, Histogram, Neighbour, Result, SlotComparison, TrueupError, WorstElement
from trueup.foundation.store import Capture
from trueup.foundation.store.columns import distinct

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

CULPRITS = 20
"""Culprits with evidence."""

SLOTS = 2
"""Slots of a culprit whose elements are shown: the worst."""

HELD = 4
"""Steps of a rank whose surroundings are kept at hand."""

PLACE = ("payload_segment", "payload_key", "payload_view", "digest")
PAYLOAD = ("seq", "slot", "shape", *PLACE)

Captures = tuple[Capture, Capture]
Made = TypeVar("Made")


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


def with_evidence(result: Result, captures: Captures) -> Result:
    """Return a finished verdict with what its report shows of culprits and of calls without counterpart."""
    around = _Around(captures, result)
    culprits = [
        dataclasses.replace(finding, evidence=_evidence(finding, captures, around)) if k < CULPRITS else finding
        for k, finding in enumerate(result.culprits)
    ]
    unmatched = [dataclasses.replace(finding, neighbours=around.beside(finding)) for finding in result.unmatched]
    return dataclasses.replace(result, culprits=culprits, unmatched=unmatched)


def _evidence(finding: Finding, captures: Captures, around: _Around) -> Evidence:
    histograms, worst, notes = _elements(finding, captures)
    nodes, edges, omitted = around.graph(finding)
    return Evidence(tuple(histograms), tuple(worst), tuple(nodes), tuple(edges), omitted, tuple(notes))


def _both(read: Callable[[Capture], Made], captures: Captures) -> tuple[Made, Made]:
    """Read both captures side by side: most of it is Arrow, which needs no interpreter."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(read, captures)
    return first, second


def _elements(finding: Finding, captures: Captures) -> tuple[list[Histogram], list[WorstElement], list[str]]:
    histograms: list[Histogram] = []
    worst: list[WorstElement] = []
    notes: list[str] = []
    if min(finding.seq) < 0:
        return histograms, worst, ["the call is in one run only, so there are no two tensors to lay side by side"]
    for slot in _worst_slots(finding):
        tensors, reason = _tensors(finding, slot.slot, captures)
        if tensors is None:
            notes.append(reason)
            continue
        histogram, elements, left_out = compare_elements(slot.slot, *tensors)
        histograms += [histogram] if histogram is not None else []
        worst += elements
        notes += left_out
    return histograms, worst, list(dict.fromkeys(notes))


def _worst_slots(finding: Finding) -> list[SlotComparison]:
    """Return the deviating tensors with the largest errors; one that could not be measured counts as the largest. Where an input
    is what differs, the verdict puts it first among the slots, and so it is here."""
    meant = finding.slots[:1] if finding.kind in ("input", "overwritten") else ()
    tensors = [s for s in finding.slots if s.method != "value" and s.state in ("deviates", "incomparable")]
    ranked = sorted(tensors, key=lambda s: -math.inf if math.isnan(s.relative_l2) else -s.relative_l2)
    return list(dict.fromkeys([*(s for s in meant if s.method != "value"), *ranked]))[:SLOTS]


def _tensors(finding: Finding, slot: str, captures: Captures) -> tuple[tuple[Any, Any] | None, str]:
    """Return both sides' elements of a slot, or None and why."""
    found = []
    for side, capture, seq in zip(("baseline", "candidate"), captures, finding.seq, strict=True):
        try:
            table = capture.records(list(PAYLOAD), rank=finding.rank, step=finding.step, seq=seq, slot=slot)
            record = table.to_pylist()[0] if table.num_rows else None
            if record is None or record["payload_segment"] is None:
                return None, (
                    f"only statistics were recorded in the {side}: without the elements there is no histogram and no list of "
                    "the worst; capture both runs with --detail tensor"
                )
            array = capture.payload(finding.rank, *(record[name] for name in PLACE))
            found.append(array.reshape(record["shape"]) if math.prod(record["shape"] or [1]) == array.size else array)
        except (TrueupError, ValueError, TypeError) as error:
            return None, f"{slot}: the {side}'s elements cannot be read ({str(error).splitlines()[0]})"
    first, second = found
    if first.size != second.size or (first.dtype.kind == "c") != (second.dtype.kind == "c"):
        return None, f"{slot}: the two sides have {first.size:,} and {second.size:,} elements, which cannot be laid side by side"
    return (first, second), ""


class _Around:
    """Surroundings by side, rank and step, a few of them held at a time."""

    def __init__(self, captures: Captures, result: Result) -> None:
        self._captures, self._calls = captures, result.matched
        self._held: dict[tuple[int, int], tuple[Surroundings, Surroundings]] = {}
        self._compared: dict[tuple[int, int], Compared] = {}

    def graph(self, finding: Finding) -> tuple[list[Neighbour], list[Any], int]:
        """Return nodes, edges and how many neighbours were left out."""
        sides, compared = self._of(finding)
        made = Graph(sides, compared, finding.seq, finding.level)
        known = {slot.slot: slot.relative_l2 for slot in finding.slots}
        nodes = made.nodes()
        return nodes, made.edges(nodes, known), made.omitted

    def beside(self, finding: Finding) -> tuple[Neighbour, ...]:
        sides, compared = self._of(finding)
        side = 0 if finding.seq[0] >= 0 else 1
        found = []
        for hops, seq in zip((-1, 1), sides[side].beside(finding.seq[side], finding.level), strict=True):
            if seq is not None:
                found.append(neighbour(hops, compared.pair(seq, side), sides[side].facts(seq), compared))
        return tuple(found)

    def _of(self, finding: Finding) -> tuple[tuple[Surroundings, Surroundings], Compared]:
        key = finding.rank, finding.step
        if key not in self._held:
            while len(self._held) >= HELD:
                oldest = next(iter(self._held))
                del self._held[oldest], self._compared[oldest]
            self._held[key] = _both(lambda capture: Surroundings(capture, *key), self._captures)
            self._compared[key] = Compared(self._calls, finding.rank, (finding.step - 1, finding.step))
        return self._held[key], self._compared[key]


Array = np.ndarray[Any, Any]

BINS = 40
WORST = 6
CHUNK = 1 << 20
"""Elements that are converted to float64 at a time: 8 MB a side."""

LARGEST = 1.7e308
MOST = 1 << 26
"""Elements of a tensor that are looked at; of a larger one the first so many, and that is said."""


def compare_elements(slot: str, baseline: Array, candidate: Array) -> tuple[Histogram | None, list[WorstElement], list[str]]:
    """Compare two tensors of equal size, of any shapes and dtypes, element by element in logical C order. ``slot`` names the
    results. Return the histogram of both (None where no element is finite), the worst elements, and what was left out."""
    notes = []
    size = baseline.size * (2 if baseline.dtype.kind == "c" else 1)
    if size > MOST:
        notes.append(f"{slot}: of {size:,} elements the first {MOST:,} are shown")
    rows = histograms([partial(_shown, side) for side in (baseline, candidate)], BINS)
    histogram = None
    if rows:
        counts = (tuple(row[2][side] for row in rows) for side in (0, 1))
        histogram = Histogram(slot, _edges(rows), *counts)
    left_out = sum(len(numbers) for side in (baseline, candidate) for _, numbers in _chunks(side)) - sum(
        sum(row[2]) for row in rows
    )
    if left_out:
        notes.append(f"{slot}: {left_out:,} elements that are not finite, or the largest their dtype has, are not in the histogram")
    return histogram, _worst(slot, baseline, candidate), notes


def _chunks(array: Array) -> Iterator[tuple[int, Array]]:
    """Yield ``(offset, float64 elements)``; a complex element is two."""
    flat = array.reshape(-1) if array.flags.c_contiguous else None
    parts = 2 if array.dtype.kind == "c" else 1
    end = min(array.size, MOST // parts)
    for start in range(0, end, CHUNK):
        stop = min(start + CHUNK, end)
        held = flat[start:stop] if flat is not None else array.flat[start:stop]
        numbers = held.view(held.real.dtype) if parts == 2 else held
        yield start * parts, numbers.astype(np.float64)


def _largest(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a dtype that masks are made of; Inf where it is an ordinary number."""
    if dtype.kind == "c" or dtype.kind == "f" or dtype.kind == "V" or dtype.name.startswith(("bfloat", "float")):
        return float(ml_dtypes.finfo(dtype).max)
    return math.inf


def _shown(side: Array) -> Iterator[Array]:
    """Yield the elements that are counted: NaN, Inf and what masks are made of are not."""
    largest = _largest(side.dtype)
    for _, numbers in _chunks(side):
        yield numbers[np.abs(numbers) < largest]


def _edges(rows: Sequence[tuple[float, float, list[int]]]) -> tuple[float, ...]:
    """Return rising edges; what is all one number gets a bin around it."""
    low, high = rows[0][0], rows[-1][1]
    if low < high:
        return (*(row[0] for row in rows), high)
    margin = abs(low) * 0.5 or 0.5
    return max(low - margin, -LARGEST), min(high + margin, LARGEST)


def _worst(slot: str, baseline: Array, candidate: Array) -> list[WorstElement]:
    """Return the elements that are furthest apart: those that are finite on one side only come first."""
    best: list[tuple[float, int, float, float]] = []
    for (offset, b), (_, c) in zip(_chunks(baseline), _chunks(candidate), strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(c - b)
        same = (b == c) | (np.isnan(b) & np.isnan(c))
        apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
        count = min(WORST, len(apart))
        top = np.argpartition(-apart, count - 1)[:count] if count else np.empty(0, np.int64)
        best += [(float(apart[k]), offset + int(k), float(b[k]), float(c[k])) for k in top if apart[k] > 0]
        best = sorted(best, key=lambda one: (-one[0], one[1]))[:WORST]
    shape = (*baseline.shape, 2) if baseline.dtype.kind == "c" else baseline.shape
    return [
        WorstElement(slot, tuple(int(i) for i in np.unravel_index(k, shape)), b, c, _ulps(b, c, baseline.dtype, candidate.dtype))
        for _, k, b, c in best
    ]


def _ulps(baseline: float, candidate: float, *dtypes: np.dtype[Any]) -> float:
    """Return |candidate - baseline| in units in the last place of the larger of them, in the dtype with the fewest digits. So two
    numbers of which one is zero are about 2**p units apart, however small. The unit of x is 2**(e - p) with 2**e <= |x| < 2**(e +
    1) and p stored bits of mantissa, that of the least normal number below it (IEEE 754-2019)."""
    infos = [ml_dtypes.finfo(dtype) for dtype in dtypes if _largest(dtype) < math.inf]
    if len(infos) < len(dtypes) or not (math.isfinite(baseline) and math.isfinite(candidate)):
        return math.nan
    coarse = min(infos, key=lambda info: int(info.nmant))
    least = float(coarse.smallest_normal)
    exponent = math.frexp(max(abs(baseline), abs(candidate), least))[1] - 1
    unit = math.ldexp(1.0, max(exponent - int(coarse.nmant), -1074))
    return abs(candidate - baseline) / unit


Pieces = Callable[[], Iterable[Array]]  # gives the elements that are counted, float64, piece by piece; it is asked twice
PIECE = 1 << 16
"""Elements taken at a time."""


def histograms(tensors: Sequence[Pieces], bins: int) -> list[tuple[float, float, list[int]]]:
    """Count the elements of several tensors in the same bins between their extremes: ``(from, to, [count of each])`` rows; one
    bin if they are (nearly) all equal, none if there are no elements."""
    found = [bounds for pieces in tensors if (bounds := _bounds(pieces())) is not None]
    if not found:
        return []
    low, high = min(each[0] for each in found), max(each[1] for each in found)
    scale = 1.0 if high / 4 - low / 4 < np.finfo(np.float64).max / 4 else 4.0  # the span must be a float64 itself
    if (high / scale - low / scale) <= 2 * bins * np.spacing(max(abs(low), abs(high)) / 4) * 4 / scale:
        return [(low, high, [sum(piece.size for piece in pieces()) for pieces in tensors])]
    edges = np.histogram_bin_edges(np.empty(0), bins, (low / scale, high / scale))
    counts = [_counts(pieces(), edges, scale) for pieces in tensors]
    edges = edges * scale
    inner = edges[1:-1]
    inner[np.abs(inner) < (high / scale - low / scale) * 1e-6] = 0.0  # an edge at zero, but for rounding
    rows = zip(edges[:-1].tolist(), edges[1:].tolist(), zip(*counts, strict=True), strict=True)
    return [(a, b, list(each)) for a, b, each in rows]


def finite(values: Array) -> Iterator[Array]:
    """Yield the finite elements of a tensor in logical order; of complex ones the magnitude."""
    with np.nditer(values, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=PIECE) as pieces:
        for piece in pieces:
            row = np.asarray(piece)
            real = (np.abs(row) if row.dtype.kind == "c" else row).astype(np.float64)
            yield real[np.isfinite(real)]


def _bounds(pieces: Iterable[Array]) -> tuple[float, float] | None:
    found = [(float(piece.min()), float(piece.max())) for piece in pieces if piece.size]
    return (min(each[0] for each in found), max(each[1] for each in found)) if found else None


def _counts(pieces: Iterable[Array], edges: Array, scale: float) -> list[int]:
    total = np.zeros(len(edges) - 1, np.int64)
    for piece in pieces:
        total += np.histogram(piece / scale, edges)[0]
    return [int(count) for count in total]
