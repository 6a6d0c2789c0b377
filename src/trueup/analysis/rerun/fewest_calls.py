"""The fewest calls that show a failure which a call by itself does not: of what is left in memory, or handed on in another form.

The earlier calls are executed with the blamed one, each with its recorded inputs; where it reads another's result, with that result
as it lies on the device. The set is widened (the calls that made its inputs, the last call of its kind, ever longer stretches
before it) until the failure shows, and then reduced by delta debugging (`ddmin`) while the same failure stays. Each set runs on a
device that has done nothing before. A call whose inputs another one computed wrong is a victim: if the failure needs handed-on
results, each call that makes one is tried by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueup.analysis.ddmin import fewest
from trueup.analysis.rerun.chain_process import Recorded, Trying
from trueup.analysis.rerun.minimise import Signature
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.execution.cases import Chain
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls

MOST_BYTES = 1 << 31  # of recorded inputs of all calls that are tried together
MOST_BROKEN = 64  # calls that cannot be executed and are left out, at most


@dataclass(frozen=True)
class Context:
    """What was found."""

    chain: Chain | None  # the fewest calls that show it, in memory; None: none do
    notes: list[str] = field(default_factory=list)


def find_context(calls: RecordedCalls, target: RecordedCall, trying: Trying, seconds: float) -> Context:
    """Find the fewest earlier calls that make ``target``, right by itself, fail, in a capture of detail ``tensor``. ``trying``
    executes each set afresh; after ``seconds`` the smallest set so far is taken."""
    before = earlier(calls, target)
    search = _Search(Path(calls.capture.path), target, trying, time.monotonic() + seconds)
    widest: Sequence[RecordedCall] = ()
    for chosen in widened(before, target):
        widest = max(widest, chosen, key=len)
        if search.fails([call.seq for call in chosen]):
            break
        if search.late:
            break
    if search.wanted is None:
        return Context(None, [_nothing(before, widest, search, seconds)])
    needed = search.reduced()
    others = "one other call" if len(needed) == 1 else f"{len(needed)} other calls"
    notes = [f"by itself it is right; it fails after {others}, found in {trying.tried} executions of sets of calls"]
    if search.late:
        notes.append(f"stopped after {seconds:g} s: fewer calls may do")
    linked = not search.fails(needed, linked=False)
    spoiled = search.wrong_alone(needed) if linked else None
    if spoiled is not None:
        named = next(c for c in before if c.seq == spoiled)
        notes.append(f"call {spoiled} before it ({named.key.op}) is wrong by itself and hands that on: name that one")
        return Context(None, notes)
    settled = trying.settle(search.chosen(needed, linked=linked))
    return Context(settled.get("chain"), notes)


def _nothing(before: Sequence[RecordedCall], widest: Sequence[RecordedCall], search: _Search, seconds: float) -> str:
    if not before:
        return "no call before it is in the capture: there is no context to try"
    late = f" (stopped after {seconds:g} s)" if search.late else ""
    of = f"the {len(widest)} calls of its level before it" if len(widest) > 1 else "the call of its level before it"
    if len(widest) < len(before):
        of = f"{len(widest)} of the {len(before)} calls of its level before it"
    broken = f"; {len(search.broken)} of them cannot be executed again" if search.broken else ""
    return f"it is right by itself, and right after {of}, too{late}{broken}"


def earlier(calls: RecordedCalls, target: RecordedCall) -> list[RecordedCall]:
    """Return the calls of a level that were executed before a call in its step and earlier ones, none within another."""
    rank, level = target.key.rank, target.key.level
    of_step = {c.seq: c for c in calls.of_step(rank, target.key.step, ("aten", "api", "module"))}
    around = set(_parents(of_step, target))
    found: list[RecordedCall] = []
    for step in sorted((s for s in calls.capture.steps if s <= target.key.step), reverse=True):
        ours = {c.seq: c for c in calls.of_step(rank, step, (level,))}
        inside = {s for s, c in ours.items() if any(p in ours and p not in around for p in _parents(ours, c))}
        kept = [c for s, c in ours.items() if s < target.seq and s not in around and s not in inside and _executable(c)]
        found = [*sorted(kept, key=lambda c: c.seq), *found]
    return found


def _parents(calls: Mapping[int, RecordedCall], call: RecordedCall) -> Iterator[int]:
    seq = call.parent
    while seq is not None:
        yield seq
        seq = calls[seq].parent if seq in calls else None


def _executable(call: RecordedCall) -> bool:
    plain = all(t.strides is not None for t in call.tensors.values())
    return bool(call.outputs) and call.invocation is not None and plain and call.key.phase != "collective"


def widened(before: Sequence[RecordedCall], target: RecordedCall) -> Iterator[list[RecordedCall]]:
    """Yield ever larger sets of earlier calls in order of execution: the makers of the inputs, then the last call of the same kind
    and shapes, then the last 4, 16, 64 ... calls."""
    by_seq = {call.seq: call for call in before}
    seen: set[tuple[int, ...]] = set()

    def new(chosen: Sequence[RecordedCall]) -> Iterator[list[RecordedCall]]:
        mark = tuple(call.seq for call in chosen)
        if mark and mark not in seen:
            seen.add(mark)
            yield list(chosen)

    yield from new(made_inputs(by_seq, target, 1))
    yield from new([c for c in before if _same_kind(c, target)][-1:])
    yield from new(made_inputs(by_seq, target, 3))
    count = 4
    while True:
        chosen = _affordable(before[-count:])
        yield from new(chosen)
        if len(chosen) < count:
            return
        count *= 4


def made_inputs(before: Mapping[int, RecordedCall], target: RecordedCall, depth: int) -> list[RecordedCall]:
    """Return the calls that made what a call reads, and their makers, ``depth`` times."""
    found: dict[int, RecordedCall] = {}
    edge = [target]
    for _ in range(depth):
        seqs = {t.producer[0] for call in edge for t in call.inputs.values() if t.producer is not None}
        edge = [before[s] for s in seqs if s in before and s not in found]
        found |= {call.seq: call for call in edge}
    return [call for _, call in sorted(found.items())]


def _same_kind(call: RecordedCall, target: RecordedCall) -> bool:
    shapes = ([(t.dtype, t.shape) for t in c.outputs.values()] for c in (call, target))
    return call.kind == target.kind and next(shapes) == next(shapes)


def _affordable(chosen: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the last calls whose inputs fit together into memory."""
    left, kept = MOST_BYTES, []
    for call in reversed(chosen):
        left -= sum(t.numel * numpy_dtype(t.dtype).itemsize for t in call.inputs.values())
        if left < 0:
            break
        kept.append(call)
    return kept[::-1]


