"""Whether bad numbers changed a result: their call once more in float64, and then each call that reads them, with and without.

1. The call is executed in float64 with the inputs that it had. Where Inf, NaN or a dtype's largest number was recorded, what float64
   gives there is *the number that should have been*. Where float64 gives the same, a wider dtype changes nothing.
2. Each call that reads it is executed in float64 twice: with what was recorded, and with the number that should have been. A result
   that differs by no more than the rounding of its dtype (`trueup.rerun.local_error`) is *healed*; one that differs is followed on.
3. All healed: *harmless*. A finite loss, gradient or weight that differs: *accuracy-relevant*. Else *unknown*, and why.

Both executions of a reader are in float64, so what differs is the effect of the bad numbers and no rounding.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trueup.anomalies import kinds
from trueup.anomalies.flow import LOSS, VIEWS
from trueup.anomalies.found import Matters
from trueup.anomalies.step_calls import Slot, StepCalls
from trueup.model import TrueupError
from trueup.report.wording import counted, number, one_line
from trueup.rerun.cases import HeldTensor
from trueup.rerun.local_error import Distance, judge, thresholds
from trueup.rerun.recorded import RecordedCall, RecordedTensor
from trueup.rerun.rounding import Operand, Operation, rounding
from trueup.verdict.names import normalised

MOST_CALLS = 300
MOST_SECONDS = 20.0
"""What is followed of one anomaly at most."""
NAMED = 3

Arrays = Mapping[str, NDArray[Any]]


class Untold(Exception):
    """A call could not be executed or followed; the text says why."""


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


@dataclass(frozen=True, slots=True)
class _Changed:
    """A slot that holds other numbers without the anomaly."""

    tensor: RecordedTensor
    without: NDArray[Any]
    """In the recorded shape."""


class Followed:
    """Follows the bad numbers of one call through its step.

    Args:
        step: the calls.
        execute: in float64.
    """

    def __init__(self, step: StepCalls, execute: Executor) -> None:
        self._step, self._execute = step, execute
        self._changed: dict[Slot, _Changed] = {}
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
        largest = max(float(np.abs(one.without[one.without != _wide(one.tensor.array())]).max()) for one in intended.values())
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
    def _intended(self, call: RecordedCall) -> dict[str, _Changed]:
        truth = self._run(call, {})
        found = {}
        for slot, tensor in call.outputs.items():
            bad = _bad(tensor)
            if slot not in truth or not bad.any():
                continue
            wide, recorded = truth[slot], _wide(tensor.array())
            if wide.shape != recorded.shape:
                raise Untold(f"float64 gives {slot} another shape")
            other = bad & ~((wide == recorded) | (np.isnan(wide) & np.isnan(recorded)))
            if other.any():
                found[slot] = _Changed(tensor, np.where(other, wide, recorded))
        return found

    def _as_meant(self, call: RecordedCall) -> Effect:
        values = [tensor.array()[_bad(tensor)] for tensor in call.outputs.values()]
        if all(np.isfinite(_wide(v)).all() for v in values):
            return Effect("harmless", "float64 gives the same numbers from the same inputs: they are no overflow", same=True)
        why = "float64 gives the same from the same inputs: it is what the formula gives, and a wider dtype does not change it"
        return Effect("unknown", why, same=True)

    # ---------------------------------------------------------------- who reads it
    def _tell(self, call: RecordedCall, slot: str, changed: _Changed) -> None:
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
        return normalised(call.key.op) in VIEWS

    def _give(self, seq: int, name: str, changed: _Changed) -> None:
        reader = self._step.calls[seq]
        if reader.key.op in LOSS:
            self._lasts(f"the loss is {_sizes(changed)}", changed)
            return
        try:
            tensor = reader.tensors[name]
            seen = _shown(changed, tensor)
            self._given.setdefault(seq, {})[name] = HeldTensor(
                name, tensor.dtype, tensor.shape, tensor.strides, tensor.device, tensor.numbers, None, held=seen
            )  # fmt: skip
            self._push(seq)
        except (Untold, TrueupError) as reason:
            self._unknown.append(f"{_name(reader)} could not be followed: {_line(reason)}")

    def _push(self, seq: int) -> None:
        if seq not in self._queue:
            heapq.heappush(self._queue, seq)

    def _next(self, call: RecordedCall) -> None:
        """Execute a call with and without the anomaly, and follow what differs."""
        try:
            recorded, without = self._as_recorded(call), self._run(call, self._given)
            differing = [slot for slot in without if slot in call.outputs and self._differs(call, slot, recorded, without)]
        except (Untold, TrueupError) as reason:
            self._unknown.append(f"{_name(call)}, which reads it, could not be executed again: {_line(reason)}")
            return
        if not differing:
            self._healers[_name(call)] = None
        for slot in differing:
            tensor = call.outputs[slot]
            if not tensor.kept:
                self._unknown.append(f"what {_name(call)} gave was not kept: record with --detail tensor")
                continue
            own = _wide(tensor.array())
            apart = ~((recorded[slot] == without[slot]) | ((recorded[slot] != recorded[slot]) & (without[slot] != without[slot])))
            self._tell(call, slot, _Changed(tensor, np.where(apart, without[slot], own)))

    def _as_recorded(self, call: RecordedCall) -> Arrays:
        """Return what a call gives in float64 with the bad numbers.

        The backward of an api call is executed with what its forward read, and not with what that saved: Inf in a result that it
        saved shows in the recorded gradient alone, so what is bad there counts as it was recorded.
        """
        found = dict(self._run(call, {}))
        if call.key.level == "api" and call.key.phase == "backward":
            for slot, tensor in call.outputs.items():
                if slot in found and tensor.kept and found[slot].shape == tensor.shape:
                    found[slot] = np.where(_bad(tensor), _wide(tensor.array()), found[slot])
        return found

    def _run(self, call: RecordedCall, given: Mapping[int, Mapping[str, RecordedTensor]]) -> Arrays:
        forward = None
        if call.key.level == "api" and call.key.phase == "backward":
            forward = self._step.calls.get(-1 if call.forward_seq is None else call.forward_seq)
            if forward is None:
                raise Untold("its forward call is not in the capture")
            forward = _with(forward, given.get(forward.seq, {}))
        return self._execute.execute(_with(call, given.get(call.seq, {})), forward)

    def _differs(self, call: RecordedCall, slot: str, recorded: Arrays, without: Arrays) -> bool:
        """Tell whether a result is another than the rounding of its dtype explains."""
        a, b = without[slot], recorded.get(slot)
        if b is None or a.shape != b.shape:
            raise Untold(f"float64 gives {slot} another shape")
        operation, dtype = Operation(call.key.op, call.key.level, call.key.phase), call.outputs[slot].dtype
        distance = Distance.of(a, _floored(a, b, dtype))
        if not (distance.differing or distance.disagreeing):
            return False
        read = [_operand(tensor) for tensor in call.inputs.values()]
        rms = distance.truth_rms * np.sqrt(max(distance.counted, 1))
        output = Operand(slot, dtype, call.outputs[slot].shape, float(rms))
        explained = rounding(operation, read, [output], roundings=thresholds().of(operation).roundings)[slot]
        return judge(operation, dtype, distance, None, rounding=explained).verdict != "accurate"

    # ---------------------------------------------------------------- where it ends
    def _ends(self, call: RecordedCall, slot: str, changed: _Changed) -> None:
        """Judge a changed result that no call reads."""
        phase = call.key.phase
        if phase in ("backward", "optimizer"):
            what = "a gradient" if phase == "backward" else "a weight or an optimizer's state"
            self._lasts(f"{what} ({_name(call)} {slot}) is {_sizes(changed)}", changed)
        elif changed.tensor.numel == 1 and self._step.has_backward(call.seq):
            self._lasts(f"the loss is {_sizes(changed)}", changed)
        else:
            self._differs_at_end = True
            self._unknown.append(f"{_name(call)} gives {_sizes(changed)}, which no recorded call reads")

    def _lasts(self, said: str, changed: _Changed) -> None:
        recorded = _wide(changed.tensor.array())
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


# ---------------------------------------------------------------- tensors
def _with(call: RecordedCall, given: Mapping[str, RecordedTensor]) -> RecordedCall:
    return replace(call, tensors={**call.tensors, **given}) if given else call


def _bad(tensor: RecordedTensor) -> NDArray[np.bool_]:
    """Return which elements are NaN, Inf or the dtype's largest number."""
    if not tensor.kept:
        raise Untold(f"{tensor.slot} was not kept: record with --detail tensor")
    try:
        wide = _wide(tensor.array())
    except TrueupError as error:
        raise Untold(_line(error)) from None
    if wide.dtype.kind not in "fc":
        return np.zeros(wide.shape, bool)
    return np.asarray(~np.isfinite(wide) | (np.abs(wide) == kinds.largest(tensor.dtype)))


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind in "biuc":
        return array
    return array.astype(np.float64)


