"""A recorded call taken out of its capture: all that executing it takes, in memory, to be changed and handed on.

>>> case = Case.of(RecordedCalls(trueup.open_capture("runs/cpu")), call)
>>> case.with_tensors({"input.0": case.call.tensors["input.0"].array()[:1]}).size
48

No framework is needed. A case travels between our own processes as a file of one line of JSON and the bytes of its tensors.

Calls of a capture executed one after the other, of which the last is the one that matters: a call with its context.

>>> calls = RecordedCalls(trueup.open_capture("runs/cpu"))
>>> chain = Chain.of(calls, [calls.at(0, 4705), calls.at(0, 4711)])
>>> chain.links[1]                            # the second call reads what the first one wrote
{'input.0': Link(maker=0, slot='output.0', laid=(768, 1), start=0, whole=True)}

What a call reads of another one of the chain is handed on as it lies in the device's memory; all else is loaded as it was recorded.
No framework is needed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.facts.operators import has
from trueup.foundation.model import CallKey, TrueupError
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.execution.decoding import contiguous, extent, nodes_of, sharing
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls, RecordedTensor, draw, home_of


@dataclass(frozen=True)
class HeldTensor(RecordedTensor):
    """A tensor whose elements are in memory."""

    held: NDArray[Any] | None = field(default=None, repr=False)

    @property
    def kept(self) -> bool:
        """Whether its elements are there: always."""
        return True

    def array(self) -> NDArray[Any]:
        """Return the elements in the recorded shape."""
        assert self.held is not None
        return self.held

    @staticmethod
    def of(
        slot: str, array: NDArray[Any], strides: tuple[int, ...] | None = None, device: str = "", dtype: str = ""
    ) -> HeldTensor:  # fmt: skip
        """Hold an array; without strides it is contiguous."""
        if strides is None:
            strides = contiguous(array.shape)
        return HeldTensor(slot, dtype or array.dtype.name, array.shape, strides, device, _numbers(array), None, held=array)


@dataclass(frozen=True)
class Case:
    """A call of level api or aten, and its forward call where it is the backward of an api call."""

    call: RecordedCall
    forward: RecordedCall | None
    home: str  # type of device of the capture: its tensors move to the device that is tried
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # devices and environment, as the manifests have them
    drawn: tuple[str, ...] = ()  # slots whose elements were drawn to match recorded numbers

    @property
    def made(self) -> RecordedCall:
        """The call that is executed: of a backward call of level api, its forward."""
        return self.forward or self.call

    @property
    def inputs(self) -> dict[str, RecordedTensor]:
        """What it takes to execute it, by slot: inputs, and gradients that it receives."""
        return self.made.inputs | {s: t for s, t in self.call.inputs.items() if self.forward is None or s.startswith("grad_")}

    @property
    def size(self) -> int:
        """Bytes of its inputs."""
        return sum(t.numel * numpy_dtype(t.dtype).itemsize for t in self.inputs.values())

    @staticmethod
    def of(calls: RecordedCalls, call: RecordedCall) -> Case:
        """Take a call out of its capture, its inputs in memory or drawn to match numbers; raise `TrueupError` where it does not
        stand alone."""
        forward = None
        if call.delivers:
            if call.forward_seq is None:
                raise TrueupError("The capture does not say of which forward call this is the backward: name an aten call of it")
            forward = calls.at(call.key.rank, call.forward_seq)
        ranks, home = Case.surroundings(calls)
        return Case(call, forward, home, ranks).in_memory()

    @staticmethod
    def surroundings(calls: RecordedCalls) -> tuple[dict[int, dict[str, Any]], str]:
        """Return devices and environment of the ranks of a capture, and the type of device that it was taken on."""
        ranks = {n: {k: rank.get(k) for k in ("devices", "environment")} for n, rank in calls.capture.ranks.items()}
        return ranks, home_of(ranks.values())

    def in_memory(self) -> Case:
        """Return it with its elements in memory, or drawn to match numbers; raise `TrueupError` for what was kept by its digest
        alone."""
        drawn: list[str] = []
        held = replace(self.call, tensors=_held(self.call, drawn))
        forward = self.forward and replace(self.forward, tensors=_held(self.forward, drawn))
        return replace(self, call=held, forward=forward, drawn=(*self.drawn, *drawn))

    def with_tensors(self, arrays: Mapping[str, NDArray[Any]], *, plain: bool = False) -> Case:
        """Return it with other elements by slot, also of other shapes; strides keep their order, or are ``plain``
        (contiguous)."""
        forward = self.forward and _changed(self.forward, arrays, plain)
        return replace(self, call=_changed(self.call, arrays, plain), forward=forward)

    def with_invocation(self, invocation: Mapping[str, Any]) -> Case:
        """Return it with a different invocation."""
        if self.forward is not None:
            return replace(self, forward=replace(self.forward, invocation=invocation))
        return replace(self, call=replace(self.call, invocation=invocation))

    def without(self, slot: str) -> Case:
        """Return it without a tensor: an argument that is None, a gradient that is not received."""
        call, forward = self.call, self.forward
        call = replace(call, tensors={s: t for s, t in call.tensors.items() if s not in (slot, f"grad_{slot}")})
        forward = forward and replace(forward, tensors={s: t for s, t in forward.tensors.items() if s != slot})
        return replace(self, call=call, forward=forward)

    def with_outputs(self, arrays: Mapping[str, NDArray[Any]]) -> Case:
        """Return it with these results as the recorded ones."""
        kept = {s: t for s, t in self.call.tensors.items() if s not in self.call.outputs}
        outputs = {slot: HeldTensor.of(slot, array) for slot, array in arrays.items()}
        return replace(self, call=replace(self.call, tensors=kept | outputs))

    def with_random(self, random: Mapping[str, bytes]) -> Case:
        """Return it with other states of the generators."""
        forward = self.forward and replace(self.forward, random=random)
        return replace(self, call=replace(self.call, random=random), forward=forward)

    # ---------------------------------------------------------------- between our processes
    def write(self, path: Path) -> None:
        """Write it to a file."""
        blobs: list[bytes] = []
        head = {
            "call": _written(self.call, blobs), "forward": self.forward and _written(self.forward, blobs), "home": self.home,
            "ranks": [[n, dict(rank)] for n, rank in self.ranks.items()], "drawn": self.drawn,
        }  # fmt: skip
        with path.open("wb") as file:
            file.write(json.dumps(head).encode() + b"\n")
            file.writelines(blobs)

    @staticmethod
    def read(path: Path) -> Case:
        """Read what `write` wrote; not for files of strangers."""
        with path.open("rb") as file:
            head = json.loads(file.readline())
            call, forward = (head[name] and _read(head[name], file) for name in ("call", "forward"))
        return Case(call, forward, head["home"], dict(head["ranks"]), tuple(head["drawn"]))


def relaid(shape: tuple[int, ...], before: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return strides for another shape in the order of the old ones: a transposed matrix stays one; None: not a plain array."""
    if strides is None or shape == before:
        return strides
    if len(shape) != len(before) or strides == contiguous(before):
        return contiguous(shape)
    found, step = [0] * len(shape), 1
    for place in sorted(range(len(shape)), key=lambda k: (strides[k], -k)):
        if strides[place]:
            found[place] = step
            step *= max(shape[place], 1)
    return tuple(found)


