"""What is found, as frozen facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trueup.foundation.model import TensorStats

NAN, POS, NEG, SAT, CAST = 1, 2, 4, 8, 16
"""What is wrong with the numbers of a slot, as bits: NaN, +Inf, -Inf, the dtype's largest number, an integer cast from an Inf."""

Kind = Literal[
    "nan", "overflow", "saturated", "input", "parameters", "collective", "loss_scale",
    "underflow", "vanishes", "explodes", "would_overflow", "would_underflow",
]  # fmt: skip
"""What happened.

``nan``, ``overflow`` and ``saturated``: a call made NaN, Inf, or the dtype's largest number, of inputs that had none (the origin).
``input``: a tensor that no recorded call made is bad. ``parameters``: an optimizer's step left weights that are bad, or so large
that the next forward pass overflows. ``collective``: bad numbers came from another rank, or arose in the communication itself.
``loss_scale``: a GradScaler fell often or to 1. The rest are about magnitudes.
"""

Severity = Literal["critical", "high", "medium", "low"]
"""``critical``: it reaches loss, gradients, weights or another rank. ``high``: nobody recorded reads it, or it is known to be wrong
by an unknown amount (saturation). ``medium``: healed, or the step was skipped. ``low``: about magnitudes only.
After msprobe's overflow_check, which grades by position (normal input and abnormal output is the worst)."""

Matters = Literal["harmless", "accuracy-relevant", "unknown"]

Reached = Literal["loss", "gradients", "parameters", "other ranks", "unread"]


@dataclass(frozen=True, slots=True)
class SlotNumbers:
    """One slot of a call, as it was recorded."""

    slot: str
    dtype: str
    shape: str
    stats: TensorStats | str | None
    bad: int = 0  # bits: `NAN` and those beside it

    @property
    def largest(self) -> float:
        """Largest magnitude among the finite elements, NaN where there is none."""
        if not isinstance(self.stats, TensorStats):
            return float("nan")
        return max(abs(self.stats.min), abs(self.stats.max))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call stands."""

    rank: int
    step: int
    seq: int
    phase: str
    level: str
    scope: str
    op: str
    ordinal: int
    api: str | None = None  # the user-facing function around an ``aten`` call
    source: str | None = None
    source_line: str | None = None
    stack: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``crf, forward, step 3, rank 0``; calls outside any module are named by their operator."""
        return f"{self.scope or self.op}, {self.phase}, step {self.step}, rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Led:
    """A call on the way to a bad one: what it gave, and how large."""

    place: Place
    slot: str
    dtype: str
    shape: str
    largest: float  # largest magnitude of what it gave
    bad: int = 0


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something bad, where it arose, what it led to and whether it matters."""

    kind: Kind
    place: Place
    severity: Severity
    sentence: str  # one line, complete by itself
    slots: tuple[SlotNumbers, ...] = ()
    led: tuple[Led, ...] = ()  # the calls that led to it, nearest first
    reached: tuple[Reached, ...] = ()  # what the bad numbers reached; empty: they were healed
    transient: bool = False  # no lasting thing got it: healed by the calls that read it, or its step was skipped
    matters: Matters = "unknown"
    because: str = ""
    run_next: str = ""  # a command that tells what the capture cannot
    carried: int = 0  # how many later calls of its step only pass it on
    healed_by: tuple[str, ...] = ()  # calls that read it and gave clean numbers
    again: tuple[int, ...] = ()  # later steps in which the same call is an origin again
    notes: tuple[str, ...] = ()
    policy: str = ""  # a row for policy.toml that lets the call run in a wider dtype; empty where that is no remedy


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """One step of a GradScaler."""

    step: int
    rank: int
    scale: float
    skipped: bool
    op: str = ""  # the operator under which it was recorded


@dataclass(frozen=True, slots=True)
class StepAnomalies:
    """One rank and step, judged."""

    rank: int
    step: int
    anomalies: tuple[Anomaly, ...]
    expected: tuple[tuple[str, int], ...] = ()  # calls whose infinities all readers heal, and how often: masks, padding
    scale: tuple[ScaleStep, ...] = ()
    calls: int = 0
    measured: int = 0  # slots with statistics
    collectives: tuple[Crossing, ...] = ()
    follows: tuple[tuple[int, int], ...] = ()
    """Step and place of earlier anomalies whose bad numbers this step read in its weights."""
    clean_weights: bool = False  # whether the step read weights, buffers or data, and none of it was bad
    clean_gradients: bool = False  # whether its backward was recorded, and nothing in it, nor in the optimizer's step, was bad


@dataclass(frozen=True, slots=True)
class Crossing:
    """A collective that gave, or was given, bad numbers on one rank."""

    op: str
    ordinal: int
    level: str
    ranks: str | None  # its members, ``0-3``; None: not known
    seq: int
    given: bool  # whether an input was bad
    anomaly: int = -1  # place of the anomaly of kind ``collective`` that stands for its output, -1: none


OverflowWord = Literal["clean", "harmless", "found", "inconclusive"]


@dataclass(frozen=True)
class OverflowResult:
    """What ``trueup.overflow`` returns."""

    verdict: OverflowWord
    sentence: str  # the verdict in full, several lines of plain text
    anomalies: tuple[Anomaly, ...]  # in the order of the run, worst first among those of one step
    expected: tuple[tuple[str, int], ...]  # calls that made infinities which all readers heal, and how many: masks, padding
    scale: tuple[ScaleStep, ...]
    scale_history: str | None
    notes: tuple[str, ...]
    path: str
    ranks: int
    steps: int
    calls: int
    measured: int  # tensors that were judged
    would_overflow: str | None = None
    try_next: str = ""  # a command that tries the suggested policy, empty where there is none

    @property
    def first(self) -> Anomaly | None:
        """The anomaly to look at first, or None."""
        return self.anomalies[0] if self.anomalies else None

    @property
    def exit_code(self) -> int:
        """0 clean or harmless, 1 found, 2 could not tell."""
        return {"clean": 0, "harmless": 0, "found": 1, "inconclusive": 2}[self.verdict]

    def __str__(self) -> str:
        return self.sentence
