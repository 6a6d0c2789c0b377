"""Does it matter? Calls are executed again in float64 if the records leave it open or call it healed.

A healed infinity gave clean numbers; only this tells whether they are the right ones.

1. The bad call is executed in float64 with its recorded inputs. Where Inf, NaN or a dtype's largest number was recorded, float64
   gives *the number that should have been*. If float64 gives the same bad number, a wider dtype changes nothing.
2. Each reader is executed in float64 twice: with the recorded number, and with the one that should have been. So a difference is
   the effect of the bad numbers and no rounding. A result that differs by no more than its dtype's rounding
   (`execution.local_error`) is *healed*; one that differs is followed on.
3. All healed: *harmless*. A finite loss, gradient or weight that differs: *accuracy-relevant*. Else *unknown*, and why.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.anomalies import flow
from trueup.analysis.anomalies.effects import FOLLOWED
from trueup.foundation.facts.anomaly import Anomaly, Matters, Severity
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import is_input
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture
from trueup.foundation.words.wording import counted, number, one_line
from trueup.recording.execution.cases import HeldTensor
from trueup.recording.execution.local_error import Distance, Operand, Operation, judge, rounding
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls, RecordedTensor, Untold

MOST = 20  # anomalies that are followed, those first that matter most


def is_open(one: Anomaly) -> bool:
    """Tell whether executing calls again can say more of an anomaly than the records do."""
    healed = one.matters == "harmless" and not one.reached
    return one.kind in FOLLOWED and one.place.seq >= 0 and (one.matters == "unknown" or healed)


def settled(found: Sequence[Anomaly], capture: Capture) -> tuple[list[Anomaly], list[str]]:
    """Return the anomalies as executing their calls again explains them, and notes; raises TrueupError if PyTorch, which executes
    them, is not installed, or the capture is of another framework."""
    waiting = [one for one in found if is_open(one)]
    if not waiting:
        return list(found), []
    from trueup.analysis.rerun.processes import only_torch

    only_torch(capture, "overflow --replay")
    try:
        from trueup.recording.adapters.torch.executing import executing
    except ImportError:
        raise TrueupError("--replay executes calls with PyTorch, which is not installed\n  next:     pip install torch") from None
    told: dict[int, Anomaly] = {}
    steps: dict[tuple[int, int], StepCalls] = {}
    with executing(capture) as execute:
        for one in waiting[:MOST]:
            place = one.place
            if (place.rank, place.step) not in steps:
                steps = {(place.rank, place.step): StepCalls(capture, place.rank, place.step)}
            effect = Followed(steps[place.rank, place.step], execute).effect(place.seq)
            told[id(one)] = _with(one, effect)
    notes = [f"{len(waiting) - MOST} further findings were not executed again"] if len(waiting) > MOST else []
    return [told.get(id(one), one) for one in found], notes


def _with(one: Anomaly, effect: Effect) -> Anomaly:
    """Replace the records' answer by that of executing again, if that says more."""
    told = dataclasses.replace(one, run_next="", policy="" if effect.same else one.policy)
    lasting = set(one.reached) - {"unread"}
    if effect.matters == "harmless" and lasting and one.kind != "saturated":
        got = " and ".join(name for name in one.reached if name in lasting)
        return dataclasses.replace(told, because=f"{one.because}; executed again, it was not met on its way to {got}")
    if effect.matters != "unknown":
        transient = effect.matters == "harmless"
        severity: Severity = "medium" if transient else "critical"
        return dataclasses.replace(told, matters=effect.matters, because=effect.because, transient=transient, severity=severity)
    if one.matters == "unknown":
        return dataclasses.replace(told, because=f"{one.because}; {effect.because}")
    if not effect.differs:
        return dataclasses.replace(told, because=f"{one.because}; whether those are right could not be told: {effect.because}")
    because = f"every call that reads it gives clean numbers, and wrong ones: {effect.because}"
    return dataclasses.replace(told, matters="unknown", because=because, transient=False, severity="high")


MOST_CALLS = 300
MOST_SECONDS = 20.0  # what is followed of one anomaly at most
NAMED = 3

Arrays = Mapping[str, NDArray[Any]]


class Executor(Protocol):
    """Executes recorded calls in float64."""

    def execute(self, call: RecordedCall, forward: RecordedCall | None) -> Arrays:
        """Return what a call gives, by slot; ``forward``: that of a backward api call. Raises Untold if it is not executed."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What bad numbers did."""

    matters: Matters
    because: str
    same: bool = False  # whether float64 gives the same numbers: a wider dtype is no remedy
    differs: bool = False  # whether something came out other than it should have


