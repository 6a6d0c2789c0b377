"""The loss scale over all steps of a run, kept where it changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from trueup.analysis.anomalies.scaling import LEAST, OFTEN, SHARE

MOST = 10_000
"""Entries that are kept; of a run that has more the first and the last half."""


@dataclass(slots=True)
class LossScale:
    """``changes`` are ``(step, scale with which it ran, whether its optimizer step was skipped)``, of steps that were skipped or
    whose scale is not that of the entry before."""

    changes: list[tuple[int, float, bool]] = field(default_factory=list)
    skipped: int = 0
    steps: int = 0
    lowest: float = float("inf")
    since_good: int = 0
    """Steps from the first one on that was not skipped: until then a scale is looking for its size."""
    late: int = 0
    """Skipped ones among those."""

    @property
    def failing(self) -> bool:
        """Whether the scale fell often or to 1, by the rule of `trueup.analysis.anomalies.scaling`."""
        often = self.late >= OFTEN and self.late > SHARE * self.since_good
        return often or (self.lowest <= LEAST and self.skipped > 0)

    def add(self, step: int, scale: float, *, skipped: bool) -> None:
        """Note a step of a scaler."""
        self.steps += 1
        self.skipped += skipped
        self.lowest = min(self.lowest, scale)
        if self.since_good or not skipped:
            self.since_good += 1
            self.late += skipped
        if skipped or not self.changes or self.changes[-1][1] != scale:
            self.changes.append((step, scale, skipped))
            if len(self.changes) > MOST:
                del self.changes[MOST // 2]

    def sentence(self) -> str:
        """Say what became of it."""
        if not self.changes:
            return ""
        first, last = self.changes[0], self.changes[-1]
        lowest = min(self.changes, key=lambda entry: entry[1])
        return (
            f"loss scale {first[1]:g} at step {first[0]}, {last[1]:g} at step {last[0]}, lowest {lowest[1]:g} at step {lowest[0]}; "
            f"{self.skipped} of {self.steps} steps skipped"
        )
