"""Culprits before victims: which suspected calls are where a difference starts, and which only pass one on.

A call is suspected when its outputs differ by more than rounding and its inputs explain. Of the suspected calls at several
levels the finest speaks; of several in a row the first is the culprit, and a later one is another culprit only if its own
inputs are clean.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trueup.model import LEVELS, NUMBERS
from trueup.verdict.criteria import Criterion
from trueup.verdict.judge import Judged
from trueup.verdict.measure import equal_values
from trueup.verdict.streams import Row, Stream, is_input

N_ZERO = NUMBERS.index("n_zero")
L2 = NUMBERS.index("l2")

FINEST = {level: n for n, level in enumerate(LEVELS)}

CLEAN_UNITS = 512
"""Inputs within this many units of roundoff are clean: what a few rounded operators leave behind."""


@dataclass(slots=True)
class Suspect:
    """A call where a difference may start; ``kind`` as in `trueup.model.Finding`."""

    judged: Judged
    kind: str
    certain: bool
    children: tuple[str, ...] = ()
    api: str | None = None
    reason: str = ""


@dataclass(slots=True)
class Part:
    """One rank and step, judged."""

    rank: int
    step: int
    judged: list[Judged]
    only_baseline: list[Row]
    only_candidate: list[Row]
    suspects: list[Suspect] = field(default_factory=list)
    uncovered: list[tuple[str, Row]] = field(default_factory=list)
    """Unmatched calls that no coarser level and no consumer accounts for: (side, call)."""


def locate(
    part: Part, baseline: Stream, candidate: Stream, criterion: Criterion, *, first_step: bool, from_start: bool
) -> None:
    """Fill ``part.suspects`` and ``part.uncovered``, and set the role of every judged call.

    Args:
        part: one rank and step.
        baseline: its stream.
        candidate: its stream.
        criterion: what is suspicious.
        first_step: whether this is the first captured step of the rank.
        from_start: whether that step is the first of the training.
    """
    tree = _Tree(part, candidate)
    found = [j for j in part.judged if j.ratio > criterion.suspect]
    part.suspects = [_suspect(j, baseline, candidate, criterion, tree) for j in _finest(found, criterion, tree)]
    if first_step:
        part.suspects += _inputs(part, baseline, criterion, from_start=from_start)
    part.suspects += _arguments(part, part.suspects)
    part.suspects.sort(key=lambda s: s.judged.call.candidate.seq)
    for judged in part.judged:
        judged.role = _role(judged)
    part.uncovered = _uncovered(part, tree)


class _Tree:
    """Which calls ran inside which, on the candidate."""

    def __init__(self, part: Part, candidate: Stream) -> None:
        self.by_seq = {j.call.candidate.seq: j for j in part.judged}
        self.stream = candidate
        self.unmatched = {c.seq for c in part.only_candidate}
        self.children: defaultdict[int, list[Row]] = defaultdict(list)
        for call in candidate.calls:
            if call.parent is not None:
                self.children[call.parent].append(call)
        self.unmatched_baseline = {c.parent for c in part.only_baseline if c.parent is not None}

    def ancestors(self, seq: int) -> list[int]:
        """Return the calls around a call, innermost first."""
        found: list[int] = []
        row = self.stream.by_seq.get(seq)
        while row is not None and row.parent is not None and row.parent not in found:
            found.append(row.parent)
            row = self.stream.by_seq.get(row.parent)
        return found

    def resolved(self, judged: Judged) -> bool:
        """Tell whether everything that ran inside a call was matched, so that the finer level speaks for it."""
        children = self.children.get(judged.call.candidate.seq, [])
        if not children or judged.call.baseline.seq in self.unmatched_baseline:
            return False
        return all(c.seq not in self.unmatched for c in children)

    def operators(self, seq: int) -> tuple[str, ...]:
        """Return the dispatcher operators inside a call, each once: those that the baseline lacks first."""
        names: dict[str, bool] = {}
        pending = [seq]
        while pending:
            for child in self.children.get(pending.pop(), []):
                if child.level == "aten":
                    names[child.op] = names.get(child.op, False) or child.seq in self.unmatched
                else:
                    pending.append(child.seq)
        return tuple(sorted(names, key=lambda op: (not names[op], not op.rpartition("::")[2].startswith("_"))))


def _finest(found: list[Judged], criterion: Criterion, tree: _Tree) -> list[Judged]:
    """Drop a suspected call when a finer level accounts for it."""
    speaking = {a for j in found if j.ratio > criterion.certain for a in tree.ancestors(j.call.candidate.seq)}
    return [j for j in found if j.call.candidate.seq not in speaking and not tree.resolved(j)]


def _suspect(judged: Judged, baseline: Stream, candidate: Stream, criterion: Criterion, tree: _Tree) -> Suspect:
    call = judged.call
    kind = "operator"
    if call.arguments is not None and not _equal_arguments(*call.arguments):
        kind = "argument"
    elif judged.row.random and not _same_draw(judged, baseline, candidate):
        kind = "random"
    parent = next(
        (tree.stream.by_seq[a] for a in tree.ancestors(call.candidate.seq) if tree.stream.by_seq.get(a) is not None), None
    )
    api = parent.op if parent is not None and parent.level == "api" else None
    return Suspect(judged, kind, judged.ratio > criterion.certain, tree.operators(call.candidate.seq), api)


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
    """Find tensors that no recorded call produced and that differ: the data, the weights, a state."""
    for judged in sorted(part.judged, key=lambda j: j.call.candidate.seq):
        call = judged.call
        if call.candidate.phase not in ("forward", "data"):
            continue
        for slot, error in call.slots.items():
            if not is_input(slot) or baseline.producer[error.baseline] is not None or error.absolute == 0:
                continue
            tolerance = criterion.input_units * 2.0**-24 if from_start else 1e-3
            if error.relative > tolerance:
                return [Suspect(judged, "input", True, reason=slot)]
    return []


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
    slots = judged.call.slots.values()
    if judged.incomparable:
        return "incomparable"
    if all(e.absolute == 0 for e in slots):
        return "equal"
    return "carried" if judged.error_out > max(8 * judged.own, 1e-5) else "agrees"


def _uncovered(part: Part, tree: _Tree) -> list[tuple[str, Row]]:
    """Keep the unmatched calls that nothing accounts for.

    An unmatched call is accounted for when a matched call around it was compared, or when a coarser level of the same phase
    lines up completely: a device may well run other operators for the same function.
    """
    coarser: dict[tuple[str, str], bool] = {}
    unmatched = [("baseline", c) for c in part.only_baseline] + [("candidate", c) for c in part.only_candidate]
    matched_levels = defaultdict(int)
    for j in part.judged:
        matched_levels[j.call.candidate.level] += 1
    broken = {(c.level, c.phase) for _, c in unmatched}
    for level in LEVELS:
        for phase in {c.phase for _, c in unmatched}:
            above = [l for l in LEVELS if FINEST[l] < FINEST[level] and matched_levels[l]]
            coarser[level, phase] = bool(above) and (above[-1], phase) not in broken
    matched_baseline = {j.call.baseline.seq for j in part.judged}
    return [
        (side, call)
        for side, call in unmatched
        if not coarser[call.level, call.phase]
        and not (side == "candidate" and any(a in tree.by_seq for a in tree.ancestors(call.seq)))
        and not (side == "baseline" and call.parent in matched_baseline)
    ]


def rank_culprits(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Put the culprits first and leave out what an earlier one explains.

    ``suspects`` are in order of execution, over all steps. Certain ones go before those that could be rounding.
    """
    culprits: list[Suspect] = []
    ordered = _first_of_a_kind(list(suspects))
    for suspect in sorted(ordered, key=lambda s: not s.certain):
        if not suspect.certain and culprits:
            continue
        if not culprits or _is_clean(suspect.judged):
            culprits.append(suspect)
    return culprits


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