class _Search:
    def __init__(self, capture: Path, target: RecordedCall, trying: Trying, until: float) -> None:
        self._capture, self._target, self._trying, self._until = capture, target, trying, until
        self._failing: list[int] = []
        self.wanted: Signature | None = None
        self.broken: set[int] = set()

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._until

    def chosen(self, seqs: Sequence[int], *, linked: bool = True) -> Recorded:
        """Return a set of calls with the target."""
        return Recorded(self._capture, self._target.key.rank, (*seqs, self._target.seq), linked)

    def fails(self, seqs: Sequence[int], *, linked: bool = True) -> bool:
        """Tell whether the target fails after these calls: for the first time, or as it did."""
        answer = self._judge(seqs, linked)
        found = Signature.of(answer)
        if found is None or found.verdict != "wrong" or not (self.wanted is None or self.wanted.same(found)):
            return False
        self.wanted = self.wanted or found
        self._failing = [seq for seq in seqs if seq not in self.broken]
        return True

    def _judge(self, seqs: Sequence[int], linked: bool) -> dict[str, Any]:
        while True:
            kept = [seq for seq in seqs if seq not in self.broken]
            answer = self._trying.judge(self.chosen(kept, linked=linked))
            broken = answer.get("broken")
            if broken is None or broken in self.broken or len(self.broken) >= MOST_BROKEN or self.late:
                return answer
            self.broken.add(broken)

    def reduced(self) -> list[int]:
        """Return the fewest calls with which it fails: none can be left out, as far as the time goes."""
        fewest(self._failing, lambda seqs: not self.late and self.fails(seqs))
        return self._failing

    def wrong_alone(self, seqs: Sequence[int]) -> int | None:
        """Return the first of some calls that is wrong by itself."""
        rank = self._target.key.rank
        for seq in seqs:
            found = Signature.of(self._trying.judge(Recorded(self._capture, rank, (seq,))))
            if found is not None and found.verdict == "wrong":
                return seq
        return None
