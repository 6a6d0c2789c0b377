"""What a replay says of each call, and of all of them together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

ReplayWord = Literal["wrong", "crashed", "suspicious", "ill-conditioned", "could not tell", "not replayed", "accurate"]

ORDER: tuple[ReplayWord, ...] = ("crashed", "wrong", "suspicious", "ill-conditioned", "could not tell", "not replayed", "accurate")
"""From worst to best."""
BLAMED = frozenset({"crashed", "wrong"})
BY_PARTS = "parts"
"""Rule of a call that is code: it was not executed itself, the calls inside it were."""
OPEN = frozenset({"could not tell", "not replayed"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One recorded call, executed once more."""

    rank: int
    step: int
    seq: int
    level: str
    phase: str
    scope: str
    op: str
    overload: str
    ordinal: int
    shapes: str
    """Dtypes and shapes of what it was given: its shape class."""
    verdict: ReplayWord
    sentence: str
    """What was found, or why it could not be replayed."""
    slot: str = ""
    """The worst output."""
    ratio: float = math.nan
    """Its error over the baseline's own; NaN where there is none to compare with."""
    excess: float = 0.0
    """Its error over what is explained; above 1 suspicious."""
    error: float = math.nan
    baseline: float = math.nan
    explained: float = math.nan
    rule: str = ""
    origin: str = ""
    drawn: bool = False
    """Whether inputs were drawn to match recorded numbers."""
    seconds: float = 0.0
    times: int = 1
    """Calls that it stands for (``--dedup``)."""

    @property
    def kind(self) -> str:
        """Operator with overload, and phase: ``aten::add.Tensor forward``."""
        return f"{self.op}{'.' + self.overload if self.overload else ''} {self.phase}"

    @property
    def place(self) -> tuple[int, int, int]:
        """Rank, step and execution number."""
        return self.rank, self.step, self.seq

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; NaN and Inf are text."""
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}

    @staticmethod
    def from_json(read: dict[str, Any]) -> Outcome:
        """Read what `to_json` wrote.

        Raises:
            TypeError, ValueError, KeyError: it is none.
        """
        numbers = {f.name for f in fields(Outcome) if f.type == "float"}
        values: dict[str, Any] = {k: float(v) if k in numbers else v for k, v in read.items()}
        found = Outcome(**values)
        if found.verdict not in ORDER or not all(type(n) is int for n in found.place):
            raise ValueError(f"no outcome: {found.verdict!r}")
        return found


@dataclass(frozen=True)
class Group:
    """Calls of one operator, phase and shape class."""

    kind: str
    level: str
    shapes: str
    worst: Outcome
    calls: int
    verdicts: dict[str, int]


@dataclass(frozen=True)
class Replay:
    """What `trueup.analysis.rerun.replay` returns."""

    base: str
    device: str
    reference: str
    outcomes: Sequence[Outcome] = field(repr=False)
    notes: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def groups(self) -> list[Group]:
        """Operators by phase and shape class, worst first, then in the order of execution."""
        return grouped(self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        """Calls by verdict, those included that another stands for."""
        found = dict.fromkeys(ORDER, 0)
        for outcome in self.outcomes:
            found[outcome.verdict] += outcome.times
        return {word: number for word, number in found.items() if number}

    @property
    def culprits(self) -> list[Outcome]:
        """Calls that the device computes wrong, in the order of execution."""
        return sorted((o for o in self.outcomes if o.verdict in BLAMED), key=lambda o: o.place)

    @property
    def exit_code(self) -> int:
        """0: every call that could be replayed is accurate, 1: some are wrong, 2: nothing could be told."""
        if self.culprits:
            return 1
        counts = self.counts
        told = sum(n for word, n in counts.items() if word not in OPEN)
        return 0 if told else 2

    @property
    def sentence(self) -> str:
        """Say the result in one sentence."""
        counts, total = self.counts, sum(o.times for o in self.outcomes)
        open_ = sum(n for word, n in counts.items() if word in OPEN)
        rest = f"; {open_:,} of {total:,} calls could not be judged" if open_ else ""
        bad = [g for g in self.groups if g.worst.verdict in BLAMED]
        if bad:
            kinds = list(dict.fromkeys(g.kind for g in bad))
            first = bad[0].worst
            more = f", and {len(kinds) - 1} more kind{'s' if len(kinds) > 2 else ''} of call" if len(kinds) > 1 else ""
            return f"{self.device} computes {kinds[0]} wrong from the recorded inputs ({first.sentence}){more}{rest}."
        doubtful, told = counts.get("suspicious", 0), " that were judged" if open_ else ""
        if total == open_:
            return f"Could not tell: none of the {total:,} calls could be judged."
        if doubtful:
            return f"{self.device} computes no call wrong; {doubtful:,} are suspicious{rest}."
        return f"{self.device} computes all {total - open_:,} calls{told} as accurately as the baseline{rest}."


def worse(outcome: Outcome) -> tuple[int, float, tuple[int, int, int]]:
    """Sort key: worst verdict first, then the largest excess, then the order of execution."""
    excess = outcome.excess if math.isfinite(outcome.excess) else 1e300
    return ORDER.index(outcome.verdict), -excess, outcome.place


def grouped(outcomes: Iterable[Outcome]) -> list[Group]:
    """Group outcomes by level, operator, phase and shape class, worst first."""
    found: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.level, outcome.kind, outcome.shapes), []).append(outcome)
    groups = []
    for (level, kind, shapes), members in found.items():
        verdicts: dict[str, int] = {}
        for member in members:
            verdicts[member.verdict] = verdicts.get(member.verdict, 0) + member.times
        groups.append(Group(kind, level, shapes, min(members, key=worse), sum(m.times for m in members), verdicts))
    return sorted(groups, key=lambda g: worse(g.worst))
