"""What several formats show of a result, prepared once: slots in rows, losses and environments side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.foundation.model import Finding, Neighbour, Result, SlotComparison, TensorStats
from trueup.foundation.words.sentence import PARTIAL, changed_arguments
from trueup.foundation.words.wording import call_name, number, one_line, sci, shorten

METHODS = {
    "digest": "bitwise equal",
    "tensor": "measured",
    "sketch": "estimated, about ±18 %",
    "statistics": "by max, min, mean and norm",
    "value": "compared by value",
    "none": "not measured",
}
"""How an error was found, in words; origin of the ±18 %: 64 signed sums, see ``trueup.foundation.model.LANES``."""


DIGITS = 9  # significant digits of an element: enough to tell two float32 apart (IEEE 754-2019, 5.12.2)


@dataclass(frozen=True, slots=True)
class SideRow:
    """The numbers of one slot on one side (``both`` where they are equal)."""

    side: str
    numbers: tuple[str, ...]  # min, max, mean, l2; or the one value of an argument
    remark: str  # ``12 NaN, 1 inf``, or nothing


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot of a culprit, with a row per side."""

    slot: str
    state: str
    tensor: str  # ``float32 [8, 16]``, with an arrow where the sides differ
    error: str
    method: str
    reason: str
    sides: tuple[SideRow, ...]


@dataclass(frozen=True, slots=True)
class StepRow:
    """A number of one step (loss, gradient norm) in both runs; ``difference`` is relative to the baseline's."""

    step: int
    baseline: float | None
    candidate: float | None

    @property
    def difference(self) -> float | None:
        """``(candidate − baseline) / |baseline|``, or None where a side is missing or zero."""
        if self.baseline is None or self.candidate is None:
            return None
        if self.baseline == self.candidate:
            return 0.0
        return (self.candidate - self.baseline) / abs(self.baseline) if self.baseline else None