class Followed:
    """Follows the bad numbers of one call through its ``step``; ``execute`` computes a call in float64."""

    def __init__(self, step: StepCalls, execute: Executor) -> None:
        self._step, self._execute = step, execute
        self._changed: dict[Slot, Changed] = {}
        self._given: dict[int, dict[str, RecordedTensor]] = {}  # call -> its slots that are other numbers without the anomaly
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
            return Effect("unknown", "in their place float64 gives different numbers, which are not finite either")
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

    def _intended(self, call: RecordedCall) -> dict[str, Changed]:
        truth = self._run(call, {})
        found = {}
        for slot, tensor in call.outputs.items():
            bad = bad_elements(tensor)
            if slot not in truth or not bad.any():
                continue
            meant, recorded = truth[slot], wide(tensor.array())
            if meant.shape != recorded.shape:
                raise Untold(f"float64 gives {slot} a different shape")
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

    def _tell(self, call: RecordedCall, slot: str, changed: Changed) -> None:
        """Queue the calls to which a changed slot matters; without any it ends here."""
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
        """Tell whether a reader is more than a view that nobody reads: the readers of a view count as its own."""
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
        """Return what a call gives in float64 with the bad numbers. A backward api call runs with its forward's inputs, not the
        saved results: Inf in a saved result shows in the recorded gradient alone, so bad elements count as recorded."""
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
        """Tell whether a result differs by more than the rounding of its dtype."""
        a, b = without[slot], recorded.get(slot)
        if b is None or a.shape != b.shape:
            raise Untold(f"float64 gives {slot} a different shape")
        operation, dtype = Operation(call.key.op, call.key.level, call.key.phase), call.outputs[slot].dtype
        distance = Distance.of(a, floored(a, b, dtype))
        if not (distance.differing or distance.disagreeing):
            return False
        read = [operand(tensor) for tensor in call.inputs.values()]
        rms = distance.truth_rms * np.sqrt(max(distance.counted, 1))
        output = Operand(slot, dtype, call.outputs[slot].shape, float(rms))
        explained = rounding(operation, read, [output])[slot]
        return judge(operation, dtype, distance, None, rounding=explained).verdict != "accurate"

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


Slot = tuple[int, str]  # execution number of a call, and one of its slots


class StepCalls:
    """The calls of one rank and step by execution number, with their dataflow; of nested calls the innermost is executed."""

    def __init__(self, capture: Capture, rank: int, step: int) -> None:
        calls = RecordedCalls(capture).of_step(rank, step, ("aten", "api"))
        self.calls: dict[int, RecordedCall] = {call.seq: call for call in calls}
        self._around: dict[int, int] = {call.seq: call.parent for call in calls if call.parent in self.calls}
        self._outer = set(self._around.values())
        self._readers: defaultdict[Slot, list[Slot]] = defaultdict(list)
        names = ["seq", "slot", "producer_seq", "producer_slot"]
        table = capture.records(names, rank=rank, step=step)
        for seq, slot, made, place in zip(*(table[name].to_pylist() for name in names), strict=True):
            if made is not None and place is not None and seq in self.calls and is_input(slot):
                self._readers[made, place].append((seq, slot))
        self._backward: defaultdict[int, list[int]] = defaultdict(list)
        for call in calls:
            if call.key.phase == "backward" and call.forward_seq is not None:
                self._backward[call.forward_seq].append(call.seq)

    def readers(self, slot: Slot) -> list[Slot]:
        """Return who reads what a call gave, and in which slot: calls that can be executed, and the call of the loss."""
        found = {reader: None for same in self.same(slot) for reader in self._readers.get(same, ())}
        return [(seq, name) for seq, name in found if seq not in self._outer or has(self.calls[seq].key.op, "loss")]

    def same(self, slot: Slot) -> list[Slot]:
        """Return the slot, and those of the calls around its call that show the same bytes."""
        seq, name = slot
        found, tensor = [slot], self.calls[seq].tensors[name]
        while (outer := self._around.get(seq)) is not None:
            found += [(outer, other) for other, held in self.calls[outer].outputs.items() if _shows_the_same(tensor, held)]
            seq = outer
        return found

    def backward_of(self, seq: int) -> list[int]:
        """Return the backward calls of level api that belong to a call; at level aten they have inputs of their own."""
        return [b for b in self._backward.get(seq, ()) if self.calls[b].key.level == "api" and b not in self._outer]

    def has_backward(self, seq: int) -> bool:
        """Tell whether gradients went through a call, or one around it."""
        around: int | None = seq
        while around is not None:
            if around in self._backward:
                return True
            around = self._around.get(around)
        return False


