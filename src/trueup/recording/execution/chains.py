"""Calls of a capture executed one after the other, of which the last is the one that matters: a call with its context.

>>> calls = RecordedCalls(trueup.open_capture("runs/cpu"))
>>> chain = Chain.of(calls, [calls.at(0, 4705), calls.at(0, 4711)])
>>> chain.links[1]                            # the second call reads what the first one wrote
{'input.0': Link(maker=0, slot='output.0', laid=(768, 1), start=0, whole=True)}

What a call reads of another one of the chain is handed on as it lies in the device's memory; all else is loaded as it was recorded.
No framework is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trueup.foundation.facts.operators import has
from trueup.foundation.model import TrueupError
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.execution.cases import Case
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls, RecordedTensor, tensor_nodes

Slot = tuple[int, str]
"""Place of a call in a chain, and its slot."""


@dataclass(frozen=True)
class Link:
    """A tensor that a call reads, as a part of another call's result."""

    maker: int
    """Place of the other call in the chain."""
    slot: str
    """Its result."""
    laid: tuple[int, ...]
    """Strides of that result where it was recorded."""
    start: int
    """Elements of memory between the first of the result and the first that is read."""
    whole: bool
    """Whether it is the result itself, and no view."""


@dataclass(frozen=True)
class Chain:
    """Calls in the order of their execution."""

    cases: tuple[Case, ...]
    """The last one is the target."""
    links: tuple[Mapping[str, Link], ...]
    """For each of them, what it reads of others, by slot."""

    @property
    def target(self) -> Case:
        """The call whose results count."""
        return self.cases[-1]

    @property
    def size(self) -> int:
        """Bytes that have to be kept to execute it: inputs that no other call of it makes."""
        return sum(t.numel * numpy_dtype(t.dtype).itemsize for t in self.inputs.values())

    @staticmethod
    def alone(case: Case) -> Chain:
        """Return a call without any other."""
        return Chain((case,), ({},))

    @staticmethod
    def of(calls: RecordedCalls, chosen: Sequence[RecordedCall], *, linked: bool = True) -> Chain:
        """Take calls of one rank out of a capture; their elements stay there until they are read.

        Args:
            calls: of the capture.
            chosen: in the order of execution; the last is the target.
            linked: hand results on; else every call is given what was recorded.

        Raises:
            TrueupError: the forward call of a backward one is not there.
        """
        ranks, home = Case.surroundings(calls)
        cases = tuple(Case(call, _forward(calls, call), home, ranks) for call in chosen)
        places = {call.seq: k for k, call in enumerate(chosen)}
        links = tuple(dict(_links(case, k, places, cases)) if linked else {} for k, case in enumerate(cases))
        return Chain(cases, links)

    @property
    def inputs(self) -> dict[Slot, RecordedTensor]:
        """What is loaded: all that its calls are given and no other one of them makes."""
        pairs = enumerate(zip(self.cases, self.links, strict=True))
        return {(k, slot): t for k, (case, links) in pairs for slot, t in case.inputs.items() if slot not in links}

    @property
    def rigid(self) -> bool:
        """Whether a call reads a view of another's result, whose place follows from sizes."""
        return any(not link.whole for links in self.links for link in links.values())

    def with_target(self, case: Case) -> Chain:
        """Return it with another target, such as one with other results."""
        return replace(self, cases=(*self.cases[:-1], case))

    def with_tensors(self, arrays: Mapping[Slot, NDArray[Any]], *, plain: bool = False) -> Chain:
        """Return it with other elements, also of other shapes (`Case.with_tensors`)."""
        own: list[dict[str, NDArray[Any]]] = [{} for _ in self.cases]
        for (k, slot), array in arrays.items():
            own[k][slot] = array
        return replace(self, cases=tuple(c.with_tensors(a, plain=plain) for c, a in zip(self.cases, own, strict=True)))

    def with_invocation(self, k: int, invocation: Mapping[str, Any]) -> Chain:
        """Return it with one call made otherwise."""
        return replace(self, cases=tuple(c.with_invocation(invocation) if n == k else c for n, c in enumerate(self.cases)))

    def without(self, slot: Slot) -> Chain:
        """Return it without a tensor: an argument that is None, a gradient that is not received."""
        return replace(self, cases=tuple(c.without(slot[1]) if n == slot[0] else c for n, c in enumerate(self.cases)))

    def with_random(self, random: Mapping[str, bytes]) -> Chain:
        """Return it with these states of the generators before each call that has one."""
        return replace(self, cases=tuple(c.with_random(random) if c.made.random else c for c in self.cases))

    def unlinked(self) -> Chain:
        """Return it with nothing handed on: every call loads what was recorded."""
        return replace(self, links=tuple({} for _ in self.links))

    def without_links_of(self, makers: frozenset[int]) -> Chain:
        """Return it with results of these calls loaded as recorded: random ones, which another device draws otherwise."""
        links = tuple({s: link for s, link in each.items() if link.maker not in makers} for each in self.links)
        return replace(self, links=links)

    def held(self) -> Chain:
        """Return it with the elements of its inputs in memory."""
        return replace(self, cases=tuple(case.in_memory() for case in self.cases))

    # ---------------------------------------------------------------- between our processes
    def write(self, path: Path) -> None:
        """Write it to files: ``path`` and one beside it for each call."""
        links = [{slot: asdict(link) for slot, link in each.items()} for each in self.links]
        path.write_text(json.dumps(links), encoding="utf-8")
        for k, case in enumerate(self.cases):
            case.write(path.with_name(f"{path.name}-{k}"))

    @staticmethod
    def read(path: Path) -> Chain:
        """Read what `write` wrote; not for files of strangers."""
        read = json.loads(path.read_text(encoding="utf-8"))
        links = tuple({slot: Link(**link | {"laid": tuple(link["laid"])}) for slot, link in each.items()} for each in read)
        return Chain(tuple(Case.read(path.with_name(f"{path.name}-{k}")) for k in range(len(links))), links)


