"""What two models that ran in lockstep showed.

    WRONG  first: encoder.lstm, backward  (LSTM)
           given the same inputs, grad_input.0, float32 [4, 5, 8], is off by 3.2e-1 (rel. L2): 1.1e4 x what rounding explains
           compared 41 calls of 24 modules forward, 17 backward; not compared 2: random (2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Word = Literal["wrong", "sound", "could not tell"]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the two models part: a module that, given the same inputs, computes something else."""

    scope: str
    module: str
    """Its class."""
    phase: str
    ordinal: int
    """n-th call of this module."""
    slot: str
    """``output.0``, ``buffer.running_var``, ``grad_input.0``, ``grad_param.weight``, ``param.weight``."""
    dtype: str
    shape: tuple[int, ...]
    error: float
    explained: float
    excess: float
    state: str
    reason: str

    @property
    def name(self) -> str:
        """``encoder.lstm, backward``."""
        return f"{self.scope or self.module}, {self.phase}"


@dataclass(frozen=True)
class LockstepResult:
    """What `trueup.lockstep` returns."""

    verdict: Word
    culprit: Parting | None
    """The first module whose own error is beyond rounding; nothing was run beyond it."""
    suspects: Sequence[Parting]
    """Modules whose error could be rounding."""
    compared: dict[str, int]
    """Calls compared, by phase."""
    modules: int
    left: dict[str, int]
    """Calls that were not compared, by reason."""

    @property
    def exit_code(self) -> int:
        """0 nothing wrong, 1 wrong, 2 could not tell."""
        return {"sound": 0, "wrong": 1, "could not tell": 2}[self.verdict]

    @property
    def sentence(self) -> str:
        """The verdict in full, several lines of plain text."""
        from trueup.foundation.words.shadow_sentence import lockstep_lines

        return "\n".join(lockstep_lines(self))

    def __str__(self) -> str:
        return self.sentence
