"""What a step reads and did not make: data, weights, an optimizer's state; and whether a step before left it bad, or too large."""

from __future__ import annotations

import numpy as np

from trueup.analysis.anomalies.flow import Source
from trueup.analysis.anomalies.memory import Memory, grown
from trueup.comparison.graph.streams import NONE, Numbers, Stream

FAR = 20_000
"""Calls that are looked at behind an overflow, to find weights that grew."""


class Outside:
    """Tensors of a step that no call of it made.

    Args:
        stream: the step.
        memory: what the step before left.
        lasting: slots of forward calls that show such tensors.
    """

    def __init__(self, stream: Stream, memory: Memory, lasting: Numbers) -> None:
        self.stream, self.memory = stream, memory
        self.grown = grown(stream, lasting, memory.lasting)
        self.due: set[tuple[int, int]] = set()
        """Step and place of anomalies of steps before whose bad numbers this step read."""

    def follows(self, source: Source) -> bool:
        """Tell whether a bad tensor from outside is the doing of an anomaly of a step before."""
        stream, memory = self.stream, self.memory
        key = int(stream.producer[source.slot]), int(stream.producer_slot[source.slot])
        found = memory.written.get(key)
        if found is None and memory.pending and self.is_parameter(source.slot):
            found = memory.pending[0]
        if found is None:
            return False
        self.due.add(found)
        return True

    def is_parameter(self, k: int) -> bool:
        """Tell whether a tensor from outside is a weight: by its slot, its optimizer, or because it gets a gradient."""
        stream, call = self.stream, int(self.stream.call[k])
        name = stream.names.name(int(stream.slot[k])) or ""
        if name.startswith("param.") or stream.names.name(int(stream.phase[call])) == "optimizer":
            return True
        before = self.memory.stream
        if stream.producer[k] >= 0 and before is not None:
            made = before.find(int(stream.producer[k]))
            if made >= 0:
                return before.names.name(int(before.phase[made])) == "optimizer"
        return self._gets_a_gradient(call, name)

    def _gets_a_gradient(self, call: int, slot: str) -> bool:
        stream = self.stream
        around = call
        wanted = stream.names.number("grad_input." + slot.removeprefix("input."))
        while around != NONE:
            later = np.flatnonzero((stream.forward_seq == stream.seq[around]) & (stream.phase == stream.names.number("backward")))
            if any(wanted in stream.slots(int(c)) for c in later.tolist()):
                return around == call
            around = int(stream.parents[around])
        return False

    def grown_behind(self, call: int) -> tuple[int, float] | None:
        """Return the first weight behind a call that grew too much in the step before, and how many times."""
        if not self.grown:
            return None
        stream = self.stream
        pending, seen = [call], {call}
        while pending and len(seen) < FAR:
            at = pending.pop()
            around = [int(stream.index(stream.forward_seq[at : at + 1])[0])] if stream.forward_seq[at] >= 0 else []
            for k in range(*stream.starts[at : at + 2].tolist()):
                if k in self.grown and self.is_parameter(k):  # and no batch of larger numbers
                    return k, self.grown[k]
                if stream.producer[k] >= 0:
                    around.append(stream.find(int(stream.producer[k])))
            fresh = {c for c in around if c >= 0} - seen
            seen |= fresh
            pending += fresh
        return None