def _numbers(array: NDArray[Any]) -> dict[str, float | None]:
    wide = np.abs(np.asarray(array)).astype(np.float64) if array.dtype.kind != "c" else np.abs(array)
    real = wide if array.dtype.kind in "cb" else array.astype(np.float64)
    finite = real[np.isfinite(wide)]
    return {
        "min": float(finite.min()) if finite.size else 0.0, "max": float(finite.max()) if finite.size else 0.0,
        "mean": float(finite.mean()) if finite.size else 0.0, "l2": float(np.linalg.norm(finite)),
        "n_nan": float(np.isnan(wide).sum()), "n_zero": float((wide == 0).sum()),
        "n_posinf": float(np.isposinf(real).sum()), "n_neginf": float(np.isneginf(real).sum()),
    }  # fmt: skip


def _held(call: RecordedCall, drawn: list[str]) -> dict[str, RecordedTensor]:
    return {slot: _hold(call, slot, tensor, drawn) for slot, tensor in call.tensors.items()}


def _hold(call: RecordedCall, slot: str, tensor: RecordedTensor, drawn: list[str]) -> RecordedTensor:
    if tensor.strides is None:  # no plain array: it is refused where it is executed
        return tensor
    if tensor.kept:
        array = tensor.array()
    elif slot not in call.inputs:
        return tensor
    elif tensor.measured:
        array = draw(tensor)
        drawn.append(slot)
    elif tensor.digest is None:  # memory that nobody had written
        dtype = numpy_dtype(tensor.dtype)
        array = np.full(tensor.shape, np.nan if dtype.kind not in "biu" else 0).astype(dtype)
    else:
        raise TrueupError(
            f"{slot} was kept by its digest alone.\n  expected: a capture of detail tensor, or stats\n"
            "  got:      digest\n  next:     record again with --detail tensor"
        )
    return HeldTensor.of(slot, array, tensor.strides, tensor.device, tensor.dtype)


