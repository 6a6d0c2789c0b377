"""Runs that are judged while they run: options and result of a shadow run, and the result of two models in lockstep, which says:

    WRONG  first: encoder.lstm, backward  (LSTM)
           given the same inputs, grad_input.0, float32 [4, 5, 8], is off by 3.2e-1 (rel. L2): 1.1e4 x what rounding explains
           compared 41 calls of 24 modules forward, 17 backward; not compared 2: random (2)

Options come from Python, from the command line, or from the environment of an armed process; the table of a shadow run lies in its
capture, a Parquet file a part.

A shadow run says:

    WRONG  first: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::_thnn_fused_lstm_cell_backward_impl)
           given its own inputs it is off by 2.1e-1 (rel. L2) in output.0, float32 [64, 256]: 3.5e6 x what rounding explains
           your code: centernet.py:57 in forward
           11 further calls of the same operator are wrong by themselves
           judged 412 calls of 1 step against cpu float64; not judged 3: random: another draw is as good (3)
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout
from trueup.foundation.store.durable import write_file
from trueup.foundation.store.parts import BROKEN, ROWS_PER_BYTE
from trueup.foundation.words.wording import counted, first_line, one_line, sci, short_source, times
from trueup.recording.recorder.options import ShadowOptions

SHARE = "left out by the share of calls asked for"
TIME = "left out by the time a step may take longer"

LEAST_SHARE = 1 / 1024
"""Below it the share of a run with a time limit is not lowered."""


class Budget:
    """Decides call by call; of two runs with the same options and no time limit, the same calls. With one, the share of the next
    step follows from what this one spent, so calls are spread over the step, and which they are depends on the machine."""

    def __init__(self, options: ShadowOptions) -> None:
        self._options = options
        self.share = options.sample
        self._kinds: set[tuple[str, str, str]] = set()
        self.spent = 0.0  # seconds that the shadow took in this step
        self._began = perf_counter()
        self._limited = options.milliseconds is not None or options.ratio is not None

    def why_not(self, step: int, phase: str, scope: str, op: str, ordinal: int, dtype: str) -> str | None:
        """Say why a call is left out; None where it is to be computed again."""
        if self._limited and self.spent > self._limit():
            return TIME
        kind = phase, op, dtype
        if kind not in self._kinds:
            self._kinds.add(kind)
            return None
        if self.share >= 1:
            return None
        key = f"{self._options.seed}|{step}|{phase}|{scope}|{op}|{ordinal}"
        return None if xxhash.xxh3_64_intdigest(key.encode()) < self.share * 2.0**64 else SHARE

    def end_step(self) -> None:
        """Begin a new step."""
        if self._limited:
            limit = self._limit()
            change = min(2.0, max(0.1, 0.9 * limit / self.spent)) if self.spent > 0 else 2.0
            self.share = min(self._options.sample, max(LEAST_SHARE, self.share * change))
        self.spent, self._began = 0.0, perf_counter()

    def _limit(self) -> float:
        """Return the seconds that this step may take longer, as far as it has come."""
        options = self._options
        if options.milliseconds is not None:
            return options.milliseconds / 1000
        own = max(perf_counter() - self._began - self.spent, 0.0)
        return (options.ratio or 0.0) * own


NAME = re.compile(r"shadow-([0-9]{4,9})\.parquet")
NOT_JUDGED = "not judged"

SCHEMA = pa.schema(
    [
        ("step", pa.int32()), ("rank", pa.int32()), ("seq", pa.int64()), ("phase", pa.string()), ("scope", pa.string()),
        ("op", pa.string()), ("ordinal", pa.int64()), ("api", pa.string()), ("slot", pa.string()), ("dtype", pa.string()),
        ("shape", pa.string()), ("state", pa.string()), ("error", pa.float64()), ("explained", pa.float64()),
        ("excess", pa.float64()), ("rule", pa.string()), ("reason", pa.string()), ("source", pa.string()),
        ("milliseconds", pa.float64()), ("calls", pa.int64()),
    ]
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Return rows as a table; columns that a row lacks are null."""
    return pa.Table.from_pylist(list(rows), SCHEMA)


def write(folder: Path, number: int, rows: Sequence[dict[str, Any]]) -> None:
    """Write a part into a rank's folder; raise `OSError` where it cannot be written."""
    sink = pa.BufferOutputStream()
    pq.write_table(table(rows), sink, compression="zstd", write_page_checksum=True)
    write_file(folder / f"shadow-{number:04d}.parquet", [memoryview(sink.getvalue())])


def read(root: Path, ranks: Iterable[int]) -> tuple[pa.Table, list[str]]:
    """Read the table of a capture, all ranks, in the order of execution; return it and what could not be read."""
    tables, problems = [], []
    for rank in sorted(ranks):
        folder = root / layout.rank_name(rank)
        for name in sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name)):
            try:
                tables.append(_part(root, folder / name))
            except (*BROKEN, TrueupError) as error:
                problems.append(f"rank {rank}: {name} is truncated or damaged ({first_line(error)}); its calls are missing")
    found = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    return found.sort_by([("step", "ascending"), ("rank", "ascending"), ("seq", "ascending")]), problems