def _shown(changed: _Changed, tensor: RecordedTensor) -> NDArray[Any]:
    """Return what a reader sees of a changed slot: the same memory, perhaps through a view.

    Raises:
        Untold: which of its elements are which cannot be told.
    """
    recorded = _wide(tensor.array())
    if tensor.buffer is not None and tensor.buffer == changed.tensor.buffer:
        there, wanted = changed.tensor.positions().reshape(-1), tensor.positions()
        order = np.argsort(there, kind="stable")
        at = np.minimum(np.searchsorted(there[order], wanted), len(order) - 1)
        known = there[order][at] == wanted
        return np.where(known, changed.without.reshape(-1)[order][at], recorded)
    before = changed.tensor.array()
    if before.size == recorded.size and np.array_equal(_wide(before).reshape(-1), recorded.reshape(-1), equal_nan=_is_float(recorded)):
        return changed.without.reshape(recorded.shape)
    raise Untold("it reads a part of the memory that cannot be told from the rest")


def _floored(a: NDArray[Any], b: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return ``b``, but what lies within the smallest number of the dtype of ``a`` as ``a``: it would be rounded away."""
    limits = kinds.limits(dtype) if a.dtype.kind == "f" else None
    if limits is None:
        return b
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(a - b) <= limits[2], a, b)


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "fc"


def _operand(tensor: RecordedTensor) -> Operand:
    l2 = tensor.numbers["l2"]
    if isinstance(tensor, HeldTensor) and tensor.kept:
        finite = tensor.array()[np.isfinite(tensor.array())] if _is_float(tensor.array()) else np.zeros(0)
        l2 = float(np.linalg.norm(finite.astype(np.float64)))
    return Operand(tensor.slot, tensor.dtype, tensor.shape, 0.0 if l2 is None or np.isnan(l2) else l2)


# ---------------------------------------------------------------- words
def _sizes(changed: _Changed) -> str:
    """Say how far apart the recorded and the intended numbers are."""
    recorded = _wide(changed.tensor.array())
    if changed.tensor.numel == 1:
        return f"{_word(changed.without.reshape(-1)[0])} and not {_word(recorded.reshape(-1)[0])}"
    distance = Distance.of(changed.without, recorded)
    if distance.disagreeing:
        return f"finite in {distance.disagreeing:,} elements that were recorded as NaN or Inf"
    return f"off by {distance.relative:.1%} of its norm"


def _word(value: Any) -> str:
    wide = float(value)
    return number(wide) if np.isfinite(wide) else {True: "NaN", False: "Inf"}[bool(np.isnan(wide))]


def _name(call: RecordedCall) -> str:
    return one_line(f"{call.key.scope}/{call.key.op}" if call.key.scope else call.key.op)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
