"""From step to step: the weights and buffers that a step read, the bad numbers that it wrote into them, a GradScaler's history.

A scale that keeps falling is a finding of its own. One that starts too large is halved in the first steps, as intended (PyTorch's
documentation of GradScaler: "the first few iterations may be skipped"). After the first step that was not skipped, a healthy
scale falls about once in ``growth_interval`` (2000) steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.anomalies.effects import step_of
from trueup.comparison.graph.streams import Array, Numbers, Stream
from trueup.foundation.facts.anomaly import Anomaly, Place, ScaleStep
from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.operators import having
from trueup.foundation.facts.slots import is_input
from trueup.foundation.kernels.sketch import splitmix64
from trueup.foundation.store.columns import Vocabulary

JUMP = 1e3
"""Growth of a weight's root mean square in one step that makes the step bad; zero weights count as 1. Adam moves a weight by
about its learning rate (Kingma and Ba 2015, section 2.1), SGD by lr times gradient: no converging training grows a thousandfold."""


@dataclass(slots=True)
class Lasting:
    """Tensors that a step's forward calls read. All of them, as the first step of a model made inside a capture makes weights."""

    keys: NDArray[np.uint64]  # sorted: level, scope, operator, ordinal and slot, as one number
    rms: Array
    numel: Array

    def before(self, keys: NDArray[np.uint64], numel: Array) -> Array:
        """Return the root mean square that each of these had, NaN where it was not read or had another size."""
        if not len(self.keys):
            return np.full(len(keys), np.nan)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where((self.keys[at] == keys) & (self.numel[at] == numel), self.rms[at], np.nan)


@dataclass(slots=True)
class Memory:
    """Of one rank, from step to step; give it to `classify` with each step in turn."""

    names: Vocabulary = field(default_factory=Vocabulary)
    values: Vocabulary = field(default_factory=Vocabulary)
    lasting: Lasting | None = None
    stream: Stream | None = None  # the step before
    # Bad ``(seq, slot)`` of an optimizer -> step and place of its anomaly
    written: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    pending: list[tuple[int, int]] = field(default_factory=list)  # anomalies whose bad numbers reached gradients or weights


def read_slots(stream: Stream) -> Numbers:
    """Return the floating slots that forward calls read."""
    forward = (stream.phase == stream.names.number("forward"))[stream.call]
    floating = stream.names.table(_is_float)[stream.dtype]
    read = stream.names.table(is_input)[stream.slot] & forward & floating & stream.measured
    return np.asarray(np.flatnonzero(read), np.int64)


def lasting_slots(stream: Stream, slots: Numbers) -> Numbers:
    """Return the slots, of those given, that no call of the step made."""
    return slots[stream.producers[slots] < 0]


def keys_of(stream: Stream, slots: Numbers) -> NDArray[np.uint64]:
    """Return a number for the name of each slot, the same in every step."""
    calls = stream.call[slots]
    found = np.zeros(len(slots), np.uint64)
    for column in (stream.level[calls], stream.scope[calls], stream.op[calls], stream.ordinal[calls], stream.slot[slots]):
        found = splitmix64(found ^ column.astype(np.uint64))
    return found


def rms_of(stream: Stream, slots: Numbers) -> Array:
    """Return the root mean square of slots."""
    return np.asarray(stream.l2[slots] / np.sqrt(np.maximum(stream.numel[slots], 1)))


def remember(stream: Stream, slots: Numbers) -> Lasting:
    """Keep what the forward calls of a step read."""
    keys = keys_of(stream, slots)
    order = np.argsort(keys, kind="stable")
    return Lasting(keys[order], rms_of(stream, slots)[order], stream.numel[slots][order])


def grown(stream: Stream, slots: Numbers, before: Lasting | None) -> dict[int, float]:
    """Return how many times larger lasting tensors are than in the step before, of those that grew `JUMP` times."""
    if before is None or not len(slots):
        return {}
    now, was = rms_of(stream, slots), before.before(keys_of(stream, slots), stream.numel[slots])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = now / np.where(was > 0, was, 1.0)
    found = np.flatnonzero(~np.isnan(was) & (ratio >= JUMP))
    return dict(zip(slots[found].tolist(), ratio[found].tolist(), strict=True))


def _is_float(dtype: str) -> bool:
    return "float" in dtype


OFTEN = 3
SHARE = 0.05
"""After the first good step, `OFTEN` or more skipped steps and more than this share are often: a hundred times the healthy rate."""
LEAST = 1.0  # a scale at or below which the smallest gradients of float16 are lost: no scale at all


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
        said = decoded(stream.value(int(stream.arguments[call])))
        known = said.get("scale", scale)
        skipped = bool(said.get("skipped", overflow))
        if isinstance(known, (int, float)):
            op = stream.names.name(int(stream.op[call])) or ""
            found.append(ScaleStep(step_of(stream), stream.rank, float(known), skipped, op))
    return tuple(found)


def scale_findings(history: Sequence[ScaleStep], found: Sequence[Anomaly]) -> list[Anomaly]:
    """Return an anomaly if the scale, of all ranks and steps, fell often or to 1, with the calls in ``found`` that caused it."""
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