def _part(root: Path, path: Path) -> pa.Table:
    size = layout.real_file(root, path).stat().st_size
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        rows = file.metadata.num_rows
        if rows > ROWS_PER_BYTE * size:
            raise ValueError(f"claims {rows} rows in a file of {size} bytes")
        found = file.read(columns=SCHEMA.names, use_threads=False)
    found.validate(full=True)
    return found.select(SCHEMA.names).cast(SCHEMA)


Word = Literal["wrong", "sound", "could not tell"]


class Judged(ABC):
    """What was said of such a run."""

    verdict: Word

    @property
    @abstractmethod
    def sentence(self) -> str:
        """The verdict in full, several lines of plain text."""

    @property
    def exit_code(self) -> int:
        """0 nothing wrong, 1 wrong, 2 could not tell."""
        return {"sound": 0, "wrong": 1, "could not tell": 2}[self.verdict]

    def __str__(self) -> str:
        return self.sentence


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
    api: str | None  # the user-facing function around it
    source: str | None  # ``file:line in function`` of the user's code
    slot: str  # the output that is worst
    dtype: str
    shape: str
    error: float  # relative root mean square error of that output against the reference's
    explained: float  # of it, what rounding explains
    excess: float  # ``error`` over ``explained``, or the same of the largest element, whichever is larger
    rule: str
    reason: str
    state: str = "wrong"

    @property
    def name(self) -> str:
        """``neck.lstm, backward, step 0, rank 0``."""
        return f"{self.scope or self.op}, {self.phase}, step {self.step}, rank {self.rank}"


@dataclass(frozen=True)
class ShadowResult(Judged):
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
    calls: pa.Table = field(default_factory=SCHEMA.empty_table, repr=False)
    """A row per output judged and per kind that was not; see docs/shadow.md."""

    @property
    def culprit(self) -> Blame | None:
        """The first call that is wrong by itself, or None."""
        return self.culprits[0] if self.culprits else None

    @property
    def sentence(self) -> str:
        """The verdict in full, several lines of plain text."""
        return "\n".join(shadow_lines(self))


def open_result(path: str | Path) -> ShadowResult:
    """Read what a shadow run left in its capture directory; raise `TrueupError` where it is no capture, or not of a shadow
    run."""
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
    table, problems = read(Path(path), capture.ranks)
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


# ---------------------------------------------------------------- what two models in lockstep showed
@dataclass(frozen=True, slots=True)
class Parting:
    """Where the two models part: a module that, given the same inputs, computes something else."""

    scope: str
    module: str  # its class
    phase: str
    ordinal: int  # n-th call of this module
    slot: str  # ``output.0``, ``buffer.running_var``, ``grad_input.0``, ``grad_param.weight``, ``param.weight``
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
class LockstepResult(Judged):
    """What `trueup.lockstep` returns."""

    verdict: Word
    culprit: Parting | None  # the first module whose own error is beyond rounding; nothing was run beyond it
    suspects: Sequence[Parting]  # modules whose error could be rounding
    compared: dict[str, int]  # calls compared, by phase
    modules: int
    left: dict[str, int]  # calls that were not compared, by reason

    @property
    def sentence(self) -> str:
        """The verdict in full, several lines of plain text."""
        return "\n".join(lockstep_lines(self))


HEADS = {"wrong": "WRONG  ", "sound": "NOTHING WRONG  ", "could not tell": "COULD NOT TELL  "}
NAMED = 3


def shadow_lines(result: ShadowResult) -> list[str]:
    """Say the verdict in lines of plain text; the first can stand alone."""
    said = {"wrong": _wrong, "sound": _sound, "could not tell": _untold}[result.verdict](result)
    head = HEADS[result.verdict]
    said = [*said, *_left(result), *(f"note: {one_line(note)}" for note in result.notes[:3])]
    return [head + said[0], *(" " * len(head) + line for line in said[1:])]


def operators(blame: Blame) -> str:
    """``torch.lstm / aten::_thnn_fused_lstm_cell``."""
    return " / ".join(one_line(name) for name in (blame.api, blame.op) if name)


def measured(blame: Blame) -> str:
    """Say the error of a call, in one line."""
    if not math.isfinite(blame.excess) or blame.dtype.startswith(("int", "uint", "bool")):
        return f"given its own inputs, {blame.slot} ({blame.dtype} {blame.shape}): {one_line(blame.reason)}"
    size = f"{sci(blame.error)} (rel. L2)" if math.isfinite(blame.error) else "something where the truth is zero"
    return (
        f"given its own inputs it is off by {size} in {one_line(blame.slot)}, {blame.dtype} {blame.shape}: "
        f"{times(blame.excess)} what rounding explains"
    )


