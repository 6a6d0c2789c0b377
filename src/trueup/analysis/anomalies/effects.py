"""Whether bad numbers changed a result: their call once more in float64, and then each call that reads them, with and without.

1. The call is executed in float64 with the inputs that it had. Where Inf, NaN or a dtype's largest number was recorded, what
   float64 gives there is *the number that should have been*. Where float64 gives the same, a wider dtype changes nothing.
2. Each call that reads it is executed in float64 twice: with what was recorded, and with the number that should have been. A result
   that differs by no more than the rounding of its dtype (`execution.local_error`) is *healed*; one that differs is followed on.
3. All healed: *harmless*. A finite loss, gradient or weight that differs: *accuracy-relevant*. Else *unknown*, and why.

Both executions of a reader are in float64, so what differs is the effect of the bad numbers and no rounding.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.anomalies.step_calls import Slot, StepCalls
from trueup.foundation.facts.anomaly import Matters
from trueup.foundation.facts.operators import has
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import counted, number
from trueup.recording.execution.cases import HeldTensor
from trueup.recording.execution.effect_tensors import (
    Changed,
    Untold,
    bad_elements,
    floored,
    line_of,
    name_of,
    operand,
    shown,
    sizes,
    wide,
    with_tensors,
)
from trueup.recording.execution.local_error import Distance, judge
from trueup.recording.execution.recorded import RecordedCall, RecordedTensor
from trueup.recording.execution.rounding import Operand, Operation, rounding

MOST_CALLS = 300
MOST_SECONDS = 20.0
"""What is followed of one anomaly at most."""
NAMED = 3

Arrays = Mapping[str, NDArray[Any]]


class Executor(Protocol):
    """Executes recorded calls in float64."""

    def execute(self, call: RecordedCall, forward: RecordedCall | None) -> Arrays:
        """Return what a call gives, by slot.

        Args:
            call: with the inputs that it is to have.
            forward: of a backward call of level api, its forward call.

        Raises:
            Untold: it cannot be executed again, and why.
        """


@dataclass(frozen=True, slots=True)
class Effect:
    """What bad numbers did."""

    matters: Matters
    because: str
    same: bool = False
    """Whether float64 gives the same numbers: a wider dtype is no remedy."""
    differs: bool = False
    """Whether something came out other than it should have."""


class Followed:
    """Follows the bad numbers of one call through its step.

    Args:
        step: the calls.
        execute: in float64.
    """

    def __init__(self, step: StepCalls, execute: Executor) -> None:
        self._step, self._execute = step, execute
        self._changed: dict[Slot, Changed] = {}
        self._given: dict[int, dict[str, RecordedTensor]] = {}
        """Call -> its slots that are other numbers without the anomaly."""
        self._queue: list[int] = []
        self._healers: dict[str, None] = {}
        self._lasting: list[str] = []
        self._unknown: list[str] = []
        self._differs_at_end = False
        self._until = 0.0

    def effect(self, seq: int) -> Effect:
        """Return what the bad numbers that a call made did."""
        self._until = time.monotonic() + MOST_SECONDS
        call = self._step.calls.get(seq)
        if call is None:
            return Effect("unknown", "a module is code, which no capture holds: record level api or aten too")
        try:
            intended = self._intended(call)
        except Untold as reason:
            return Effect("unknown", f"its call could not be executed again: {reason}")
        if not intended:
            return self._as_meant(call)
        largest = max(float(np.abs(one.without[one.without != wide(one.tensor.array())]).max()) for one in intended.values())
        head = f"in their place float64 gives up to {number(largest)}"
        if not np.isfinite(largest):
            return Effect("unknown", "in their place float64 gives other numbers that are not finite either")
        for slot, one in intended.items():
            self._tell(call, slot, one)
        followed = 0
        while self._queue:
            followed += 1
            if followed > MOST_CALLS or time.monotonic() > self._until:
                self._unknown.append(f"it goes through more than {followed - 1} calls, which are not followed further")
                break
            self._next(self._step.calls[heapq.heappop(self._queue)])
        return self._verdict(head, followed)

    # ---------------------------------------------------------------- the call itself
    def _intended(self, call: RecordedCall) -> dict[str, Changed]:
        truth = self._run(call, {})
        found = {}
        for slot, tensor in call.outputs.items():
            bad = bad_elements(tensor)
            if slot not in truth or not bad.any():
                continue
            meant, recorded = truth[slot], wide(tensor.array())
            if meant.shape != recorded.shape:
                raise Untold(f"float64 gives {slot} another shape")
            other = bad & ~((meant == recorded) | (np.isnan(meant) & np.isnan(recorded)))
            if other.any():
                found[slot] = Changed(tensor, np.where(other, meant, recorded))
        return found

    def _as_meant(self, call: RecordedCall) -> Effect:
        values = [tensor.array()[bad_elements(tensor)] for tensor in call.outputs.values()]
        if all(np.isfinite(wide(v)).all() for v in values):
            return Effect("harmless", "float64 gives the same numbers from the same inputs: they are no overflow", same=True)
        why = "float64 gives the same from the same inputs: it is what the formula gives, and a wider dtype does not change it"
        return Effect("unknown", why, same=True)

    # ---------------------------------------------------------------- who reads it
    def _tell(self, call: RecordedCall, slot: str, changed: Changed) -> None:
        """Queue the calls to which a changed slot matters; where there are none it ends here."""
        place = call.seq, slot
        self._changed[place] = changed
        readers = self._step.readers(place)
        for seq, name in readers:
            self._give(seq, name, changed)
        later = {b for seq, _ in (place, *readers) for b in self._step.backward_of(seq)}
        for seq in later:
            self._push(seq)
        if not later and not self._is_view(call) and not any(self._leads_on(seq) for seq, _ in readers):
            self._ends(call, slot, changed)

    def _leads_on(self, seq: int) -> bool:
        """Tell whether a reader is more than a view that nobody reads: who reads a view reads what is behind it."""
        call = self._step.calls[seq]
        return not self._is_view(call) or any(self._step.readers((seq, slot)) for slot in call.outputs)

    @staticmethod
    def _is_view(call: RecordedCall) -> bool:
        return has(call.key.op, "view")

    def _give(self, seq: int, name: str, changed: Changed) -> None:
        reader = self._step.calls[seq]
        if has(reader.key.op, "loss"):
            self._lasts(f"the loss is {sizes(changed)}", changed)
            return
        try:
            tensor = reader.tensors[name]
            seen = shown(changed, tensor)
            self._given.setdefault(seq, {})[name] = HeldTensor(
                name, tensor.dtype, tensor.shape, tensor.strides, tensor.device, tensor.numbers, None, held=seen
            )  # fmt: skip
            self._push(seq)
        except (Untold, TrueupError) as reason:
            self._unknown.append(f"{name_of(reader)} could not be followed: {line_of(reason)}")

    def _push(self, seq: int) -> None:
        if seq not in self._queue:
            heapq.heappush(self._queue, seq)

    def _next(self, call: RecordedCall) -> None:
        """Execute a call with and without the anomaly, and follow what differs."""
        try:
            recorded, without = self._as_recorded(call), self._run(call, self._given)
            differing = [slot for slot in without if slot in call.outputs and self._differs(call, slot, recorded, without)]
        except (Untold, TrueupError) as reason:
            self._unknown.append(f"{name_of(call)}, which reads it, could not be executed again: {line_of(reason)}")
            return
        if not differing:
            self._healers[name_of(call)] = None
        for slot in differing:
            tensor = call.outputs[slot]
            if not tensor.kept:
                self._unknown.append(f"what {name_of(call)} gave was not kept: record with --detail tensor")
                continue
            own = wide(tensor.array())
            apart = ~((recorded[slot] == without[slot]) | ((recorded[slot] != recorded[slot]) & (without[slot] != without[slot])))
            self._tell(call, slot, Changed(tensor, np.where(apart, without[slot], own)))

    def _as_recorded(self, call: RecordedCall) -> Arrays:
        """Return what a call gives in float64 with the bad numbers.

        The backward of an api call is executed with what its forward read, and not with what that saved: Inf in a result that it
        saved shows in the recorded gradient alone, so what is bad there counts as it was recorded.
        """
        found = dict(self._run(call, {}))
        if call.key.level == "api" and call.key.phase == "backward":
            for slot, tensor in call.outputs.items():
                if slot in found and tensor.kept and found[slot].shape == tensor.shape:
                    found[slot] = np.where(bad_elements(tensor), wide(tensor.array()), found[slot])
        return found

    def _run(self, call: RecordedCall, given: Mapping[int, Mapping[str, RecordedTensor]]) -> Arrays:
        forward = None
        if call.key.level == "api" and call.key.phase == "backward":
            forward = self._step.calls.get(-1 if call.forward_seq is None else call.forward_seq)
            if forward is None:
                raise Untold("its forward call is not in the capture")
            forward = with_tensors(forward, given.get(forward.seq, {}))
        return self._execute.execute(with_tensors(call, given.get(call.seq, {})), forward)

    def _differs(self, call: RecordedCall, slot: str, recorded: Arrays, without: Arrays) -> bool:
        """Tell whether a result is another than the rounding of its dtype explains."""
        a, b = without[slot], recorded.get(slot)
        if b is None or a.shape != b.shape:
            raise Untold(f"float64 gives {slot} another shape")
        operation, dtype = Operation(call.key.op, call.key.level, call.key.phase), call.outputs[slot].dtype
        distance = Distance.of(a, floored(a, b, dtype))
        if not (distance.differing or distance.disagreeing):
            return False
        read = [operand(tensor) for tensor in call.inputs.values()]
        rms = distance.truth_rms * np.sqrt(max(distance.counted, 1))
        output = Operand(slot, dtype, call.outputs[slot].shape, float(rms))
        explained = rounding(operation, read, [output])[slot]
        return judge(operation, dtype, distance, None, rounding=explained).verdict != "accurate"

    # ---------------------------------------------------------------- where it ends
    def _ends(self, call: RecordedCall, slot: str, changed: Changed) -> None:
        """Judge a changed result that no call reads."""
        phase = call.key.phase
        if phase in ("backward", "optimizer"):
            what = "a gradient" if phase == "backward" else "a weight or an optimizer's state"
            self._lasts(f"{what} ({name_of(call)} {slot}) is {sizes(changed)}", changed)
        elif changed.tensor.numel == 1 and self._step.has_backward(call.seq):
            self._lasts(f"the loss is {sizes(changed)}", changed)
        else:
            self._differs_at_end = True
            self._unknown.append(f"{name_of(call)} gives {sizes(changed)}, which no recorded call reads")

    def _lasts(self, said: str, changed: Changed) -> None:
        recorded = wide(changed.tensor.array())
        if np.isfinite(recorded).all():
            self._lasting.append(said)
        else:
            self._differs_at_end = True
            self._unknown.append(f"{said}; whether the run used it was not recorded")

    def _verdict(self, head: str, followed: int) -> Effect:
        calls = counted(followed, "call")
        if self._lasting:
            return Effect("accuracy-relevant", f"{head}, and with that {self._lasting[0]} ({calls} executed again)")
        if self._unknown:
            return Effect("unknown", f"{head}; {self._unknown[0]}", differs=self._differs_at_end)
        names = ", ".join(list(self._healers)[:NAMED])
        why = f"{head}, and with that {names} give{'s' if len(self._healers) == 1 else ''} the same, but for rounding"
        return Effect("harmless", f"{why} ({calls} executed again)")
