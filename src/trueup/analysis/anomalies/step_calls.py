"""The calls of a step that can be executed again, and who reads what they gave: for `effects`."""

from __future__ import annotations

from collections import defaultdict

from trueup.comparison.graph.streams import is_input
from trueup.foundation.facts.operators import has
from trueup.foundation.store import Capture
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls, RecordedTensor

Slot = tuple[int, str]
"""Execution number of a call, and one of its slots."""


class StepCalls:
    """The calls of one rank and step, by execution number, with the dataflow between them.

    What runs inside another recorded call is executed in its place: of nested calls the innermost.
    """

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
