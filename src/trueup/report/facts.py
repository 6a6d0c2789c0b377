"""What several formats show of a result, prepared once: slots in rows, losses and environments side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trueup.model import Finding, Result, SlotComparison, TensorStats
from trueup.report.sentence import changed_arguments
from trueup.report.wording import number, one_line, sci, shorten

METHODS = {
    "digest": "bitwise equal",
    "tensor": "measured",
    "sketch": "estimated, about ±18 %",
    "value": "compared by value",
    "none": "not measured",
}
"""How an error was found, in words; origin of the ±18 %: 64 signed sums, see ``trueup.model.LANES``."""


@dataclass(frozen=True, slots=True)
class SideRow:
    """The numbers of one slot on one side (``both`` where they are equal)."""

    side: str
    numbers: tuple[str, ...]
    """min, max, mean, l2; or the one value of an argument."""
    remark: str
    """``12 NaN, 1 inf``, or nothing."""


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot of a culprit, with a row per side."""

    slot: str
    state: str
    tensor: str
    """``float32 [8, 16]``, with an arrow where the sides differ."""
    error: str
    method: str
    reason: str
    sides: tuple[SideRow, ...]


@dataclass(frozen=True, slots=True)
class LossRow:
    """The loss of one step in both runs; ``difference`` is relative to the baseline's."""

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
    """Prepare the slots of a finding, deviating ones where they stand in the call."""
    return [_slot_row(slot) for slot in finding.slots]


def loss_rows(result: Result) -> list[LossRow]:
    """Join the losses of both runs by step; of several losses in a step the last is taken."""
    before, after = dict(result.baseline.losses), dict(result.candidate.losses)
    return [LossRow(step, before.get(step), after.get(step)) for step in sorted(before.keys() | after.keys())]


def environment_rows(result: Result) -> list[tuple[str, str, str, bool]]:
    """Return ``(name, baseline, candidate, differs)``, differing rows first."""
    before, after = result.baseline.environment, result.candidate.environment
    rows = [
        (name, before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys(), key=str.lower)
    ]
    return sorted(((*row, row[1] != row[2]) for row in rows), key=lambda row: not row[3])


def loss_lines(rows: Sequence[LossRow]) -> list[tuple[str, str, str, str]]:
    """Write losses as ``(step, baseline, candidate, difference)``, all with the same number of decimals."""
    write = _writer([value for row in rows for value in (row.baseline, row.candidate) if value is not None])
    return [
        (f"{row.step:,}", write(row.baseline), write(row.candidate), difference_text(row.difference)) for row in rows
    ]


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


def remark(stats: TensorStats) -> str:
    """Count what is not finite: ``12 NaN, 1 inf``."""
    special = [(stats.n_nan, "NaN"), (stats.n_posinf, "inf"), (stats.n_neginf, "-inf"), (stats.n_saturated, "at max")]
    return ", ".join(f"{count:,} {name}" for count, name in special if count)


def numbers(stats: TensorStats) -> tuple[str, ...]:
    """Write min, max, mean and l2."""
    return tuple(number(value) for value in (stats.min, stats.max, stats.mean, stats.l2))


def _slot_row(slot: SlotComparison) -> SlotRow:
    tensor = " ".join(part for part in (_pair(slot.dtype), _pair(slot.shape)) if part)
    error = "" if slot.method in ("value", "none") else "0" if slot.method == "digest" else sci(slot.relative_l2)
    if slot.method not in ("value", "digest") and math.isnan(slot.relative_l2):
        error = "?"
    if slot.method == "value" and slot.state != "equal":
        return SlotRow(one_line(slot.slot), slot.state, tensor, "", slot.method, one_line(slot.reason), _changes(slot))
    return SlotRow(
        one_line(slot.slot), slot.state, tensor, error, slot.method, one_line(slot.reason), tuple(_sides(slot))
    )


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
