"""What a report shows beside the verdict, read from the captures once the verdict is known.

`with_evidence` is called at the end of a comparison: for the first culprits the spread and the worst elements of what deviates
(where the bytes were recorded) and the calls around; for unmatched calls their neighbours; for both runs the gradient norms;
the rows of the criterion that judged. It decides nothing: what it cannot read it says, and the verdict stands.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from trueup.comparison.result.elements import compare_elements
from trueup.comparison.result.gradients import Norm, over_steps
from trueup.comparison.result.surroundings import Compared, Graph, Surroundings, neighbour
from trueup.comparison.verdict.criteria import Criterion, Limit, Row
from trueup.foundation.model import Evidence, Finding, Histogram, Neighbour, Result, Rule, SlotComparison, TrueupError, WorstElement
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


def with_evidence(
    result: Result, captures: Captures, norms: Sequence[Sequence[Norm]], criterion: Criterion | None = None
) -> Result:
    """Return the result with what its report shows.

    Args:
        result: a finished verdict.
        captures: the baseline and the candidate.
        norms: of the gradients of each rank and step of either.
        criterion: what judged.
    """
    around = _Around(captures, result)
    culprits = [
        dataclasses.replace(finding, evidence=_evidence(finding, captures, around)) if k < CULPRITS else finding
        for k, finding in enumerate(result.culprits)
    ]
    unmatched = [dataclasses.replace(finding, neighbours=around.beside(finding)) for finding in result.unmatched]
    told = [over_steps(found, len(capture.ranks)) for found, capture in zip(norms, captures, strict=True)]
    runs = [
        dataclasses.replace(run, gradient_norms=found, gradient_source=source)
        for run, (found, source) in zip((result.baseline, result.candidate), told, strict=True)
    ]
    return dataclasses.replace(
        result, culprits=culprits, unmatched=unmatched, baseline=runs[0], candidate=runs[1], rules=used_rules(result, criterion)
    )


def _evidence(finding: Finding, captures: Captures, around: _Around) -> Evidence:
    histograms, worst, notes = _elements(finding, captures)
    nodes, edges, omitted = around.graph(finding)
    return Evidence(tuple(histograms), tuple(worst), tuple(nodes), tuple(edges), omitted, tuple(notes))


def _both(read: Callable[[Capture], Made], captures: Captures) -> tuple[Made, Made]:
    """Read both captures side by side: most of it is Arrow, which needs no interpreter."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(read, captures)
    return first, second


# ---------------------------------------------------------------- elements
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
    """Return the deviating tensors with the largest errors; one that could not be measured counts as the largest.

    Where an input is what differs, the verdict puts it first among the slots, and so it is here.
    """
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


# ---------------------------------------------------------------- the calls around
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
        """Return the calls right before and after an unmatched one."""
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


# ---------------------------------------------------------------- the criterion
def used_rules(result: Result, criterion: Criterion | None) -> Sequence[Rule]:
    """Return what judged calls of a result, as the table of calls names it, that of most calls first."""
    table = pa.table({name: result.matched[name].cast(pa.string()) for name in ("rule", "state")})
    calls: Counter[str] = Counter()
    deviates: Counter[str] = Counter()
    for entry in table.group_by(["rule", "state"]).aggregate([([], "count_all")]).to_pylist():
        calls[entry["rule"] or ""] += entry["count_all"]
        deviates[entry["rule"] or ""] += entry["count_all"] if entry["state"] == "deviates" else 0
    return tuple(_rule(name, n, deviates[name], criterion) for name, n in calls.most_common())


def _rule(name: str, calls: int, deviates: int, criterion: Criterion | None) -> Rule:
    """Describe what a table calls a rule: the name of a row, and behind it what else decided (a repeat, a reference)."""
    rows = [row for row in (criterion.rows if criterion else ()) if name.startswith(row.name)]
    if criterion is None or not rows:
        return Rule(name, "", "", calls, deviates)
    row = max(rows, key=lambda one: len(one.name))
    said = "; or ".join(map(_limit, criterion.limits)) if criterion.limits else _table_row(row)
    return Rule(name, said, row.origin, calls, deviates)


def _table_row(row: Row) -> str:
    """Say what a row of a table explains: ``rounding: reduction, 4 units; errors of inputs: linear, factor 8``."""
    said = f"rounding: {row.own}, {_plain(row.ulps)} units; errors of inputs: {row.carry}, factor {_plain(row.factor)}"
    return said + ("; draws random numbers" if row.random else "")


def _limit(limit: Limit) -> str:
    """Say what a limit refuses: ``fails with cosine below 0.99 and max_absolute above 0.001``."""
    conditions = (f"{measure} {way} {_plain(number)}" for measure, way, number in limit.conditions)
    return f"fails with {' and '.join(conditions)}"


def _plain(value: float) -> str:
    return np.format_float_positional(value, trim="-")