def _forward(calls: RecordedCalls, call: RecordedCall) -> RecordedCall | None:
    if call.key.level != "api" or call.key.phase != "backward":
        return None
    if call.forward_seq is None:
        raise TrueupError("The capture does not say of which forward call this is the backward")
    return calls.at(call.key.rank, call.forward_seq)


def _links(case: Case, place: int, places: Mapping[int, int], cases: Sequence[Case]) -> Iterator[tuple[str, Link]]:
    """Yield what a call reads of earlier ones; arguments that share memory come all from others, or none of them."""
    found = {slot: _link(case, slot, t, place, places, cases) for slot, t in case.inputs.items()}
    for slot, link in found.items():
        together = [found[s] for s in _sharing(case, slot) if s in found]
        if link is not None and all(other is not None and other.maker == link.maker for other in together):
            yield slot, link


def _link(
    case: Case, slot: str, read: RecordedTensor, place: int, places: Mapping[int, int], cases: Sequence[Case]
) -> Link | None:  # fmt: skip
    if read.producer is None or slot.startswith("grad_") or not read.numel or read.strides is None:
        return None
    maker = places.get(read.producer[0], place)
    if maker >= place:
        return None
    other = cases[maker]
    made = other.call.tensors.get(read.producer[1])
    if made is None or made.strides is None or (made.dtype, made.device) != (read.dtype, read.device):
        return None
    start = _offset(case, slot) - _offset(other, _written(read.producer[1]))
    whole = (made.shape, made.strides) == (read.shape, read.strides) and start == 0
    if whole and made.digest != read.digest:  # memory that was overwritten unseen
        return None
    if not whole and not 0 <= start <= start + _extent(read) <= _extent(made):
        return None
    return Link(maker, read.producer[1], made.strides, start, whole)


def _written(slot: str) -> str:
    """Return the argument that a result is the memory of; of a new one, no slot."""
    return slot.replace("output.written", "input", 1) if slot.startswith("output.written") else slot


def _offset(case: Case, slot: str) -> int:
    node = _nodes(case).get(slot)
    if node is None and slot.startswith("output.") and has(case.made.key.op, "in-place"):  # the result is the first argument
        node = _nodes(case).get("input.0")
    offset = (node or {}).get("offset", 0)
    return offset if type(offset) is int else 0


def _sharing(case: Case, slot: str) -> list[str]:
    nodes = _nodes(case)
    group = nodes.get(slot, {}).get("shares", slot)
    return [s for s, node in nodes.items() if node.get("shares", s) == group]


def _nodes(case: Case) -> dict[str, Mapping[str, Any]]:
    made = case.made.invocation or {}
    return {str(node["tensor"]): node for node in tensor_nodes([made.get("args"), made.get("kwargs")])}


def _extent(tensor: RecordedTensor) -> int:
    """Return how many elements of memory there are from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides or (), strict=True))