def slot_rows(finding: Finding) -> list[SlotRow]:
    """Prepare the slots of a finding, those of a kind in order: ``grad_input.2`` before ``grad_input.10``."""
    kinds = list(dict.fromkeys(slot.slot.partition(".")[0] for slot in finding.slots))

    def place(slot: SlotComparison) -> tuple[int, list[tuple[int, str]]]:
        return kinds.index(slot.slot.partition(".")[0]), _numbered(slot.slot)

    return [slot_row(slot) for slot in sorted(finding.slots, key=place)]


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return what sorts a name by its numbers: each by its length first."""
    parts = re.split(r"([0-9]+)", name)
    return [(len(part.lstrip("0")) if part.isdecimal() else 0, part) for part in parts]


def loss_rows(result: Result) -> list[StepRow]:
    """Join the losses of both runs by step; of several losses in a step the last is taken."""
    return _by_step(result.baseline.losses, result.candidate.losses)


CITED = 10  # steps from which on losses are a curve


def loss_remark(result: Result) -> str:
    """Say what the losses of two captures show along the steps, and what would tell more; nothing of a few steps."""
    before, after = dict(result.baseline.losses), dict(result.candidate.losses)
    steps = sorted(before.keys() & after.keys())
    if len(steps) < CITED:
        return ""
    import numpy as np  # text needs no numbers, and most of what renders text has none

    from trueup.analysis.curves import statistics

    b, c = (np.array([side[step] for step in steps], np.float64) for side in (before, after))
    exact = statistics.parts(b, c)
    if exact is None:
        return f"all {len(steps)} losses are the same number"
    said = f"the numbers are the same before step {steps[exact]:,}" if exact else "the numbers differ from the first step on"
    drawn = (np.log(b), np.log(c)) if (b > 0).all() and (c > 0).all() else (b, c)
    beyond = statistics.leaves(drawn[1], statistics.band(drawn[0][None])) if np.isfinite(b).all() else None
    if beyond is not None:
        said += f"; from step {steps[beyond]:,} on they are further apart than the baseline's own noise from step to step"
    last = slice(len(b) - len(b) // CITED, None)
    apart = StepRow(0, float(b[last].mean()), float(c[last].mean())).difference
    end = "" if apart is None else f"; the last tenth is {difference_text(apart)} off"
    return f"{said}{end}. Repeats with other seeds tell whether that is chance: trueup curves BASE... -- CAND..."


def norm_rows(result: Result) -> list[StepRow]:
    """Join the gradient norms of both runs by step."""
    return _by_step(result.baseline.gradient_norms, result.candidate.gradient_norms)


SEEN = 0.05
"""Relative difference from which two curves that are drawn lie apart."""


def sameness(rows: Sequence[StepRow]) -> str:
    """Say of two curves that look like one how far apart they are where that cannot be drawn; nothing where it can."""
    if all(row.difference == 0 for row in rows):
        return "the same number in both runs at each step"
    return "" if _apart(rows) else "at no step have both runs a finite number of their own, so no difference is drawn"


def coincide(rows: Sequence[StepRow]) -> bool:
    """Tell whether two curves lie on each other when they are drawn, and differ."""
    return 0 < max(_apart(rows), default=0) < SEEN


def _apart(rows: Sequence[StepRow]) -> list[float]:
    return [abs(row.difference) for row in rows if row.difference and math.isfinite(row.difference)]


def norm_remarks(result: Result) -> list[str]:
    """Say which gradients the norms are of, or why a run has none; one line where both runs agree."""
    sources = result.baseline.gradient_source, result.candidate.gradient_source
    if sources[0] == sources[1]:
        return [sources[0]] if sources[0] else []
    return [f"{side}: {source}" for side, source in zip(("baseline", "candidate"), sources, strict=True) if source]


def partial_norms(result: Result) -> list[str]:
    """Say which gradients the norms are of where some are left out, so that they are less than what a script prints."""
    return [remark for remark in norm_remarks(result) if remark.partition("; mean")[0].endswith(PARTIAL)]


def _by_step(first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]]) -> list[StepRow]:
    before, after = dict(first), dict(second)
    return [StepRow(step, before.get(step), after.get(step)) for step in sorted(before.keys() | after.keys())]


def environment_rows(result: Result) -> list[tuple[str, str, str, bool]]:
    """Return ``(name, baseline, candidate, differs)``, differing rows first."""
    before, after = result.baseline.environment, result.candidate.environment
    rows = [(name, before.get(name, ""), after.get(name, "")) for name in sorted(before.keys() | after.keys(), key=str.lower)]
    return sorted(((*row, row[1] != row[2]) for row in rows), key=lambda row: not row[3])


def loss_lines(rows: Sequence[StepRow]) -> list[tuple[str, str, str, str]]:
    """Write losses as ``(step, baseline, candidate, difference)``, all with the same number of decimals."""
    write = _writer([value for row in rows for value in (row.baseline, row.candidate) if value is not None])
    return [(f"{row.step:,}", write(row.baseline), write(row.candidate), difference_text(row.difference)) for row in rows]


def step_lines(result: Result) -> list[dict[str, Any]]:
    """Join losses and gradient norms: ``{"step": 3, "loss": lines, "norm": lines}``, lines as in `loss_lines`, None: none."""
    joined: dict[int, dict[str, Any]] = {}
    for name, rows in (("loss", loss_rows(result)), ("norm", norm_rows(result))):
        for row, line in zip(rows, loss_lines(rows), strict=True):
            joined.setdefault(row.step, {"step": row.step, "loss": None, "norm": None})[name] = line[1:]
    return [joined[step] for step in sorted(joined)]


def policy_lines_of(result: Result) -> list[tuple[str, str]]:
    """Return ``(side, what a rule of its policy changed)`` of both runs."""
    sides = ("baseline", result.baseline), ("candidate", result.candidate)
    return [(side, line) for side, run in sides for line in run.policy]


def producers(finding: Finding) -> list[tuple[str, str, str]]:
    """Return ``(input slot, call that made it, on which side)`` of the inputs whose producers were recorded."""
    if finding.evidence is None:
        return []
    nodes = finding.evidence.nodes
    found: dict[tuple[str, str, str], None] = {}
    for edge in finding.evidence.edges:
        if nodes[edge.target].hops == 0:
            maker = nodes[edge.source]
            name = call_name(maker.scope, maker.op, maker.ordinal)
            found[one_line(edge.slots[1]), name, "" if edge.side == "both" else edge.side] = None
    return list(found)


def _writer(values: Sequence[float]) -> Callable[[float | None], str]:
    """Choose one form for a column: fixed point while the smallest keeps four digits, else exponents."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    small, large = min(sizes, default=1.0), max(sizes, default=1.0)
    decimals = max(0, 5 - math.floor(math.log10(large)))
    fixed = large < 1e6 and small * 10**decimals >= 1e3

    def write(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.{decimals}f}" if fixed and math.isfinite(value) else number(value, 6)

    return write