def _wrong(result: ShadowResult) -> list[str]:
    first = result.culprits[0]
    said = [f"first: {one_line(first.name)}  ({operators(first)})", measured(first)]
    if first.source:
        said.append(f"your code: {short_source(first.source)}")
    same = sum((b.op, b.phase) == (first.op, first.phase) for b in result.culprits) - 1
    if same:
        said.append(f"{counted(same, 'further call')} of the same operator {'is' if same == 1 else 'are'} wrong by "
                    f"{'itself' if same == 1 else 'themselves'}")  # fmt: skip
    others = Counter((b.op, b.phase) for b in result.culprits if (b.op, b.phase) != (first.op, first.phase))
    if others:
        named = ", ".join(f"{one_line(op)} in {phase} ({n:,})" for (op, phase), n in others.most_common(NAMED))
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        said.append(f"so are calls of other operators, independently: {named}{more}")
    return [*said, _judged(result)]


def _sound(result: ShadowResult) -> list[str]:
    said = [f"{_judged(result)}: each computed what its inputs make, within rounding"]
    if result.suspects:
        first = max(result.suspects, key=lambda b: b.excess)
        said.append(f"{counted(len(result.suspects), 'call')} could be more than rounding, most of all {one_line(first.name)}  "
                    f"({operators(first)}), {times(first.excess)}")  # fmt: skip
    return said


def _untold(result: ShadowResult) -> list[str]:
    if not any(n for state, n in result.counts.items() if state != "not judged"):
        return ["no call was judged"]
    said = [f"{counted(len(result.unknown), 'operator')} had no reference; {_judged(result)}, and nothing was wrong"]
    named = list(result.unknown.items())
    said += [f"{one_line(op)}: {one_line(reason)}" for op, reason in named[:NAMED]]
    return said + ([f"and {len(named) - NAMED} more"] if len(named) > NAMED else [])


def _judged(result: ShadowResult) -> str:
    judged = sum(n for state, n in result.counts.items() if state != "not judged")
    return f"judged {counted(judged, 'call')} of {counted(result.steps, 'step')} against {result.reference}"


def _left(result: ShadowResult) -> Iterable[str]:
    ill, untold = result.counts.get("ill-conditioned", 0), result.counts.get("could not tell", 0)
    if ill:
        has = "has" if ill == 1 else "have"
        yield f"{counted(ill, 'call')} {has} an error that one unit in the last place of the inputs explains"
    if untold:
        yield f"{counted(untold, 'call')} could go either way: ties, or what is rounded before, may decide integers"
    if result.left:
        reasons = list(result.left.items())
        named = "; ".join(f"{one_line(reason)} ({n:,})" for reason, n in reasons[:NAMED])
        more = f"; and {len(reasons) - NAMED} more reasons" if len(reasons) > NAMED else ""
        yield f"not judged {counted(sum(result.left.values()), 'call')}: {named}{more}"


def lockstep_lines(result: LockstepResult) -> list[str]:
    """Say what two models in lockstep showed."""
    forward, backward = result.compared.get("forward", 0), result.compared.get("backward", 0)
    counts = f"compared {counted(forward, 'call')} of {counted(result.modules, 'module')} forward, {backward:,} backward"
    if result.culprit is not None:
        first = result.culprit
        said = [f"first: {one_line(first.name)}  ({one_line(first.module)})", _parting(first), counts]
    elif result.verdict == "sound":
        said = [f"{counts}: given the same inputs, both compute the same within rounding"]
    else:
        said = [f"{counts}, and nothing was wrong there" if result.compared else "no call could be compared"]
    if result.suspects:
        worst = max(result.suspects, key=lambda p: p.excess)
        said.append(f"{counted(len(result.suspects), 'call')} could be more than rounding, most of all {one_line(worst.name)}, "
                    f"{times(worst.excess)}")  # fmt: skip
    if result.left:
        said.append("not compared: " + "; ".join(f"{one_line(why)} ({n:,} calls)" for why, n in result.left.items()))
        if any("random" in why for why in result.left):
            said.append("next: switch dropout off on both sides, with eval() or p=0")
    head = HEADS[result.verdict]
    return [head + said[0], *(" " * len(head) + line for line in said[1:])]


def _parting(parting: Parting) -> str:
    where = f"{one_line(parting.slot)}, {parting.dtype} {list(parting.shape)},"
    if parting.slot.startswith("param."):
        return f"the weights differ before anything runs: {where} by {sci(parting.error)} (rel. L2)"
    if not math.isfinite(parting.excess) or not parting.dtype.startswith(("float", "bfloat", "complex")):
        return f"given the same inputs, {where} differs: {one_line(parting.reason)}"
    size = f"{sci(parting.error)} (rel. L2)"
    return f"given the same inputs, {where} is off by {size}: {times(parting.excess)} what rounding explains"
