"""Shrinking calls that fail while the same failure stays: sizes, then arguments, then values.

A step is kept where the calls still run on the device that is right, and the one that is wrong fails alike: same verdict, same
result (slot), same kind of error (NaN and Inf, integers, numbers), relative error within a factor of `FACTOR`. Sizes are changed
together: what has one size in several tensors and arguments is one thing (batch, sequence, channels), and sizes that are its
multiples, or follow it at a distance (a convolution's output), are tried along. Greedy, with delta debugging's halves (Zeller and
Hildebrandt 2002) for lists; whatever a step breaks is told by executing it, in a process of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trueup.analysis.rerun.shrinking_arguments import invocation, leaves, plainer, put, replaced, rounder, simpler, tensor_lists
from trueup.analysis.rerun.shrinking_sizes import halved, resized
from trueup.analysis.rerun.trying import Trying
from trueup.recording.execution.chains import Chain
from trueup.recording.execution.outcomes import Outcome

FACTOR = 10.0
"""The relative error of a shrunk call lies within this factor of the original's: the failure is the same one, in size too."""


@dataclass(frozen=True)
class Minimised:
    """Shrunk calls, and what there is to say."""

    chain: Chain
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Signature:
    """What makes two failures the same."""

    verdict: str
    slot: str
    kind: str
    error: float

    @staticmethod
    def of(answer: Mapping[str, Any]) -> Signature | None:
        """Return the signature of an answer; None where nothing failed."""
        if "crashed" in answer:
            return Signature("crashed", "", answer["crashed"], 0.0)
        outcome: Outcome | None = answer.get("outcome")
        if outcome is None or outcome.verdict != "wrong":
            return None
        kinds = ("not finite", "integers", "form of the result", "saturation")
        kind = next((k for k in kinds if k in outcome.rule), "numbers")
        return Signature("wrong", outcome.slot, kind, outcome.error)

    def same(self, other: Signature | None) -> bool:
        """Tell whether another failure is this one."""
        if other is None or (self.verdict, self.slot, self.kind) != (other.verdict, other.slot, other.kind):
            return False
        if self.kind != "numbers" or not (math.isfinite(self.error) and self.error > 0):
            return True
        return self.error / FACTOR <= other.error <= self.error * FACTOR


def minimise(chain: Chain, trying: Trying, seconds: float, executions: int | None = None) -> Minimised:
    """Shrink calls of which the last fails.

    Args:
        chain: it fails on the device of ``trying``; its elements are in memory.
        trying: executes candidates.
        seconds: after which the smallest one so far is returned.
        executions: so is it after that many.
    """
    before = trying.tried
    first = Signature.of(trying.judge(chain))
    if first is None:
        return Minimised(chain, ["it was not shrunk, for by itself it does not fail"])
    search = _Search(chain, trying, first, time.monotonic() + seconds, math.inf if executions is None else before + executions)
    search.run()
    late = f"; stopped after {seconds:g} s, it may become smaller" if search.late else ""
    sizes = f"from {chain.size:,} to {search.best.size:,} bytes of inputs"
    text = f"shrunk {sizes} in {trying.tried - before} executions, with the same failure{late}"
    return Minimised(search.best, [text])


class _Search:
    def __init__(self, chain: Chain, trying: Trying, wanted: Signature, until: float, most: float) -> None:
        self.best, self._trying, self._wanted, self._until, self._most = chain, trying, wanted, until, most
        self._seen: set[Any] = set()
        self._crashes: set[Any] = set()

    @property
    def late(self) -> bool:
        """Whether the time is over, or all executions are made."""
        return time.monotonic() > self._until or self._trying.tried >= self._most

    def run(self) -> None:
        """Shrink until nothing changes any more, or the time is over."""
        if any(self.best.links):
            self._try(self.best.unlinked())
        while not self.late:
            before = self.best
            for step in (self._plain, self._dropped, self._sizes, self._attributes, self._lists):
                step()
            if self.best is before:
                break
        for step in (self._values, self._random):
            step()

    def _try(self, chain: Chain) -> bool:
        if self.late or (mark := _mark(chain)) in self._seen:
            return False
        self._seen.add(mark)
        form = tuple((s, t.shape) for s, t in chain.inputs.items()), repr([c.made.invocation for c in chain.cases])
        if form in self._crashes:
            return False
        if self._wanted.verdict == "crashed" and "chain" not in self._trying.settle(chain):
            return False  # it is not executed where it should be either
        answer = self._trying.judge(chain)
        if "crashed" in answer and self._wanted.verdict != "crashed":
            self._crashes.add(form)  # such as a kernel that trusts its shapes; starting a process again takes seconds
        if not self._wanted.same(Signature.of(answer)):
            return False
        self.best = chain
        return True

    def _first(self, candidates: Iterator[Chain]) -> bool:
        return any(self._try(chain) for chain in candidates)

    def _sizes(self) -> None:
        tried: set[int] = set()
        while not self.late and not self.best.rigid:
            sizes = {n for t in self.best.inputs.values() for n in t.shape if n > 1} - tried
            if not sizes:
                return
            size = min(sizes)  # what others are multiples of comes first
            tried.add(size)
            for smaller in dict.fromkeys((1, 2, 3, 4, size // 8, size // 4, size // 2, size - 1)):
                if 0 < smaller < size and self._first(resized(self.best, size, smaller)):
                    tried.discard(smaller)
                    break

    def _plain(self) -> None:
        self._first(plainer(self.best))

    def _dropped(self) -> None:
        """Drop arguments that are tensors, and gradients that are received."""
        for k, slot in list(self.best.inputs):
            if slot.startswith("grad_"):
                others = [s for s in self.best.inputs if s[0] == k and s[1].startswith("grad_") and s[1] != slot]
                if others:
                    self._try(self.best.without((k, slot)))
                continue
            made = replaced(invocation(self.best, k), slot)
            self._try(self.best.without((k, slot)).with_invocation(k, made))

    def _attributes(self) -> None:
        for place, value in list(leaves(self.best)):
            for other in simpler(value):
                if self._try(put(self.best, place, other)):
                    break

    def _lists(self) -> None:
        for place, nodes in list(tensor_lists(self.best)):
            halves = (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :])
            for half in halves if len(nodes) > 1 else ():
                if self._first(halved(self.best, place, nodes, half)):
                    break

    def _random(self) -> None:
        """Let the generators begin at seed 0, whose state need not be kept."""
        state = self._trying.seeded
        random = {kind: s for case in self.best.cases for kind, s in case.made.random.items()}
        if any(len(s) == len(state) and s != state for s in random.values()):
            self._try(self.best.with_random(dict.fromkeys(random, state)))

    def _values(self) -> None:
        for slot in list(self.best.inputs):
            for array in rounder(self.best.inputs[slot].array()):
                if self._try(self.best.with_tensors({slot: array})):
                    break


def _mark(chain: Chain) -> Any:
    tensors = tuple((s, t.dtype, t.shape, t.strides, hash(t.array().tobytes())) for s, t in chain.inputs.items())
    made = repr([case.made.invocation for case in chain.cases])
    return tensors, made, hash(frozenset(item for case in chain.cases for item in case.made.random.items()))
