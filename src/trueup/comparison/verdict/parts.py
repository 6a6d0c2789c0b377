"""What a run of calls without counterpart may be wrong by: what its parts grant, carried through the run.

Each call is judged against itself, so that the criterion's row says what rounding makes in it. Relative errors add by the root of
their squares; an addition passes on absolute ones, so that what cancels grows, and an exponential makes a relative error of an
absolute one. The rounding of a half type that one run alone computes in is granted to no run of calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from math import hypot
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.comparison.graph.readers import Readers
from trueup.comparison.graph.streams import NONE, Alignment, Numbers, Stream
from trueup.comparison.measures.measure import measure
from trueup.comparison.verdict.judge import judge
from trueup.foundation.facts.criteria import Criterion, Row
from trueup.foundation.facts.slots import SINGLE, is_incoming_gradient, is_input, is_output, roundoff
from trueup.foundation.store.declared import Precision

BRANCHES = ("branch", "pole", "sign")  # kinds of rows by which a small error of a few inputs may change all of an element


@dataclass(frozen=True, slots=True)
class Grant:
    """What a run makes of its own, and times what it multiplies the errors that go in; relative to its result."""

    own: float
    gain: float


class Parts:
    """The calls of one side without counterpart. What a dtype of a unit roundoff above ``coarsest`` loses is a difference.
    ``flow`` says of which gradients autograd made a sum between recorded calls."""

    def __init__(self, flow: Readers, calls: Numbers, criterion: Criterion, coarsest: float) -> None:
        self.flow, self._ceiling = flow, coarsest
        self.stream = stream = flow.stream
        self._own, self._slots = _judged(stream, calls, criterion) if len(calls) else ({}, {})
        self._found: dict[int, Grant] = {}
        self._most = Grant(0.0, 1.0)  # of all of them

    def again(self) -> Parts:
        """Return the same calls, of which no run was looked at yet."""
        found = copy(self)
        found._found, found._most = {}, Grant(0.0, 1.0)
        return found

    def of(self, ends: Iterable[int] | None, calls: set[int]) -> Grant:
        """Return what a run of calls grants the results of some of them; of None, of any."""
        for call in sorted(calls - self._found.keys()):
            self._found[call] = its = self._of(call)
            self._most = Grant(max(self._most.own, its.own), max(self._most.gain, its.gain))
        if ends is None:
            return self._most
        found = [self._found[call] for call in ends]
        return Grant(max((one.own for one in found), default=0.0), max((one.gain for one in found), default=1.0))

    def cancels(self, k: int) -> tuple[float, float]:
        """Return times what its call grants its best result the one is granted that a slot holds, and times the errors of what goes
        in that is off by: of a sum (a bias's gradient) or a mean little may be left but the errors of its terms."""
        stream, found, pending, seen = self.stream, [(1.0, 1.0)], [k], {NONE}
        while pending:
            k = pending.pop()
            call, made = int(stream.producers[k]), list(self.flow.parts(k))
            for j in made or ([k] if call == NONE else [stream.slots(call).get(int(stream.producer_slot[k]), NONE)]):
                row = None if j in seen else self._own.get(int(stream.call[j]), (0.0, None))[1]
                seen.add(j)
                if row is not None and row.own == "exact":  # a view of it, or a copy
                    pending += stream.slots_of(int(stream.call[j]), is_input).tolist()
                elif row is not None:
                    own, sums = self._slots.get(j, 1.0), row.own == "reduction"  # what goes in cancels as its roundings do
                    read = stream.slots_of(int(stream.call[j]), is_input if sums else is_incoming_gradient)
                    its = read[(stream.numel[read] > stream.numel[j]) & (sums or stream.shapes.ndim[j] == 1)]
                    found.append((own, max(own, stream.norms[its].max(initial=0.0) / (stream.norms[j] or np.inf))))
        return max(one for one, _ in found), max(one for _, one in found)

    def rows(self, calls: Iterable[int]) -> list[Row]:
        """Return the criterion's rows of some of the calls."""
        return [self._own[call][1] for call in calls]

    def coarsest(self, calls: Iterable[int]) -> float:
        """Return the unit roundoff of the coarsest dtype that some of the calls compute in. It is that of their results; of a
        function, whose operators may have cast what it was given, that of its operands too."""
        aten, found = self.stream.names.number("aten"), [0.0]
        for call in calls:
            read, made = self._roundoffs(call)
            found += [made] if self.stream.level[call] == aten else [made, *read]
        return min(max(found), self._ceiling)

    def _roundoffs(self, call: int) -> tuple[list[float], float]:
        """Return the unit roundoff of each floating-point tensor that a call reads, and of the coarsest that it makes."""
        stream = self.stream
        found = [(stream.names.names[slot], roundoff(stream.dtype_of(k))) for slot, k in stream.slots(call).items()]
        read = [unit for name, unit in found if is_input(name) and unit > 0]
        return read, max((unit for name, unit in found if is_output(name)), default=0.0)

    def _of(self, call: int) -> Grant:
        stream, (own, row) = self.stream, self._own[call]
        slots = [(k, stream.names.names[slot]) for slot, k in stream.slots(call).items()]
        inputs, outputs = ([k for k, name in slots if of(name)] for of in (is_input, is_output))
        norm, size = (max((float(of[k]) for k in outputs if np.isfinite(of[k])), default=0) for of in (stream.norms, stream.numel))
        gain = 0.0
        read, made = self._roundoffs(call)
        if made > self._ceiling:
            own, made = own * self._ceiling / made, self._ceiling
        if made > SINGLE:  # a cast, or one inside: on the other side it need not be there
            own = hypot(own, made * sum(unit < made for unit in read) ** 0.5)
        for k in inputs:
            makers = stream.call[self.flow.parts(k)].tolist() or [int(stream.producers[k])]
            grants = [self._found.get(maker, Grant(0.0, 1.0)) for maker in makers]
            given = Grant(max(one.own for one in grants), max(one.gain for one in grants))
            times, numel = 1.0, float(stream.numel[k])
            if row.own == "additive" and norm > 0 < numel:
                times = float(stream.norms[k]) / norm * max(1.0, size / numel) ** 0.5
            elif row.carry == "exponential" and numel > 0:
                times = max(1.0, float(stream.norms[k]) / numel**0.5)
            times = times if np.isfinite(times) else 1.0
            own, gain = hypot(own, times * given.own), hypot(gain, times * given.gain)
        return Grant(own, gain)


def _judged(stream: Stream, calls: Numbers, criterion: Criterion) -> tuple[dict[int, tuple[float, Row]], dict[int, float]]:
    """Return what each call, compared with itself, may be wrong by of its own, and the criterion's row of it; and by slot, how many
    times the least of its call's results each is granted."""
    none = np.empty(0, np.int64)
    alone = Alignment(calls, calls, none, none, np.zeros(len(calls), np.int8), {})
    verdicts = judge(measure(alone, stream, stream, (_unread, _unread)), criterion, Precision())
    own, rows = verdicts.own.tolist(), [criterion.rows[n] for n in verdicts.rows.tolist()]
    errors, granted = verdicts.errors, verdicts.slot_expected
    at = np.flatnonzero((granted > 0) & np.isfinite(granted))
    least = np.full(len(calls), np.inf)
    np.minimum.at(least, errors.pair[at], granted[at])
    slots = dict(zip(errors.slots[1][at].tolist(), (granted[at] / least[errors.pair[at]]).tolist(), strict=True))
    return dict(zip(calls.tolist(), zip(own, rows, strict=True), strict=True)), slots


def coarsest(stream: Stream) -> float:
    """Return the unit roundoff of the coarsest floating-point dtype of a run's results, at least that of float32."""
    rounds = stream.names.table(roundoff)[stream.dtype]
    return float(max(SINGLE, rounds[stream.names.table(is_output)[stream.slot]].max(initial=0.0)))


def _unread(*_: object) -> NDArray[Any] | None:
    """Stand for tensors that need no reading: a call is compared with itself, and its statistics do for that."""
    return None