def _shows_the_same(one: RecordedTensor, other: RecordedTensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (one.buffer is not None and one.buffer == other.buffer) or (one.digest is not None and one.digest == other.digest)


@dataclass(frozen=True, slots=True)
class Changed:
    """A slot that holds other numbers without the anomaly."""

    tensor: RecordedTensor
    without: NDArray[Any]  # in the recorded shape


def with_tensors(call: RecordedCall, given: Mapping[str, RecordedTensor]) -> RecordedCall:
    """Return a call with other tensors in some slots."""
    return replace(call, tensors={**call.tensors, **given}) if given else call


def bad_elements(tensor: RecordedTensor) -> NDArray[np.bool_]:
    """Return which elements are NaN, Inf or the dtype's largest number."""
    if not tensor.kept:
        raise Untold(f"{tensor.slot} was not kept: record with --detail tensor")
    try:
        held = wide(tensor.array())
    except TrueupError as error:
        raise Untold(line_of(error)) from None
    if not is_float(held):
        return np.zeros(held.shape, bool)
    return np.asarray(~np.isfinite(held) | (np.abs(held) == flow.largest(tensor.dtype)))


def wide(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as float64; integers and complex numbers as they are."""
    if array.dtype.kind in "biuc":
        return array
    return array.astype(np.float64)


def shown(changed: Changed, tensor: RecordedTensor) -> NDArray[Any]:
    """Return what a reader sees of a changed slot, perhaps through a view; raises Untold if its elements cannot be told apart."""
    recorded = wide(tensor.array())
    if tensor.buffer is not None and tensor.buffer == changed.tensor.buffer:
        there, wanted = changed.tensor.positions().reshape(-1), tensor.positions()
        order = np.argsort(there, kind="stable")
        at = np.minimum(np.searchsorted(there[order], wanted), len(order) - 1)
        known = there[order][at] == wanted
        return np.where(known, changed.without.reshape(-1)[order][at], recorded)
    before = wide(changed.tensor.array()).reshape(-1)
    if before.size == recorded.size and np.array_equal(before, recorded.reshape(-1), equal_nan=is_float(recorded)):
        return changed.without.reshape(recorded.shape)
    raise Untold("it reads a part of the memory that cannot be told from the rest")


def floored(a: NDArray[Any], b: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return ``b`` with the elements of ``a`` where they differ by less than the dtype's smallest number, which rounds away."""
    limits = flow.limits(dtype) if a.dtype.kind == "f" else None
    if limits is None:
        return b
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(a - b) <= limits[2], a, b)


def is_float(array: NDArray[Any]) -> bool:
    """Tell whether an array holds floating or complex numbers."""
    return array.dtype.kind in "fc"


def operand(tensor: RecordedTensor) -> Operand:
    """Return a tensor's numbers, as rounding is told by them."""
    l2 = tensor.numbers["l2"]
    if isinstance(tensor, HeldTensor) and tensor.kept:
        finite = tensor.array()[np.isfinite(tensor.array())] if is_float(tensor.array()) else np.zeros(0)
        l2 = float(np.linalg.norm(finite.astype(np.float64)))
    return Operand(tensor.slot, tensor.dtype, tensor.shape, 0.0 if l2 is None or np.isnan(l2) else l2)


def sizes(changed: Changed) -> str:
    """Say how far apart the recorded and the intended numbers are."""
    recorded = wide(changed.tensor.array())
    if changed.tensor.numel == 1:
        return f"{_word(changed.without.reshape(-1)[0])} and not {_word(recorded.reshape(-1)[0])}"
    distance = Distance.of(changed.without, recorded)
    if distance.disagreeing:
        return f"finite in {distance.disagreeing:,} elements that were recorded as NaN or Inf"
    return f"off by {distance.relative:.1%} of its norm"


def _word(value: Any) -> str:
    wide = float(value)
    return number(wide) if np.isfinite(wide) else {True: "NaN", False: "Inf"}[bool(np.isnan(wide))]


def name_of(call: RecordedCall) -> str:
    """Name a call: ``scope/op``."""
    return one_line(f"{call.key.scope}/{call.key.op}" if call.key.scope else call.key.op)


def line_of(error: BaseException) -> str:
    """Return what an exception says, in one line."""
    return " ".join(str(error).split())
