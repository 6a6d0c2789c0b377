"""What judging says of the matched calls: in columns of a rank and step, and of the few that somebody looks at as objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers
from trueup.comparison.measures.measure import Errors, Measured
from trueup.comparison.measures.why import Reason
from trueup.comparison.verdict.criteria import Criterion, Row
from trueup.comparison.verdict.limits import Applied

RULES = (
    "", " and the same op elsewhere in the run", " and the repeats' spread", " and the float64 run", " in few elements",
    " and all elements are off alike",
)  # fmt: skip
"""What was added to the row of the criterion that decided."""

ELSEWHERE, REPEATS, TRUTH, FEW, COHERENT = 1, 2, 3, 4, 5
"""Indices into `RULES`."""

LASTING = ("optimizer", "collective")
"""Phases whose results are read in a later step, or on another rank: nobody reading them here does not make them harmless."""

ROLES = ("agrees", "equal", "carried", "unsized", "incomparable")
AGREES, EQUAL, CARRIED_ON, UNSIZED, INCOMPARABLE = range(5)


@dataclass(slots=True)
class Judged:
    """A measured call with its verdict: ``expected`` explains ``error_out``, ``own`` is the part that rounding explains."""

    call: Measured
    row: Row
    error_in: float
    error_out: float
    own: float
    expected: float
    worst: str | None
    """The output with the largest excess."""
    incomparable: Reason | None = None
    """Why the outputs could not be compared, in full or in part."""
    unsized: bool = False
    """Whether an output is known to differ and not how much, so that it may be rounding."""
    role: str = "agrees"
    slot_expected: dict[str, float] = field(default_factory=dict)
    decided: str = ""
    """What decided beside the row: one of `RULES`."""
    declared: float = 0.0
    """The part of ``own`` that operands rounded to a declared TF32 or HF32 make."""
    steady: bool = False
    """Whether all that rounds before it is bitwise equal on both sides."""
    outlier: bool = False
    """Whether it is off by more than is explained and hardly any other call of its kind is near that."""
    broke: str = ""
    """The figures that broke a limit of the criterion, in words."""

    @property
    def rule(self) -> str:
        """What decided, in words."""
        return self.row.name + self.decided

    @property
    def ratio(self) -> float:
        """``error_out / expected``."""
        return float(excess(np.asarray(self.error_out), np.asarray(self.expected)))

    @property
    def is_named_unsized(self) -> bool:
        """Whether an error of unknown size is the first difference of two runs that round alike."""
        return self.unsized and self.steady and self.error_in == 0

    def is_certain(self, criterion: Criterion) -> bool:
        """Tell whether the estimate cannot be that wrong."""
        if self.is_named_unsized:
            return self.ratio > criterion.suspect
        if self.outlier and self.error_in == 0 and not self.unsized:
            return self.ratio > criterion.suspect
        sharp = self.error_in == 0 or self.decided == RULES[COHERENT]
        return not self.unsized and criterion.is_certain(self.error_out, self.own, self.expected, self.declared, sharp=sharp)


def excess(error: Array, expected: Array) -> Array:
    """Return how many times the explained error an error is; 0 where there is none, or where anything is explained."""
    with np.errstate(all="ignore"):
        found = np.where(expected > 0, error / expected, np.inf)
    return np.where((error == 0) | (expected == np.inf), 0.0, found)


@dataclass(slots=True)
class Verdicts:
    """The matched calls of one rank and step, judged: an entry each, in the candidate's order."""

    errors: Errors
    criterion: Criterion
    rows: Numbers
    """Row of the criterion."""
    error_in: Array
    error_out: Array
    own: Array
    expected: Array
    worst: Numbers
    """Entry of ``errors`` with the largest excess among the outputs, `NONE` where no output was compared."""
    slot_expected: Array
    """By entry of ``errors``; NaN for what is no output."""
    unsized: Array
    incomparable: dict[int, Reason]
    role: Array
    """Index into `ROLES`."""
    decided: Array
    """Index into `RULES`."""
    tolerated: Array
    """By entry of ``errors``: the relative error that repeats of the baseline, or limits, allow; else 0."""
    declared: Array
    """The part of ``own`` that operands rounded to a declared TF32 or HF32 make."""
    steady: Array
    """Whether all that round before a call are bitwise equal."""
    outlier: Array
    """Whether a call is off by more than is explained and hardly any other of its kind is near that."""
    applied: Applied | None
    """What the limits of a criterion say, where it has any."""
    untold: int = 0
    """Backward calls of which another tool's dump tells gradients inside alone, and lacks some that no recorded call reads."""
    _made: dict[int, Judged] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ratio(self) -> Array:
        """``error_out / expected`` of each call."""
        return excess(self.error_out, self.expected)

    def at(self, pair: int) -> Judged:
        """Return a call as an object, always the same one."""
        if pair not in self._made:
            self._made[pair] = self._make(pair)
        return self._made[pair]

    def _make(self, pair: int) -> Judged:
        errors, worst = self.errors, int(self.worst[pair])
        slots = [(errors.error(n).slot, float(self.slot_expected[n])) for n in errors.entries(pair)]
        why = self.applied.why(self.criterion.limits, worst, errors.error(worst).slot) if self.applied and worst >= 0 else ""
        return Judged(
            errors.measured(pair), self.criterion.rows[self.rows[pair]], float(self.error_in[pair]), float(self.error_out[pair]),
            float(self.own[pair]), float(self.expected[pair]), None if worst < 0 else errors.error(worst).slot,
            self.incomparable.get(pair), bool(self.unsized[pair]), ROLES[self.role[pair]],
            {slot: expected for slot, expected in slots if not math.isnan(expected)}, RULES[self.decided[pair]],
            float(self.declared[pair]), bool(self.steady[pair]), bool(self.outlier[pair]), why,
        )  # fmt: skip
