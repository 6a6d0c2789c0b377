"""One recorded call, executed where it was recorded: does it give the recorded bits?

A call that is code (a custom autograd function, a function that takes a function) is not in a capture and cannot be executed.
What it computed was computed by the calls inside it, which can: it is reproduced by its parts where each of those gives its
recorded bits and every result of the call is, bit for bit, one of theirs or one of its own inputs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.recording.execution.judging import Judging, P
from trueup.recording.execution.outcomes import BY_PARTS, Outcome
from trueup.recording.execution.places import NotReplayable
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls
from trueup.recording.execution.results import apart, outcome, same_bytes

MOST_PARTS = 10_000
"""Calls inside a call that are executed for it."""


class Bitwise(Judging[P]):
    """Executes calls of a capture where they were recorded; see `Judging`."""

    def __init__(self, calls: RecordedCalls, device: str) -> None:
        super().__init__(calls, device, draws=False)
        self._inside: tuple[tuple[int, int], dict[int, list[RecordedCall]]] | None = None

    def verify(self, call: RecordedCall) -> Outcome:
        """Execute a call and tell whether its results are the recorded ones, bit for bit."""
        started = time.perf_counter()
        return outcome(call, **self._found(call), seconds=time.perf_counter() - started)

    def _found(self, call: RecordedCall, depth: int = 0) -> dict[str, Any]:
        try:
            return self._verified(call)
        except (NotReplayable, TrueupError) as reason:
            said = " ".join(str(reason).split())
        return self._by_parts(call, said, depth) or {"verdict": "not replayed", "sentence": said}

    def _verified(self, call: RecordedCall) -> dict[str, Any]:
        result = self.execute(call, self.target)
        kept = {slot: t.array() for slot, t in call.outputs.items() if t.kept}
        if not kept:
            raise NotReplayable("no result of it was kept")
        got = result.arrays
        differing = [slot for slot, array in kept.items() if slot not in got or not same_bytes(array, got[slot])]
        if not differing:
            return {"verdict": "accurate", "sentence": "bitwise"}
        slot = differing[0]
        again = self.execute(call, self.target)
        if slot not in result.arrays:
            why = f"it gives no {slot} when it is executed alone"
        elif result.unwritten:
            why = f"it reads {', '.join(result.unwritten)}, memory that the capture does not hold"
        elif not same_bytes(result.arrays[slot], again.arrays[slot]):
            why = "it is not deterministic: two executions differ"
        elif result.random and not call.random:
            why = "it draws random numbers, and the state of the generator is not in the capture"
        else:
            why = f"{slot} is another on this machine: {apart(kept[slot], result.arrays[slot])}"
        return {"verdict": "wrong", "sentence": why, "slot": slot, "rule": "bitwise"}

    def _by_parts(self, call: RecordedCall, said: str, depth: int) -> dict[str, Any] | None:
        """Verify the calls inside one that cannot be executed; None where there are none."""
        parts = self._parts(call)
        if not parts or depth >= 32:
            return None
        if len(parts) > MOST_PARTS:
            return {"verdict": "not replayed", "sentence": f"{said}; it has more than {MOST_PARTS:,} calls inside"}
        known = _computed(call, parts)
        alien = [slot for slot, t in call.outputs.items() if t.digest is None or (t.digest, t.dtype) not in known]
        if alien:
            return {"verdict": "not replayed", "sentence": f"{said}; {alien[0]} is no result of the {len(parts)} calls inside it"}
        for part in parts:
            found = self._found(part, depth + 1)
            if found["verdict"] != "accurate":
                inside = f"of the calls inside it, call {part.seq}, {part.kind}, is not reproduced: {found['sentence']}"
                return {"verdict": found["verdict"], "sentence": f"{said}; {inside}"}
        return {"verdict": "accurate", "sentence": f"by its parts, {len(parts)} calls, for {said}", "rule": BY_PARTS}

    def _parts(self, call: RecordedCall) -> list[RecordedCall]:
        """Return the calls directly inside one that computed something."""
        place = call.key.rank, call.key.step
        if self._inside is None or self._inside[0] != place:
            found: dict[int, list[RecordedCall]] = defaultdict(list)
            for other in self._calls.of_step(*place):
                if other.parent is not None and other.computed:
                    found[other.parent].append(other)
            self._inside = place, found
        return self._inside[1].get(call.seq, [])


def _computed(call: RecordedCall, parts: Sequence[RecordedCall]) -> set[tuple[str | None, str]]:
    """Return digest and dtype of what a call was given and of what the calls inside it computed.

    A call that passes on what it got (a view, a copy) computes nothing: what came from outside PyTorch stays unknown.
    """
    known = {(t.digest, t.dtype) for t in call.inputs.values()}
    for part in parts:
        given = {(t.digest, t.dtype) for t in part.inputs.values()}
        known |= {(t.digest, t.dtype) for t in part.outputs.values()} - given
    return known
