"""Culprits before victims: which suspected calls are where a difference starts, and which only pass one on.

A call is suspected when its outputs differ by more than rounding and its inputs explain. Of the suspected calls at several
levels the finest speaks; of several in a row the first is the culprit, and a later one is another culprit only if its own
inputs are clean.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trueup.verdict.criteria import Criterion, normalised
from trueup.verdict.judge import Judged
from trueup.verdict.measure import equal_values, is_overwritten
from trueup.verdict.origins import Origins
from trueup.verdict.regions import Regions, judge_region, loose_calls
from trueup.verdict.regions import operators as region_operators
from trueup.verdict.streams import Row, Stream, is_input
from trueup.verdict.tree import Tree

Kind = Literal["operator", "argument", "random", "input", "region"]
Side = Literal["baseline", "candidate"]
SIDES: tuple[Side, Side] = ("baseline", "candidate")

CARRIED = 1e-5
"""Relative error from which a call that its inputs explain is shown as a victim; below, it agrees."""

CLEAN_UNITS = 512
"""Inputs within this many units of roundoff are clean: what a few rounded operators leave behind."""


@dataclass(slots=True)
class Suspect:
    """A call where a difference may start; ``kind`` as in `trueup.model.Finding`."""

    judged: Judged
    kind: Kind
    certain: bool
    children: tuple[str, ...] = ()
    api: str | None = None
    reason: str = ""
    sides: tuple[bool, bool] = (True, True)
    """Whether the baseline and the candidate have the call (only a region may lack one)."""

    @property
    def step(self) -> int:
        """Training step."""
        return self.judged.call.candidate.step

    @property
    def rank(self) -> int:
        """Process."""
        return self.judged.call.candidate.rank

    @property
    def phase(self) -> str:
        """Phase of the call."""
        return self.judged.call.candidate.phase

    @property
    def place(self) -> int:
        """Execution number on the candidate; of a region that it lacks, that of the call that reads the result."""
        return self.judged.call.candidate.seq


@dataclass(slots=True)
class Part:
    """One rank and step, judged."""

    rank: int
    step: int
    judged: list[Judged]
    only_baseline: list[Row]
    only_candidate: list[Row]
    suspects: list[Suspect] = field(default_factory=list)
    uncovered: list[tuple[Side, Row]] = field(default_factory=list)
    """Unmatched calls that no coarser level and no consumer accounts for."""
    unexplained: list[tuple[Judged, str]] = field(default_factory=list)
    """``(call, input slot)`` where a difference comes in that no compared call made."""


def locate(
    part: Part,
    baseline: Stream,
    candidate: Stream,
    criterion: Criterion,
    origins: Origins | None = None,
    *,
    first_step: bool,
    from_start: bool,
) -> None:
    """Fill in what a part leaves open, and set the role of every judged call.

    Args:
        part: one rank and step.
        baseline: its stream.
        candidate: its stream.
        criterion: what is suspicious.
        origins: what is known of the earlier steps of the rank; brought up to date.
        first_step: whether this is the first captured step of the rank.
        from_start: whether that step is the first of the training.
    """
    origins = origins or Origins()
    tree = Tree(part.judged, part.only_baseline, part.only_candidate, baseline, candidate)
    found = [j for j in part.judged if j.ratio > criterion.suspect]
    suspects = [_suspect(j, baseline, candidate, criterion, tree) for j in _finest(found, criterion, tree)]
    suspects += _unmatched(part, tree, criterion, origins)
    part.unexplained = origins.follow(part.judged, tree)
    if first_step:
        suspects += _inputs(part, baseline, criterion, from_start=from_start)
    else:
        suspects += _later_inputs(part.unexplained, baseline)
    suspects += _arguments(part, suspects)
    told = {s.place for s in suspects if s.kind == "argument"}  # what a function was given, it hands on to its operators
    suspects = [s for s in suspects if s.kind != "argument" or told.isdisjoint(tree.ancestors(s.place))]
    part.suspects = sorted(suspects, key=lambda s: s.place)
    for judged in part.judged:
        judged.role = _role(judged)


def _unmatched(part: Part, tree: Tree, criterion: Criterion, origins: Origins) -> list[Suspect]:
    """Account for the calls without counterpart: return regions where a difference starts, keep what nothing shows."""
    loose = loose_calls(tree, (part.only_baseline, part.only_candidate))
    regions = Regions(tree, loose, origins)
    uncovered = set(regions.uncompared)
    suspects = []
    for region in regions.found:
        judged = judge_region(region, tree, criterion)
        if judged.ratio <= criterion.suspect:
            continue
        if judged.incomparable:
            uncovered |= {(side, seq) for side in (0, 1) for seq in region.calls[side]}
            continue
        certain = judged.ratio > criterion.certain and not judged.unsized
        suspects.append(Suspect(judged, "region", certain, region_operators(region, tree), sides=region.sides))
    part.uncovered = [(SIDES[side], row) for side in (0, 1) for seq, row in loose[side].items() if (side, seq) in uncovered]
    origins.leave(regions.lasting(), loose)
    return suspects


def _finest(found: list[Judged], criterion: Criterion, tree: Tree) -> list[Judged]:
    """Drop a suspected call when a finer level accounts for it."""
    speaking = {a for j in found if j.ratio > criterion.certain for a in tree.ancestors(j.call.candidate.seq)}
    return [j for j in found if j.call.candidate.seq not in speaking and not tree.resolved(j)]


def _suspect(judged: Judged, baseline: Stream, candidate: Stream, criterion: Criterion, tree: Tree) -> Suspect:
    call = judged.call
    kind: Kind = "operator"
    if (call.arguments is not None and not _equal_arguments(*call.arguments)) or any(map(is_input, call.one_sided)):
        kind = "argument"
    elif judged.row.random and not _same_draw(judged, baseline, candidate):
        kind = "random"
    around = (candidate.by_seq.get(a) for a in tree.ancestors(call.candidate.seq))
    parent = next((row for row in around if row is not None), None)
    api = parent.op if parent is not None and parent.level == "api" else None
    certain = judged.ratio > criterion.certain and not judged.unsized
    return Suspect(judged, kind, certain, tree.operators(call.candidate.seq), api)


def _equal_arguments(first: str | None, second: str | None) -> bool:
    try:
        return equal_values(json.loads(first or "{}"), json.loads(second or "{}"))
    except ValueError:  # truncated, as very long arguments are
        return first == second


def _same_draw(judged: Judged, baseline: Stream, candidate: Stream) -> bool:
    """Tell whether a random operator drew the same numbers on both sides, so that only its arithmetic can differ.

    Two draws of a mask agree on the number of zeros only by chance, and their results are not parallel; the same draw with
    another scale is: the sketches' cosine is then 1.
    """
    error = judged.call.slots.get(judged.worst or "")
    if error is None:
        return False
    b, c = baseline.sketch[error.baseline], candidate.sketch[error.candidate]
    norms = float(np.linalg.norm(b) * np.linalg.norm(c))
    return norms > 0 and float(np.dot(b, c)) / norms > 0.999


def _inputs(part: Part, baseline: Stream, criterion: Criterion, *, from_start: bool) -> list[Suspect]:
    """Find the first tensor that no recorded call produced and that differs: the data, the weights, a state."""
    tolerance = criterion.input_units * 2.0**-24 if from_start else 1e-3
    for judged in sorted(part.judged, key=lambda j: j.call.candidate.seq):
        for slot, error in judged.call.slots.items():
            if _enters(judged, slot, baseline) and error.relative > tolerance:
                return [Suspect(judged, "input", not error.unsized, reason=slot)]
    return []


def _later_inputs(unexplained: Iterable[tuple[Judged, str]], baseline: Stream) -> list[Suspect]:
    """Find the first tensor of a later step that no recorded call produced and that differs: the batch."""
    found = [Suspect(judged, "input", True, reason=slot) for judged, slot in unexplained if _enters(judged, slot, baseline)]
    return found[:1]


def _enters(judged: Judged, slot: str, baseline: Stream) -> bool:
    """Tell whether a slot reads, in the forward, a tensor that no recorded call produced."""
    if not is_input(slot) or judged.call.candidate.phase not in ("forward", "data"):
        return False
    if is_overwritten(judged.call.slots[slot], judged.call):
        return False
    return baseline.producer[judged.call.slots[slot].baseline] is None


def _arguments(part: Part, known: Sequence[Suspect]) -> list[Suspect]:
    """Find calls given other scalars on the two sides, whose results differ for it, and which are not suspects yet."""
    suspected = {id(s.judged) for s in known}
    found = []
    for judged in part.judged:
        arguments = judged.call.arguments
        if arguments is None or id(judged) in suspected or judged.error_out == 0 or judged.error_in > 0:
            continue
        if not _equal_arguments(*arguments):
            found.append(Suspect(judged, "argument", True))
    return found


def _role(judged: Judged) -> str:
    """Return incomparable, unsized, equal (bitwise), carried (more than rounding, and explained) or agrees."""
    slots = judged.call.slots.values()
    if judged.incomparable:
        return "incomparable"
    if judged.unsized:
        return "unsized"
    if all(e.absolute == 0 and e.method in ("digest", "tensor") for e in slots):
        return "equal"
    if judged.worst is None:  # it has no outputs: what it reads is all there is
        return "carried" if judged.error_in > CARRIED else "agrees"
    return "carried" if judged.error_out > max(8 * judged.own, CARRIED) else "agrees"


def rank_culprits(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Put the culprits first, in order of execution, and leave out what an earlier one explains.

    Certain ones go before those that could be rounding. Ranks run the same program, so their execution numbers are of one
    order; what a collective brings from a rank with an earlier culprit is explained by it.
    """
    culprits: list[Suspect] = []
    ordered = _first_of_a_kind(sorted(suspects, key=lambda s: (s.step, s.place, s.rank)))
    for suspect in sorted(ordered, key=lambda s: not s.certain):
        if not suspect.certain and culprits:
            continue
        received = suspect.phase == "collective" and any(c.rank != suspect.rank for c in culprits)
        if not culprits or (_is_clean(suspect.judged) and not received and not _is_told(suspect, culprits)):
            culprits.append(suspect)
    return culprits


