"""Several ranks: bad numbers that came in through a collective are the doing of the rank that gave them.

A collective is the same call on all its members: same step, operator, ordinal and group. Where a rank got bad numbers of clean
ones, one
that was recorded and gave bad ones is where they come from; where none gave any, the communication made them (a sum in float16
overflows); where a member was not recorded, it cannot be told.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from trueup.foundation.facts.anomaly import Anomaly, Crossing, StepAnomalies

Key = tuple[int, str, str, int, "str | None"]


def across_ranks(judged: Sequence[StepAnomalies], world_size: int) -> list[StepAnomalies]:
    """Return the steps with collectives explained: an anomaly that another rank explains is dropped, with its source told.

    Args:
        judged: of all ranks and steps.
        world_size: how many ranks there were; more than were recorded means that a giver may be missing.
    """
    recorded = {one.rank for one in judged}
    crossings: defaultdict[Key, list[tuple[StepAnomalies, Crossing]]] = defaultdict(list)
    for step in judged:
        for one in step.collectives:
            crossings[(step.step, one.level, one.op, one.ordinal, one.ranks)].append((step, one))
    dropped: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    notes: defaultdict[tuple[int, int, int], list[str]] = defaultdict(list)
    for members in crossings.values():
        givers = [(step, one) for step, one in members if one.given]
        for step, one in members:
            if one.given or one.anomaly < 0:
                continue
            if givers:
                dropped[step.rank, step.step].add(one.anomaly)
                for giver, other in givers:
                    for place in _given_by(giver, other):
                        notes[giver.rank, giver.step, place].append(f"rank {step.rank}")
            elif len(recorded) < world_size:
                text = f"{world_size - len(recorded)} of {world_size} ranks were not recorded: one of them may have given it"
                notes[step.rank, step.step, one.anomaly].append(text)
    return [_explained(step, dropped[step.rank, step.step], notes) for step in judged]


def _given_by(step: StepAnomalies, crossing: Crossing) -> list[int]:
    """Return the anomalies of a rank that may be in what it gave: a bucket of gradients holds those of many calls."""
    harmful = {"loss", "gradients", "other ranks", "parameters"}
    return [n for n, one in enumerate(step.anomalies) if one.place.seq < crossing.seq and harmful & set(one.reached)]


def _explained(
    step: StepAnomalies, dropped: set[int], notes: dict[tuple[int, int, int], list[str]]
) -> StepAnomalies:
    found: list[Anomaly | None] = []
    for place, one in enumerate(step.anomalies):
        told = notes.get((step.rank, step.step, place), [])
        ranks = list(dict.fromkeys(text for text in told if text.startswith("rank ")))
        others = [text for text in dict.fromkeys(told) if not text.startswith("rank ")]
        if ranks:
            others.append(f"through a collective it reached {', '.join(ranks[:8])}{' and more' if len(ranks) > 8 else ''}")
        found.append(None if place in dropped else dataclasses.replace(one, notes=(*one.notes, *others)))
    return dataclasses.replace(step, anomalies=tuple(found))  # type: ignore[arg-type]  # places stay what they are