def _changed(call: RecordedCall, arrays: Mapping[str, NDArray[Any]], plain: bool) -> RecordedCall:
    tensors = dict(call.tensors)
    for slot, array in arrays.items():
        if slot in tensors and slot in call.inputs:
            old = tensors[slot]
            strides = contiguous(array.shape) if plain else relaid(array.shape, old.shape, old.strides)
            tensors[slot] = HeldTensor.of(slot, array, strides, old.device, old.dtype)
    return replace(call, tensors=tensors)


def _written(call: RecordedCall, blobs: list[bytes]) -> dict[str, Any]:
    tensors = []
    for slot, tensor in call.tensors.items():
        blob = tensor.array().tobytes() if tensor.kept else None
        if blob is not None:
            blobs.append(blob)
        length = None if blob is None else len(blob)
        facts = (slot, tensor.dtype, tensor.shape, tensor.strides, tensor.device, dict(tensor.numbers), tensor.digest, length)
        tensors.append(facts)
    return {
        "key": list(asdict(call.key).values()), "places": [call.seq, call.parent, call.forward_seq, call.site], "tensors": tensors,
        "value": call.value, "invocation": call.invocation,
        "random": {k: base64.b64encode(v).decode() for k, v in call.random.items()},
    }  # fmt: skip


def _read(head: Mapping[str, Any], file: Any) -> RecordedCall:
    tensors: dict[str, RecordedTensor] = {}
    for slot, dtype, shape, strides, device, numbers, digest, length in head["tensors"]:
        sizes, laid = tuple(shape), None if strides is None else tuple(strides)
        if length is None:
            tensors[slot] = RecordedTensor(slot, dtype, sizes, laid, device, numbers, digest)
        else:
            array = np.frombuffer(file.read(length), numpy_dtype(dtype)).reshape(sizes)
            tensors[slot] = HeldTensor(slot, dtype, sizes, laid, device, numbers, digest, held=array)
    random = {k: base64.b64decode(v) for k, v in head["random"].items()}
    seq, parent, forward, site = head["places"]
    return RecordedCall(CallKey(*head["key"]), seq, parent, forward, site, tensors, head["value"], head["invocation"], random)


Slot = tuple[int, str]
"""Place of a call in a chain, and its slot."""


@dataclass(frozen=True)
class Link:
    """A tensor that a call reads, as a part of another call's result."""

    maker: int  # place of the other call in the chain
    slot: str  # its result
    laid: tuple[int, ...]  # strides of that result where it was recorded
    start: int  # elements of memory between the first of the result and the first that is read
    whole: bool  # whether it is the result itself, and no view


@dataclass(frozen=True)
class Chain:
    """Calls in the order of their execution."""

    cases: tuple[Case, ...]  # the last one is the target
    links: tuple[Mapping[str, Link], ...]  # for each of them, what it reads of others, by slot

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
        """Take calls of one rank, in the order of execution, the last the target, out of a capture; elements stay there until
        they are read. ``linked`` hands results on, else every call is given what was recorded. Raises TrueupError where the
        forward call of a backward one is not there."""
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
        """Return it with one call replaced."""
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
        """Return it with results of these calls loaded as recorded: random ones, which another device draws differently."""
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
    start = _offset(case, slot) - _offset(other, _maker_slot(read.producer[1]))
    whole = (made.shape, made.strides) == (read.shape, read.strides) and start == 0
    if whole and made.digest != read.digest:  # memory that was overwritten unseen
        return None
    if not whole and not 0 <= start <= start + extent(read.shape, read.strides) <= extent(made.shape, made.strides):
        return None
    return Link(maker, read.producer[1], made.strides, start, whole)


def _maker_slot(slot: str) -> str:
    """Return the argument that a result is the memory of; of a new one, no slot."""
    return slot.replace("output.written", "input", 1) if slot.startswith("output.written") else slot


def _offset(case: Case, slot: str) -> int:
    node = nodes_of(case.made.invocation or {}).get(slot)
    if node is None and slot.startswith("output.") and has(case.made.key.op, "in-place"):  # the result is the first argument
        node = nodes_of(case.made.invocation or {}).get("input.0")
    offset = (node or {}).get("offset", 0)
    return offset if type(offset) is int else 0


def _sharing(case: Case, slot: str) -> list[str]:
    nodes = nodes_of(case.made.invocation or {})
    return [str(node["tensor"]) for node in sharing(nodes, nodes.get(slot, {}).get("shares", slot))]
