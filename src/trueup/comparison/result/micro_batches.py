"""A step's gradient that is one micro-batch's alone: what the others made was lost before the optimizer ran.

    for batch in batches:                       the optimizer is given the gradient of words.weight of micro-batch 2 of 2 alone:
        optimizer.zero_grad()                   those of the others are lost
        (loss(batch) / 2).backward()
    optimizer.step()

Each micro-batch's backward returns a term of a weight's gradient; ranks that reduce it make the sum or the mean of all of theirs.
Held against the terms of each micro-batch, all ranks' put together, what the optimizer reads is a multiple of one of them, and that
of no other. The sum of several terms that are none of one another's multiples is a multiple of none. In a pipeline a stage that
makes no gradient of a micro-batch shows by its calls: the next stage, which read what it made, sends it the gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from trueup.comparison.layout.calls import Key
from trueup.comparison.layout.geometry import geometry_of
from trueup.comparison.layout.gradients import elements, multiple
from trueup.comparison.layout.inferring import Ways
from trueup.comparison.layout.joined import Joined
from trueup.comparison.layout.pieces import Array, Piece, put_together
from trueup.comparison.layout.standing import MICRO, standing_of
from trueup.foundation.model import Result
from trueup.foundation.store import Capture
from trueup.foundation.words.sentence import verdict_lines
from trueup.foundation.words.setup_sentence import not_gone_through, one_micro_batch

FEWEST = 8
"""Elements of a gradient from which on it is held against terms: two random directions of 8 dimensions are within an angle of
`FACTOR` of one line with a probability below 1e-12, the share of the sphere that two such caps cover."""

LEAST = 0.5
"""Norm of a term, relative to the one that was read, from which on a sum of both that is nearly a multiple of one is nearly one of
the other, too: an expert that few tokens were sent to in one micro-batch proves nothing."""


def with_lost(result: Result, captures: tuple[Capture, Capture], passes: Mapping[int, int], shown: str) -> Result:
    """Return a result whose first culprit says that gradients of micro-batches are lost, if the candidate's are and the baseline's
    are not. ``passes``: how often the candidate goes backward in each step, on all ranks; ``shown``: what was said of that."""
    first = result.culprits[0] if result.culprits else None
    once = first is not None and passes.get(first.step, 0) <= len(captures[1].ranks)  # else some rank does so twice
    if first is None or (once and not isinstance(captures[1], Joined)):
        return result
    told = lost(captures[1], first.step)
    if not told or lost(captures[0], first.step):
        return result
    before = first.cause
    cause = told if first.phase == "optimizer" or before in ("", shown) else f"{before}; {told}"
    culprits = [dataclasses.replace(first, cause=cause), *result.culprits[1:]]
    if before and before in result.sentence:
        return dataclasses.replace(result, culprits=culprits, sentence=result.sentence.replace(before, cause, 1))
    notes = result.notes
    lines = verdict_lines(result.verdict, culprits, result.victims, result.unmatched, notes, result.counts, result.occurrences)
    return dataclasses.replace(result, culprits=culprits, sentence="\n".join(lines))


def lost(capture: Capture, step: int) -> str:
    """Say of a run that in a step its optimizer is given the gradients of one micro-batch alone, or that a stage of a pipeline goes
    backward through fewer than the next; empty of others."""
    run = capture if isinstance(capture, Joined) else Joined(capture, standing_of(capture, geometry_of(capture)))
    if run.standing.stages and (told := _not_gone_through(run.original, step)):
        return told
    if MICRO not in run.workers.axes or (0, step) not in run.sizes:
        return ""
    held = run.step(step)
    found: dict[tuple[Key, str], tuple[int, str]] = {}
    for at, made in held.read.items():
        piece = held.slots.get(at) if made in held.terms and made not in found else None
        alone = None if piece is None else _alone(piece, _by_micro_batch(run, held.ways[made], held.terms[made]))
        if alone is not None:
            found[made] = alone, held.updated.get(at[0]) or f"{made[0][2] or made[0][3]} ({made[1].removeprefix('grad_')})"
    for weight, piece in held.gradients.items():
        maker = held.makers.get(weight)
        if maker is None or maker not in held.terms or maker in found:
            continue
        alone = _alone(piece, _by_micro_batch(run, held.ways[maker], held.terms[maker]))
        if alone is not None:
            found[maker] = alone, weight
    which = {alone for alone, _ in found.values()}
    if len(which) != 1 or -1 in which:
        return ""
    return one_micro_batch([name for _, name in found.values()], which.pop() + 1, run.standing.passes)


def _not_gone_through(capture: Capture, step: int) -> str:
    """Say of a pipeline that a rank does not go backward through a micro-batch whose gradient a rank sends that went on from it.
    Where stages are asked for their shapes first, with a micro-batch that comes again, some go backward then, and send nothing."""
    calls = {rank: _modules(capture, rank, step) for rank in capture.ranks}
    for rank, mine in calls.items():
        came = {row["digest"] for row in capture.records(["digest"], rank=rank, step=step, phase="collective").to_pylist()} - {None}
        behind = [one for other, its in calls.items() if other != rank for one in its if one.back & came]
        read = {told for one in behind for told in one.given}
        done = {told for one in mine if one.back for told in one.made}
        heads: dict[tuple[str, str], list[_Module]] = {}
        for one in mine:
            if one.made & read and (one.back or not one.made & done):
                heads.setdefault(one.head, []).append(one)
        for sent in heads.values():
            missing = [n + 1 for n, one in enumerate(sent) if not one.back]
            if missing and len(missing) < len(sent):
                return not_gone_through(rank, missing, len(sent))
    return ""


@dataclasses.dataclass
class _Module:
    """A forward call of a module: the bytes that it is given and makes, and those of its backward, if one goes through it."""

    head: tuple[str, str]
    given: set[str] = dataclasses.field(default_factory=set)
    made: set[str] = dataclasses.field(default_factory=set)
    back: set[str | None] = dataclasses.field(default_factory=set)


def _modules(capture: Capture, rank: int, step: int) -> list[_Module]:
    found: dict[int, _Module] = {}
    columns = ["seq", "phase", "scope", "op", "slot", "digest", "forward_seq"]
    for row in capture.records(columns, rank=rank, step=step, level="module").to_pylist():
        if row["phase"] == "forward":
            one = found.setdefault(row["seq"], _Module((row["scope"], row["op"])))
            if row["digest"] is not None and row["slot"].startswith(("input.", "output.")):
                (one.given if row["slot"].startswith("input.") else one.made).add(row["digest"])
        elif row["phase"] == "backward" and row["forward_seq"] in found:
            found[row["forward_seq"]].back.add(row["digest"])
    return list(found.values())


def _by_micro_batch(run: Joined, ways: Ways, pieces: Mapping[int, Piece]) -> list[Piece]:
    """Return a gradient's term of each micro-batch, those of all ranks put together; nothing where they make no whole."""
    found: list[Piece] = []
    for number in range(run.standing.passes):
        held = {worker: piece for worker, piece in pieces.items() if worker % run.standing.passes == number}
        for axis, way in ((axis, way) for axis, way in ways.items() if axis != MICRO):
            groups = [some for group in run.workers.along(axis) if (some := [one for one in group if one in held])]
            whole = {some[0]: put_together([held[one] for one in some], way) for some in groups}
            held = {worker: piece for worker, piece in whole.items() if piece is not None}
        if len(held) != 1:
            return []
        found += held.values()
    return found


def _alone(read: Piece, terms: Sequence[Piece]) -> int | None:
    """Return the one term, counted from 0, of which a gradient is a multiple, where the others are no part of it and not small;
    -1 of no term; None where nobody knows. Sketches are linear, so those of multiples are multiples."""
    known = [_vector(one, whole=read.sketch is None) for one in (read, *terms)]
    vectors = [one for one in known if one is not None]
    if read.numel < FEWEST or len(vectors) < len(known) or len(known) < 3:
        return None
    its, *others = vectors
    found = [n for n, one in enumerate(others) if math.isfinite(multiple(one, its)[0])]
    if len(found) != 1:
        return None if found else -1
    norms = [float(np.linalg.norm(one)) for one in others]
    own = norms.pop(found[0])
    return found[0] if max(norms) > LEAST * own else None


def _vector(piece: Piece, *, whole: bool) -> Array | None:
    """Return a piece's sketch, or all of its elements where what was read has none (a part of a flat buffer)."""
    if piece.sketch is not None and not whole:
        return piece.sketch
    return None if piece.load is None else elements(piece.load)
