"""The facts that move through Trueup: what a record holds, what a finding says, what a comparison returns. Everything here is
frozen data. It knows no framework, no file and no terminal, so every other package may import it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Level = Literal["module", "api", "aten"]
Phase = Literal["forward", "recompute", "backward", "optimizer", "collective", "data"]
Detail = Literal["digest", "stats", "tensor"]
VerdictWord = Literal["aligned", "deviates", "inconclusive"]
Status = Literal["pass", "DEVIATES", "could not tell", "not asked", "not reached"]  # of a step of a recipe or a triage

LEVELS: tuple[Level, ...] = ("module", "api", "aten")  # coarse to fine
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "optimizer", "collective", "data")
DETAILS: tuple[Detail, ...] = ("digest", "stats", "tensor")

LANES = 64  # number of float64 sums in a sketch

NUMBERS: tuple[str, ...] = (
    "min", "max", "mean", "l2",
    "n_nan", "n_posinf", "n_neginf", "n_zero", "n_subnormal", "n_saturated",
)  # fmt: skip
"""The statistics of a tensor, in the order in which kernels pack them; the sketch follows."""

PACKED = len(NUMBERS) + LANES  # length of the float64 vector that a statistics kernel fills for one tensor


class TrueupError(Exception):
    """A condition the user can act on: what happened, where, expected, got, what to do next.

    The command line prints it as one message and exits with `exit_code`; it never shows a traceback.
    """

    exit_code = 2


class UsageError(TrueupError):
    """An option, or what is named on the command line, cannot be used as it was given. The code is ``EX_USAGE`` of sysexits.h."""

    exit_code = 64


class RunStopped(TrueupError):
    """The capture failed and the user asked that the run stops then (``on_error="stop"``); raised inside the training."""


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One-pass numbers of a tensor; ``min``, ``max``, ``mean``, ``l2`` are over its finite elements (NaN if none)."""

    numel: int
    min: float
    max: float
    mean: float
    l2: float
    n_nan: int
    n_posinf: int
    n_neginf: int
    n_zero: int
    n_subnormal: int
    n_saturated: int
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class CallKey:
    """What names a call within a capture, the same in two runs of the same program."""

    rank: int
    step: int
    phase: str
    level: str
    scope: str
    op: str
    ordinal: int

    def __str__(self) -> str:
        place = f"{self.scope}/" if self.scope else ""
        return f"rank {self.rank} step {self.step} {self.phase} {self.level} {place}{self.op}#{self.ordinal}"


SlotState = Literal["equal", "agrees", "deviates", "incomparable"]


@dataclass(frozen=True, slots=True)
class SlotComparison:
    """One slot of a matched call, on both sides.

    ``relative_l2`` is ‖candidate − baseline‖ / ‖baseline‖ (NaN where it could not be measured) and ``method`` says how it
    was measured: ``digest`` (bitwise equal), ``tensor`` (from the bytes), ``sketch`` (estimated, about ±18 %), ``statistics``
    (another tool's max, min, mean and norm: at least so much, and 0 means no more than that they agree), ``value`` (a
    non-tensor argument) or ``none``.
    """

    slot: str
    state: SlotState
    relative_l2: float
    method: Literal["digest", "tensor", "sketch", "statistics", "value", "none"]
    dtype: tuple[str, str]
    shape: tuple[str, str]
    baseline: TensorStats | str | None
    candidate: TensorStats | str | None
    reason: str = ""

    @property
    def unsized(self) -> bool:
        """Whether all that is known is that the digests differ: how much was not recorded."""
        return self.method == "digest" and self.relative_l2 != 0