def _is_told(suspect: Suspect, culprits: list[Suspect]) -> bool:
    """Tell whether a culprit says it already: one other learning rate is passed to the update of every parameter."""
    if suspect.kind not in ("argument", "random"):
        return False
    op = normalised(suspect.judged.call.candidate.op)
    return any(
        (c.kind, c.phase, normalised(c.judged.call.candidate.op)) == (suspect.kind, suspect.phase, op) for c in culprits
    )


def _is_clean(judged: Judged) -> bool:
    unit = judged.own / max(judged.row.ulps, 1.0)
    return judged.error_in <= CLEAN_UNITS * max(unit, 2.0**-24)


def _first_of_a_kind(ordered: list[Suspect]) -> list[Suspect]:
    """Make certain the earliest suspect of the operator that is the first certain one.

    A broken operator shows wherever it runs; where its error is small it could be rounding, were it not for the others.
    """
    certain = next((s for s in ordered if s.certain), None)
    if certain is None or certain.kind != "operator":
        return ordered
    wanted = _kind(certain)
    first = next(s for s in ordered if s.kind == "operator" and _kind(s) == wanted)
    first.certain = True
    return ordered


def _kind(suspect: Suspect) -> tuple[str, str, str]:
    call = suspect.judged.call.candidate
    return call.level, call.phase, call.op
