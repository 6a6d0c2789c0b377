"""What a report shows beside the verdict, read from the captures once the verdict is known.

At the end of a comparison `with_evidence` adds, for the first culprits, the spread and the worst elements of what deviates (where
the bytes were recorded) and the calls around; for unmatched calls their neighbours; for both runs the gradient norms; and the
rows of the criterion that judged. It decides nothing: what it cannot read it says, and the verdict stands. Tensors are read in
chunks from the mapped capture, so memory does not grow with them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from trueup.comparison.result.histogram import histograms
from trueup.comparison.result.neighbours import Compared, Graph, Surroundings, neighbour
from trueup.foundation.model import Evidence, Finding, Histogram, Neighbour, Result, SlotComparison, TrueupError, WorstElement
from trueup.foundation.store import Capture

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