def difference_text(value: float | None) -> str:
    """Write a relative difference, signed; ``equal`` for none at all."""
    if value is None:
        return "–"
    if value == 0:
        return "equal"
    return ("+" if value > 0 else "") + sci(value)


def worst_lines(finding: Finding) -> list[tuple[str, str, str, str, str, str]]:
    """Write the worst elements as ``(slot, index, baseline, candidate, difference, ulps)``."""
    elements = finding.evidence.worst if finding.evidence is not None else ()
    return [
        (
            one_line(element.slot),
            f"[{', '.join(map(str, element.index))}]",
            number(element.baseline, DIGITS),
            number(element.candidate, DIGITS),
            number(element.candidate - element.baseline),
            ulps_text(element.ulps),
        )
        for element in elements
    ]


def ulps_text(ulps: float) -> str:
    """Write a distance in units in the last place: ``3``, ``12,609,989``, ``1.2e9``."""
    if not math.isfinite(ulps):
        return "–"
    return f"{ulps:,.0f}" if ulps < 1e9 else sci(ulps)


def neighbour_lines(finding: Finding) -> list[tuple[str, str, str]]:
    """Say between which calls an unmatched one stands: ``("after", "neck/aten::mm#0", "812 in the baseline, …")``."""
    words = {-1: "after", 1: "before"}
    return [
        (words[near.hops], call_name(near.scope, near.op, near.ordinal), _counterparts(near))
        for near in finding.neighbours
        if near.hops in words
    ]


def _counterparts(near: Neighbour) -> str:
    if near.side != "both":
        return f"{max(near.seq):,}, only in the {near.side} too"
    return f"{near.seq[0]:,} in the baseline, {near.seq[1]:,} in the candidate"


def remark(stats: TensorStats) -> str:
    """Count what is not finite: ``12 NaN, 1 inf``."""
    special = [(stats.n_nan, "NaN"), (stats.n_posinf, "inf"), (stats.n_neginf, "-inf"), (stats.n_saturated, "at max")]
    return ", ".join(f"{count:,} {name}" for count, name in special if count)


def numbers(stats: TensorStats) -> tuple[str, ...]:
    """Write min, max, mean and l2."""
    return tuple(number(value) for value in (stats.min, stats.max, stats.mean, stats.l2))


def slot_row(slot: SlotComparison) -> SlotRow:
    """Prepare one slot."""
    tensor = " ".join(part for part in (_pair(slot.dtype), _pair(slot.shape)) if part)
    error = "" if slot.method in ("value", "none") else "0" if slot.method == "digest" else sci(slot.relative_l2)
    if slot.method not in ("value", "digest") and math.isnan(slot.relative_l2):
        error = "?"
    if slot.method == "value" and slot.state != "equal":
        return SlotRow(one_line(slot.slot), slot.state, tensor, "", slot.method, one_line(slot.reason), _changes(slot))
    return SlotRow(one_line(slot.slot), slot.state, tensor, error, slot.method, one_line(slot.reason), tuple(_sides(slot)))


def _changes(slot: SlotComparison) -> tuple[SideRow, ...]:
    """Show only the arguments that differ, each with its name."""
    changes = changed_arguments(slot)
    sides = (("baseline", 1), ("candidate", 2))
    return tuple(SideRow(side, (), ", ".join(f"{change[0]} = {change[k]}" for change in changes)) for side, k in sides)


def _sides(slot: SlotComparison) -> Sequence[SideRow]:
    if slot.state == "equal":
        return [_side("both", slot.baseline)] if slot.baseline is not None else []
    return [_side("baseline", slot.baseline), _side("candidate", slot.candidate)]


def _side(side: str, held: TensorStats | str | None) -> SideRow:
    if isinstance(held, TensorStats):
        return SideRow(side, numbers(held), remark(held))
    return SideRow(side, (), shorten(one_line(held), 200) if held is not None else "absent")


def _pair(pair: tuple[str, str]) -> str:
    before, after = map(one_line, pair)
    return before if before == after else f"{before or 'none'} → {after or 'none'}"
