"""Rows in memory to the classifier of `trueup.analysis.anomalies`, and its answer to what a watch counts."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from trueup.analysis.anomalies import Anomaly, Memory, StepAnomalies, classify
from trueup.foundation.store.schema import filled
from trueup.recording.recorder import Call
from trueup.recording.recorder.columns import parts
from trueup.recording.recorder.rows import FIELDS, Rows
from trueup.recording.recorder.sites import Sites

FOLLOWS = "follows"
"""Kind of a hit that a hit of the step before explains: its weights hold what that step gave."""


@dataclass(frozen=True, slots=True)
class Found:
    """A call that matters."""

    kind: str
    """Kind of the anomaly, or `FOLLOWS`."""
    call: Call
    said: str
    """One sentence, with the name of the call."""
    counted: bool
    """Whether it is a hit: not where all that read it healed it, nor in a step that a GradScaler skipped."""


def found_in(rows: Rows, before: Rows, rank: int, sites: Sites, *, skipped: bool) -> list[Found]:
    """Judge a step.

    Args:
        rows: of the step, statistics on the host.
        before: of the step before, which tells how weights grew and what they hold since.
        rank: of this process.
        sites: the call stacks.
        skipped: whether a GradScaler skips the optimizer's step.
    """
    memory = Memory()
    stacks = sites.known()
    if before:
        classify(_table(before, rank), memory, sites=stacks)
    judged = classify(_table(rows, rank), memory, sites=stacks)
    calls = {call.seq: call for call in rows[1::FIELDS]} | {call.seq: call for call in before[1::FIELDS]}
    found = [
        Found(one.kind, calls[one.place.seq], one.sentence, _counts(one) and not skipped)
        for one in judged.anomalies
        if one.place.seq in calls
    ]
    return found or _following(judged, rows, skipped=skipped)


def _counts(one: Anomaly) -> bool:
    return not one.transient


def _following(judged: StepAnomalies, rows: Rows, *, skipped: bool) -> list[Found]:
    """Return the hit of a step whose weights were bad before it, because of the step before."""
    if not judged.follows or skipped:
        return []
    first: Call = rows[1]
    step = judged.follows[0][0]
    said = f"step {judged.step}, rank {judged.rank}: bad from its first call on, because of step {step}"
    return [Found(FOLLOWS, first, said, True)]


def _table(rows: Rows, rank: int) -> pa.Table:
    ((step, table),) = parts(rows, [None] * (len(rows) // FIELDS)).items()
    return filled(table, step=step, rank=rank).sort_by("seq")