@dataclass(frozen=True, slots=True)
class Histogram:
    """How the finite elements of one slot are spread on both sides, counted between common edges."""

    slot: str
    edges: tuple[float, ...]  # rising, one more than there are counts
    baseline: tuple[int, ...]
    candidate: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorstElement:
    """An element of a slot where the two sides are far apart."""

    slot: str
    index: tuple[int, ...]  # position in the tensor, one number a dimension (of a complex tensor one more: 0 real, 1 imaginary)
    baseline: float
    candidate: float
    ulps: float  # their distance in units in the last place of the larger one, in the coarser of the two dtypes; NaN: none


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A call near another one. ``state`` and errors are those of the table of calls; empty and NaN where it was not compared."""

    hops: int  # producers of the inputs have -1, their producers -2; consumers of the outputs 1 and 2; the call itself 0
    seq: tuple[int, int]  # execution numbers in the baseline and in the candidate, -1 where that side lacks the call
    step: int
    phase: str
    level: str
    scope: str
    op: str
    ordinal: int
    state: str = ""
    role: str = ""
    error_in: float = float("nan")
    error_out: float = float("nan")

    @property
    def side(self) -> Literal["both", "baseline", "candidate"]:
        """Where the call exists."""
        return "candidate" if self.seq[0] < 0 else "baseline" if self.seq[1] < 0 else "both"


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor on its way from one call to another."""

    source: int  # place of the producer among ``Evidence.nodes``
    target: int  # place of the consumer
    slots: tuple[str, str]  # the producer's slot and the consumer's
    side: Literal["both", "baseline", "candidate"]
    error: float  # relative L2 error of the tensor, where it is a slot of the finding; else the largest of its producer's


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a report shows of a culprit beside its numbers: elements where the bytes were recorded, the calls around it."""

    histograms: tuple[Histogram, ...] = ()
    worst: tuple[WorstElement, ...] = ()
    nodes: tuple[Neighbour, ...] = ()
    edges: tuple[Edge, ...] = ()
    omitted: int = 0  # neighbours that were left out because there are too many
    notes: tuple[str, ...] = ()  # what could not be shown, and why


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the criterion that judged some call."""

    name: str
    demand: str  # what it explains, in words
    origin: str  # where its numbers come from
    calls: int
    deviates: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A call that stands out, with the numbers and the rule that say so.

    ``kind`` is ``operator`` (inputs agree, outputs do not), ``argument`` (a non-tensor argument differs), ``random`` (the
    random numbers differ), ``input`` (a tensor that no recorded call produced differs: data, weights), ``overwritten`` (what it
    read is not what the recorded call before had written there, and in the baseline it is), ``unmatched`` (the
    call exists on one side only), ``region`` (a run of calls with no counterpart, whose inputs agree and outputs do not) or
    ``ranks`` (ranks of one run do not hold what they should of a tensor).
    """

    kind: Literal["operator", "argument", "random", "input", "overwritten", "unmatched", "region", "ranks"]
    step: int
    rank: int
    phase: str
    level: str
    scope: str
    op: str
    ordinal: int
    source: str | None
    """``file:line in function`` of the user's code, or None when no stack was recorded."""
    sentence: str
    """What a tired engineer reads: one sentence, complete by itself."""
    rule: str = ""
    """Name of the criterion row that decided."""
    error_in: float = 0.0
    """Largest relative L2 error among the inputs."""
    error_out: float = 0.0
    """Largest relative L2 error among the outputs."""
    expected: float = 0.0
    """Relative L2 error that rounding and the inputs' errors explain."""
    slots: tuple[SlotComparison, ...] = ()
    api: str | None = None
    """The user-facing function around an ``aten`` call."""
    aten: tuple[str, ...] = ()
    """Dispatcher operators that ran inside an ``api`` or ``module`` call on the candidate."""
    side: Literal["both", "baseline", "candidate"] = "both"
    seq: tuple[int, int] = (-1, -1)
    """Execution numbers of the call in the baseline and in the candidate (-1: absent)."""
    stack: tuple[str, ...] = ()
    """Frames of the call, innermost first, each ``file:line in function``."""
    source_line: str | None = None
    """Text of the source line, when the recorded file still holds it."""
    confidence: Literal["high", "could be rounding"] = "high"
    victims: int = 0
    """How many later calls deviate, and what they were given explains it."""
    beyond: int = 0
    """Of these, those in which a fault of their own would not show: their inputs differ by half or more, or they could not be
    computed again."""
    cleared: int = 0
    """How many calls behind it were computed again from their own inputs, or by a shadow, and are right."""
    alike: int = 0
    """Of a culprit: how many further calls of its kind, the same operator in the same phase, deviate by themselves, too."""
    alike_in: tuple[str, ...] = ()
    """Names of the first of them, each once."""
    evidence: Evidence | None = None
    """Of the first culprits."""
    neighbours: tuple[Neighbour, ...] = ()
    """Of an unmatched call: the call of its level right before (``hops`` -1) and right after it (1) on its side."""
    positions: tuple[str, ...] = ()
    """Of an argument that differs: the names of the call's arguments by position, as the framework has them."""
    because: str = ""
    """What else was looked at, in words: what other ranks gave, the limit that an older tool's criterion sets."""
    cause: str = ""
    """The settings that differ between the runs and explain the call, in words; empty where none does."""

    @property
    def ratio(self) -> float:
        """``error_out / expected``: how many times the explained error it is."""
        return self.error_out / self.expected if self.expected > 0 else float("inf") if self.error_out > 0 else 0.0

    def __repr__(self) -> str:
        """Say in five lines what a debugger or a notebook should show of it."""
        counts = f"{self.alike:,} alike, {self.victims:,} deviate because of it"
        size = f"{self.error_out:.2g} where {self.expected:.2g} is expected"
        lines = f"{self.op} in {self.name}", self.source or "no line of code", counts
        return "\n  ".join([f"Finding: {self.kind}, {self.confidence}, {size}", self.cause or self.sentence, *lines])

    @property
    def name(self) -> str:
        """``neck.lstm, backward, step 0, rank 0``; calls outside any module are named by their operator."""
        return f"{self.scope or self.op}, {self.phase}, step {self.step}, rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Occurrence(CallKey):
    """Where the difference first appears on a rank: the call."""

    seq: tuple[int, int]  # execution numbers of the call in the baseline and in the candidate (-1: absent)
    error: float  # relative L2 error there
    sender: int | None  # rank that it came from; None where it arises on this rank
    cause: int | None  # rank where it arises, after all that was passed on; None where that is not known
    sentence: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a report says about one capture."""

    path: str
    framework: str
    devices: tuple[str, ...]
    ranks: int
    steps: int
    calls: int
    losses: tuple[tuple[int, float], ...]
    """``(step, loss)`` pairs: what ``backward()`` was called on."""
    environment: dict[str, str]
    notes: tuple[str, ...]
    gradient_norms: tuple[tuple[int, float], ...] = ()
    """``(step, norm)`` pairs: root of the summed squares of the gradients of all parameters, before clipping."""
    gradient_source: str = ""
    """Which tensors the norms are of, or why there are none."""
    policy: tuple[str, ...] = ()
    """What each rule of the policy that the run was given changed, a sentence each."""


@dataclass(frozen=True, slots=True)
class SetOtherwise:
    """Something that the two runs are set to differently, in words."""

    what: str  # ``AdamW lr``
    baseline: str
    candidate: str
    severity: Literal["changes", "may", "cannot"]  # what it does to the numbers


@dataclass(frozen=True)
class Result:
    """What ``trueup.compare`` returns."""

    verdict: VerdictWord
    sentence: str
    """The verdict in full, several lines of plain text."""
    culprits: Sequence[Finding]
    victims: Sequence[Finding]
    unmatched: Sequence[Finding]
    notes: Sequence[str]
    criterion: str
    baseline: RunSummary
    candidate: RunSummary
    counts: dict[str, int]
    """Calls by state: ``compared``, ``equal``, ``agrees`` (``inherited`` of them by more than rounding, which their inputs
    explain), ``deviates``, ``incomparable``; of one run: ``only_baseline``, ``only_candidate``, and ``unmatched``, those of
    them that nothing around them accounts for."""
    calls: pa.Table = field(repr=False)
    """One row per call: key columns, both seq, error_in, error_out, expected, ratio, state, role, rule, source. A call of one run
    has state ``only baseline`` or ``only candidate``, and null for the other run's seq and all that compares."""
    rules: Sequence[Rule] = ()
    """Rows of the criterion that judged calls, most calls first."""
    occurrences: Sequence[Occurrence] = ()
    """Where the difference first appears, by rank; ranks where nothing differs for certain are left out."""
    settings: Sequence[SetOtherwise] = ()
    """What the runs are set to differently, what changes numbers first."""

    @property
    def culprit(self) -> Finding | None:
        """The first culprit, or None."""
        return self.culprits[0] if self.culprits else None

    @property
    def matched(self) -> pa.Table:
        """The rows of ``calls`` that both runs made."""
        found = self.calls
        for name in ("seq_baseline", "seq_candidate"):
            found = found.filter(found[name].is_valid()) if found[name].null_count else found
        return found

    @property
    def exit_code(self) -> int:
        """0 aligned, 1 deviates, 2 could not tell."""
        return {"aligned": 0, "deviates": 1, "inconclusive": 2}[self.verdict]

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        """Show the verdict in a notebook."""
        from trueup.doors.report.html import render_fragment

        return render_fragment(self)

    def save(self, directory: str | Path) -> Path:
        """Write ``verdict.json``, ``calls.parquet`` and ``index.html`` into ``directory`` and return its path.

        Raises:
            TrueupError: the directory cannot be written.
        """
        from trueup.doors.report.saving import save

        return save(self, Path(directory))


def packed_columns(packed: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Split ``(n, PACKED)`` float64 rows into named statistics columns (counts as int64) and ``sketch`` ``(n, LANES)``."""
    columns = {name: packed[:, k] for k, name in enumerate(NUMBERS)}
    for name in NUMBERS:
        if name.startswith("n_"):
            columns[name] = columns[name].astype("int64")
    return columns | {"sketch": packed[:, len(NUMBERS) :]}
