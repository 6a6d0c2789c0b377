"""The history of a GradScaler, and when it is a finding of its own.

A scale that starts too large is halved in the first steps until it fits, which is how it is meant to be (PyTorch's documentation of
GradScaler: "the first few iterations may be skipped"). After the first step that was not skipped, a healthy scale falls about
once in
``growth_interval`` (2000) steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from trueup.analysis.anomalies.describing import step_of
from trueup.comparison.graph.streams import Stream
from trueup.foundation.facts.anomaly import Anomaly, Place, ScaleStep
from trueup.foundation.facts.operators import having

OFTEN = 3
SHARE = 0.05
"""After the first good step: so many skipped ones, and more than this share of the steps, are often; a hundred times the
healthy rate."""
LEAST = 1.0
"""A scale at or below which the smallest gradients of float16 are lost: no scale at all."""


def scale_steps(stream: Stream) -> tuple[ScaleStep, ...]:
    """Return what a GradScaler did in a step, one entry an optimizer: its scale, and whether the step was skipped."""
    found = []
    for call in np.flatnonzero(stream.names.table(having("scaler"))[stream.op]).tolist():
        scale, overflow = None, False
        for k in range(*stream.starts[call : call + 2].tolist()):
            name = stream.names.name(int(stream.slot[k])) or ""
            if name == "input.scale" and stream.numel[k]:
                scale = float(stream.l2[k])  # of one element, which is positive
            elif name.startswith("input.found_inf"):
                overflow = overflow or bool(stream.l2[k] > 0)
        said = _object(stream.value(int(stream.arguments[call])))
        known = said.get("scale", scale)
        skipped = bool(said.get("skipped", overflow))
        if isinstance(known, (int, float)):
            op = stream.names.name(int(stream.op[call])) or ""
            found.append(ScaleStep(step_of(stream), stream.rank, float(known), skipped, op))
    return tuple(found)


def scale_findings(history: Sequence[ScaleStep], found: Sequence[Anomaly]) -> list[Anomaly]:
    """Return an anomaly if the scale fell often or to 1, with the calls that caused it.

    Args:
        history: of all ranks and steps.
        found: anomalies of the run, to name the first of each skipped step.
    """
    ranks = sorted({one.rank for one in history})
    if not ranks:
        return []
    mine = [one for one in history if one.rank == ranks[0]]  # all ranks agree on the scale, or they would train apart
    skipped = [one for one in mine if one.skipped]
    first_good = next((k for k, one in enumerate(mine) if not one.skipped), len(mine))
    late = [one for one in mine[first_good:] if one.skipped]
    lowest = min(one.scale for one in mine)
    often = len(late) >= OFTEN and len(late) > SHARE * len(mine[first_good:])
    fallen = lowest <= LEAST and bool(skipped)
    if not often and not fallen:
        return []
    steps = {one.step for one in skipped}
    causes = [one for one in found if {one.place.step, *one.again} & steps]
    return [_finding(mine, skipped, lowest, causes, fallen)]


def _finding(
    mine: Sequence[ScaleStep], skipped: Sequence[ScaleStep], lowest: float, causes: Sequence[Anomaly], fallen: bool
) -> Anomaly:
    first = (skipped or mine)[0]
    place = Place(first.rank, first.step, -1, "optimizer", "api", "", first.op, 0)
    many = f"skipped {len(skipped)} of {len(mine)} steps"
    what = f"the loss scale keeps falling (it is {mine[-1].scale:g} now)"
    if fallen:
        what = f"the loss scale fell from {mine[0].scale:g} to {lowest:g}"
    named = "; ".join(
        f"{', '.join(f'step {s}' for s in (one.place.step, *one.again)[:4])}: {one.place.scope or one.place.op} ({one.place.op})"
        for one in causes[:4]
    )
    told = f"; what overflowed: {named}" if named else "; which call overflowed was not recorded in those steps"
    return Anomaly(
        "loss_scale", place, "high", f"{what} and {many}{told}", reached=("gradients",), matters="accuracy-relevant",
        because="steps that are skipped train nothing, and a scale of 1 or less loses the small gradients of float16",
        again=tuple(one.step for one in skipped[1:]), policy=next((one.policy for one in causes if one.policy), ""),
    )  # fmt: skip


def _object(text: str | None) -> dict[str, Any]:
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
