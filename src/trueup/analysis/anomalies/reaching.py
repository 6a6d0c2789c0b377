"""What the bad numbers of a step reach: followed back from the last call to the first, over `flow`.

A value that no call reads is judged by where it stands: a gradient in the backward, weights or state in an optimizer, "unread"
elsewhere; a result that stays inside the function around its operator is healed where that function's results are clean.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from trueup.analysis.anomalies.flow import Flow, Source
from trueup.comparison.graph.streams import NONE
from trueup.foundation.facts.operators import has

UNSCALING = "_amp_foreach_non_finite_check_and_unscale"

GRADIENTS, LOST, PARAMETERS, UNREAD, RANKS = 1, 2, 4, 8, 16
"""What a value reaches, as bits."""


def reach(flow: Flow) -> None:
    """Fill in what each source reaches (``Source.reached``)."""
    _Reach(flow)


class _Reach:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        stream = flow.stream
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for k in np.flatnonzero((self.flow.bits > 0) & self.flow.reads & (self.flow.producer >= 0)).tolist():
            readers[int(self.flow.producer[k])].append(int(stream.call[k]))
        backward: defaultdict[int, list[int]] = defaultdict(list)
        for call in self.flow.calls:
            if self.flow.phase(call) == "backward" and stream.forward_seq[call] >= 0:
                backward[int(stream.forward_seq[call])].append(call)
        self.reached: dict[int, int] = {}
        self._by_call: dict[int, int] = {}
        for call in reversed(self.flow.calls):
            given = self.flow.bad_outputs(call)
            total = 0
            for k in given:
                found, read = 0, False
                asked = self.flow.root[k] if self.flow.asked[k] else NONE
                for reader in readers.get(k, ()):
                    mark, told = self._of_reader(reader, asked, whole=self.flow.is_float(k))
                    found, read = found | mark, read or told
                for around in (call, *readers.get(k, ())):
                    found |= self._in_backward(around, backward, asked)
                found |= self._around(call, k)
                if not read and not found:
                    found |= self._dangling(call, k)
                self.reached[k] = found
                total |= found
            if given:
                self._by_call[call] = total
        for root, source in enumerate(self.flow.sources):
            source.reached = self._source_reaches(root, source, backward)

    def _of_reader(self, call: int, asked: int, *, whole: bool = True) -> tuple[int, bool]:
        """Return what a value reaches through one call that reads it, and whether that call tells anything.

        What a float became tells only as a float; of an integer, integers tell.
        ``asked`` is the source of an infinity that was asked for, else `NONE`: what a call gives that is bad for another reason is
        not its doing.
        """
        if has(self.flow.op(call), "loss"):
            return LOST | GRADIENTS, True
        given = self.flow.bad_outputs(call)
        if not given:
            computes = not has(self.flow.op(call), "shape")
            tells = self.flow.is_float if whole else self.flow.is_number
            return 0, computes and any(self.flow.gives[k] and tells(k) for k in self.flow.slots(call))
        if asked != NONE and not any(self._is_of(self.flow.root[k], asked) for k in given):
            return 0, True
        mark = self._by_call.get(call, 0)
        if self.flow.phase(call) == "collective":
            return mark | RANKS, True
        if mark == UNREAD and (all(self.flow.asked[k] for k in given) or has(self.flow.op(call), "view")):
            return 0, False  # a view tells nothing: what reads the view is said to read the tensor
        return mark, True

    def _is_of(self, root: int, asked: int) -> bool:
        return root == asked or asked in self.flow.sources[root].of

    def _around(self, call: int, k: int) -> int:
        """Return what the same tensor reaches as a result of the call around this one."""
        parent = int(self.flow.stream.parents[call])
        if parent < 0 or parent not in self._by_call:
            return 0
        same = any(self.flow.fingerprint(j) == self.flow.fingerprint(k) for j in self.flow.bad_outputs(parent))
        return self._by_call[parent] if same else 0

    def _dangling(self, call: int, k: int) -> int:
        """Return what a bad value reaches that no recorded call reads."""
        parent = int(self.flow.stream.parents[call])
        if parent >= 0:
            around = [j for j in self.flow.slots(parent) if self.flow.gives[j]]
            if around and not any(self.flow.bits[j] for j in around):
                return 0  # it did not leave the call around it
            if parent in self._by_call:
                bad = [j for j in around if self.flow.bits[j]]
                if self.flow.asked.get(k) and not any(self._is_of(self.flow.root[j], self.flow.root[k]) for j in bad):
                    return UNREAD  # what the call around it gives is bad for another reason
                return self._by_call[parent]
        phase = self.flow.phase(call)
        if phase == "backward":  # what a view shows may be a tensor that the forward saved
            return UNREAD if self.flow.asked.get(k) or has(self.flow.op(call), "view") else GRADIENTS
        if phase == "optimizer":
            return PARAMETERS if self._writes_lasting(call, k) else GRADIENTS
        if phase == "collective":
            return RANKS
        return UNREAD

    def _writes_lasting(self, call: int, k: int) -> bool:
        """Tell whether an optimizer's call wrote weights or state: it read something clean of that shape which no backward made."""
        if UNSCALING in self.flow.op(call):
            return False
        stream = self.flow.stream
        shape = stream.shapes.exact[k]
        for j in self.flow.slots(call):
            if self.flow.reads[j] and not self.flow.bits[j] and stream.shapes.exact[j] == shape and self.flow.is_float(j):
                made = stream.find(int(stream.producer[j])) if stream.producer[j] >= 0 else NONE
                if made < 0 or self.flow.phase(made) not in ("backward", "collective"):
                    return True
        return False

    def _source_reaches(self, root: int, source: Source, backward: dict[int, list[int]]) -> int:
        found = 0
        if not source.outside:
            for k in self.flow.bad_outputs(source.call):
                found |= self.reached.get(k, 0)
            return found
        told = False
        for call in self.flow.first_readers[root]:
            asked = root if source.asked else NONE
            mark, says = self._of_reader(call, asked)
            found, told = found | mark | self._in_backward(call, backward, asked), told or says
        return found if found or told else UNREAD

    def _in_backward(self, call: int, backward: dict[int, list[int]], asked: int) -> int:
        """Return what the backward of a forward call reaches; ``asked`` as in `_of_reader`."""
        found = 0
        for group in self.flow.groups(call):
            for later in backward.get(group, ()):
                if asked == NONE or any(self._is_of(self.flow.root[k], asked) for k in self.flow.bad_outputs(later)):
                    found |= self._by_call.get(later, 0)
        return found
