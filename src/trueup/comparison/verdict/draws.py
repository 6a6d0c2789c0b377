"""Whether a suspected call is wrong, or draws from a generator that stands elsewhere.

Captures of detail ``tensor`` keep the state of the generators (docs/format.md). Where that is another one, the difference begins in
it and not in the call. A call that draws among other things (attention with dropout) is known by the state that it leaves behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from trueup.comparison.graph.streams import NONE, Numbers, Stream, distinct
from trueup.comparison.verdict.judged import SIDES, Part, Suspect
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import says
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.store.call_columns import Known, States, states_of


class RandomStates:
    """The generators of both sides; matched calls are indices into either stream."""

    def __init__(self, streams: tuple[Stream, Stream], calls: tuple[Numbers, Numbers]) -> None:
        known: Known = {}
        self.sides = tuple(states_of(stream, known) for stream in streams)
        self._streams, self._calls = streams, calls
        devices, both = sorted(self.sides[0].before.keys() & self.sides[1].before.keys()), list(zip(self.sides, calls, strict=True))
        self.states = {device: tuple(side.before[device][of] for side, of in both) for device in devices}
        """By device, before each matched call, on both sides."""

    def differ(self, pair: int) -> bool | None:
        """Tell whether a generator stands elsewhere when a matched call begins; None where that is not known."""
        known = [first[pair] != second[pair] for first, second in self.states.values() if NONE not in (first[pair], second[pair])]
        return any(known) if known else None

    def draw(self, pair: int) -> bool:
        """Tell whether a matched call draws random numbers, on either side."""
        sides = list(zip(self._streams, self.sides, self._calls, strict=True))
        return any(_draws(stream, its, int(calls[pair]), device) for device in self.states for stream, its, calls in sides)

    def first(self) -> tuple[int, str] | None:
        """Return the first matched call before which a generator stands elsewhere, and its device; None where there is none."""
        found = []
        for device, (first, second) in self.states.items():
            apart = np.flatnonzero((first != second) & (first != NONE) & (second != NONE))
            found += [(int(apart[0]), device)] if len(apart) else []
        return min(found, default=None)


def _draws(stream: Stream, states: States, call: int, device: str) -> bool:
    """Tell whether the state after a call is another one than before."""
    before = states.before[device]
    for later in states.described[np.searchsorted(states.described, call, "right") :].tolist():
        if stream.step[later] != stream.step[call]:
            return False
        if call not in stream.around(later):
            return bool(before[later] != before[call])
    return False


def explain_draws(part: Part, suspects: Iterable[Suspect], criterion: Criterion, earlier: Reason | None) -> None:
    """Say of suspects that draw random numbers whether their generator stood elsewhere; such a one is of kind ``random``.
    ``earlier`` is what one side alone drew in an earlier step."""
    wanted = [s for s in suspects if s.kind in ("operator", "random") and s.judged.call.candidate.level != "module"]
    if not wanted:
        return
    errors, states = part.verdicts.errors, RandomStates(part.streams, part.verdicts.errors.calls)
    for suspect in wanted:
        call = part.streams[1].find(suspect.place)
        pair = int(np.searchsorted(errors.calls[1], call)) if call != NONE else len(errors.calls[1])
        if pair >= len(errors.calls[1]) or errors.calls[1][pair] != call:
            continue
        differ = states.differ(pair)
        inside = suspect.kind == "operator" and _draws_inside(part.streams[1], call)
        if not (suspect.judged.row.random or inside or states.draw(pair)):
            continue
        if differ:
            suspect.kind, suspect.because = "random", (_begins(part, states, criterion),)
        elif differ is False:
            suspect.because = (Why.SAME_STATE(),)
        elif not (suspect.kind == "operator" and suspect.judged.row.random):  # else its result shows that it drew the same
            alone = alone_before(part, criterion, suspect.place) or earlier
            if alone is not None or inside:
                suspect.kind = "random"
                suspect.because = (Why.DREW_BEFORE(alone) if alone else Why.UNKNOWN_STATE(),)


def begins_elsewhere(part: Part) -> Reason | None:
    """Return that a generator stands elsewhere when a step begins, None where none is known to."""
    states = RandomStates(part.streams, part.verdicts.errors.calls)
    found = states.first()
    if found is None:
        return None
    step = int(part.streams[1].step[part.verdicts.errors.calls[1][found[0]]])
    return Why.GENERATOR_SINCE(part.rank, found[1], step)


def _begins(part: Part, states: RandomStates, criterion: Criterion) -> Reason:
    first = states.first()
    assert first is not None
    pair, device = first
    call = part.streams[1].row(int(part.verdicts.errors.calls[1][pair]))
    alone = alone_before(part, criterion, call.seq)
    steps = part.streams[1].step[part.verdicts.errors.calls[1][:pair]]
    earlier = any(states.differ(n) is False for n in np.flatnonzero(steps == call.step).tolist())
    return Why.GENERATOR(device, Why.SINCE_CALL(call.key, alone) if earlier else Why.SINCE_STEP(call.step, alone))


def alone_before(part: Part, criterion: Criterion, place: float = math.inf) -> Reason | None:
    """Return the last call before a place that only one side has and that draws random numbers."""
    for side, only in ((1, part.alignment.only_candidate), (0, part.alignment.only_baseline)):
        stream = part.streams[side]
        before = only[stream.seq[only] < (place if side else _counterpart(part, place))]
        ops = {op: stream.names.name(op) or "" for op in distinct(stream.op[before]).tolist()}
        draw = [op for op, name in ops.items() if any(criterion.row(name, level, "forward").random for level in ("api", "aten"))]
        if len(before := before[np.isin(stream.op[before], draw)]):
            row = stream.row(int(before[-1]))
            return Why.ONE_SIDE_DREW(row.key, SIDES[side], row.site)
    return None


def _counterpart(part: Part, place: float) -> float:
    baseline, candidate = part.streams
    calls = part.verdicts.errors.calls
    at = int(np.searchsorted(candidate.seq[calls[1]], place))
    return int(baseline.seq[calls[0][at]]) if at < len(calls[0]) else math.inf


def _draws_inside(stream: Stream, call: int) -> bool:
    """Tell by its arguments whether a function drops something out."""
    drops = says(stream.names.name(int(stream.op[call])) or "", "drops")
    if drops is None:
        return False
    given = stream.given(call)
    shares, training = ([given[name] for name in drops[of] if name in given] for of in ("share", "training"))
    return any(isinstance(p, (int, float)) and p > 0 for p in shares) and all(told is not False for told in training)
