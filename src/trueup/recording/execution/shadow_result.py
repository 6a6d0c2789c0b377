"""What a shadow run found: the first call that is wrong by itself, the others, and what was not judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation.model import TrueupError
from trueup.recording.execution import shadow_table
from trueup.recording.execution.shadow_table import NOT_JUDGED

Word = Literal["wrong", "sound", "could not tell"]

NO_REFERENCE = ("an operator of another library", "a higher-order operator", "the reference refused", "a tensor that is no plain")
"""Reasons for which nothing at all is known of an operator."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A call whose result is not what its inputs make, beyond rounding."""

    step: int
    rank: int
    seq: int
    phase: str
    scope: str
    op: str
    ordinal: int
    api: str | None
    """The user-facing function around it."""
    source: str | None
    """``file:line in function`` of the user's code."""
    slot: str
    """The output that is worst."""
    dtype: str
    shape: str
    error: float
    """Relative root mean square error of that output against the reference's."""
    explained: float
    """Of it, what rounding explains."""
    excess: float
    """``error`` over ``explained``, or the same of the largest element, whichever is larger."""
    rule: str
    reason: str
    state: str = "wrong"

    @property
    def name(self) -> str:
        """``neck.lstm, backward, step 0, rank 0``."""
        return f"{self.scope or self.op}, {self.phase}, step {self.step}, rank {self.rank}"


@dataclass(frozen=True)
class ShadowResult:
    """What `trueup.shadow` and ``trueup shadow-report`` return."""

    verdict: Word
    reference: str
    """``cpu float64``."""
    culprits: Sequence[Blame]
    """Calls that are wrong by themselves, in order of execution."""
    suspects: Sequence[Blame]
    """Calls whose error could be rounding."""
    counts: dict[str, int]
    """Calls by state: accurate, suspicious, wrong, ill-conditioned, could not tell, not judged."""
    left: dict[str, int]
    """Calls that were not judged, by reason."""
    unknown: dict[str, str]
    """Operators of which no call was judged, for there is no reference, with the reason."""
    steps: int
    milliseconds: float
    """What the shadow took in all."""
    notes: Sequence[str] = ()
    calls: pa.Table = field(default_factory=shadow_table.SCHEMA.empty_table, repr=False)
    """A row per output judged and per kind that was not; see docs/shadow.md."""

    @property
    def culprit(self) -> Blame | None:
        """The first call that is wrong by itself, or None."""
        return self.culprits[0] if self.culprits else None

    @property
    def exit_code(self) -> int:
        """0 nothing wrong, 1 wrong, 2 could not tell."""
        return {"sound": 0, "wrong": 1, "could not tell": 2}[self.verdict]

    @property
    def sentence(self) -> str:
        """The verdict in full, several lines of plain text."""
        from trueup.foundation.words.shadow_sentence import lines

        return "\n".join(lines(self))

    def __str__(self) -> str:
        return self.sentence


def open_result(path: str | Path) -> ShadowResult:
    """Read what a shadow run left in its capture directory.

    Raises:
        TrueupError: it is no capture, or not of a shadow run.
    """
    from trueup.foundation.store import open_capture

    capture = open_capture(path)
    config = capture.root.get("config")
    options = config.get("shadow") if isinstance(config, dict) else None
    if not isinstance(options, dict):
        raise TrueupError(
            f"{path} is no capture of a shadow run.\n"
            "  expected: one made by trueup capture --shadow cpu:float64, or trueup.shadow\n"
            "  got:      an ordinary capture\n  next:     trueup compare it with a baseline, or train once more with --shadow"
        )
    table, problems = shadow_table.read(Path(path), capture.ranks)
    target = f"{str(options.get('reference'))[:40]} {str(options.get('dtype'))[:20]}"
    return summarise(table, target, [*problems, *capture.problems])


def summarise(table: pa.Table, reference: str, notes: Sequence[str] = ()) -> ShadowResult:
    """Say what a table of a shadow run shows."""
    judged = table.filter(pc.not_equal(table["state"], NOT_JUDGED))
    states = _states(judged)
    counts = Counter(states.values())
    skipped = table.filter(pc.equal(table["state"], NOT_JUDGED)).select(["op", "reason", "calls"]).to_pylist()
    left: Counter[str] = Counter()
    for row in skipped:
        left[_kind_of(row["reason"])] += row["calls"]
    known = set(pc.unique(judged["op"]).to_pylist())
    unknown = {r["op"]: r["reason"] for r in skipped if r["op"] not in known and r["reason"].startswith(NO_REFERENCE)}
    wrong, suspects = _blamed(judged, "wrong"), _blamed(judged, "suspicious")
    wrong = _with_early_suspects(wrong, suspects)
    verdict: Word = "wrong" if wrong else "could not tell" if not states or unknown else "sound"
    named = {(b.step, b.rank, b.seq) for b in wrong}
    return ShadowResult(
        verdict, reference, wrong, [b for b in suspects if (b.step, b.rank, b.seq) not in named],
        {**counts, NOT_JUDGED: sum(left.values())}, dict(left.most_common()), unknown,
        len(pc.unique(table["step"])), float(pc.sum(table["milliseconds"]).as_py() or 0.0), tuple(notes), table,
    )  # fmt: skip


def _kind_of(reason: str) -> str:
    """Shorten a reason to what many calls share."""
    return reason.partition(":")[0] if reason.startswith("the reference refused") else reason


WORST = ("wrong", "suspicious", "could not tell", "ill-conditioned", "accurate")


def _states(judged: pa.Table) -> dict[tuple[int, int, int], str]:
    """Return the worst state of the outputs of each call."""
    found: dict[tuple[int, int, int], str] = {}
    columns = [judged[name].to_pylist() for name in ("step", "rank", "seq", "state")]
    for step, rank, seq, state in zip(*columns, strict=True):
        before = found.get((step, rank, seq))
        known = state if state in WORST else "could not tell"
        if before is None or WORST.index(known) < WORST.index(before):
            found[step, rank, seq] = known
    return found


def _blamed(judged: pa.Table, state: str) -> list[Blame]:
    """Return the calls in a state, in order, each by its worst output."""
    worst: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in judged.filter(pc.equal(judged["state"], state)).to_pylist():
        key = row["step"], row["rank"], row["seq"]
        if key not in worst or row["excess"] > worst[key]["excess"]:
            worst[key] = row
    names = list(Blame.__dataclass_fields__)
    return [Blame(**{name: row[name] for name in names}) for _, row in sorted(worst.items())]


def _with_early_suspects(wrong: list[Blame], suspects: Sequence[Blame]) -> list[Blame]:
    """Once an operator is certain to be broken, its earlier suspected calls are culprits too."""
    broken = {(b.op, b.phase, b.slot) for b in wrong}
    first = min(((b.step, b.seq) for b in wrong), default=None)
    early = [b for b in suspects if first is not None and (b.op, b.phase, b.slot) in broken and (b.step, b.seq) < first]
    return sorted([*wrong, *early], key=lambda b: (b.step, b.seq, b.rank))
