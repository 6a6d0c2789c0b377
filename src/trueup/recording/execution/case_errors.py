"""How wrong a device is in one call, and what of it rounding explains: for a reproducer, and each step of its shrinking.

An adapter executes the calls and writes them as source (`CaseErrors`); nothing here imports a framework.

The arguments of a recorded call, from JSON (docs/format.md) to Python objects, and a call as Python text, as far as both are the
same for all frameworks; a framework's own objects are its adapter's matter.

A capture is untrusted: only the very forms that Trueup writes are accepted, nothing is evaluated, and no text of it becomes code:
numbers are written by ``repr`` of what was checked to be numbers, text is an argument or a key, written as an ASCII literal, and
the rest is looked up by an adapter. Variables have names of our own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numpy.typing import NDArray

from trueup.foundation.model import TrueupError
from trueup.recording.execution.cases import Case, Chain
from trueup.recording.execution.judging import Arrays, Judging, Outcome, Result, parallel
from trueup.recording.execution.local_error import Distance, Operation, criterion, rounding, thresholds
from trueup.recording.execution.recorded import NotReplayable, Place, RecordedCall, RecordedTensor, moved, tensor_nodes

MOST_NESTED = 32

MOST_MEMORY = 1 << 22
"""Elements between the first and last of a tensor up to which the memory between them is kept in the file."""
FLOATING = ("float", "bfloat", "complex")
"""How the names of dtypes begin that carry gradients."""

Reach = tuple[int | str, ...]
"""How a result is reached: ``()`` the result itself, ``(0,)`` its first item, ``("input.0",)`` a tensor that was written."""


def damaged() -> Any:
    """Refuse what no capture of ours holds."""
    raise NotReplayable("its arguments are damaged in the capture")


def natural(number: Any) -> int:
    """Return a number that must be a natural one."""
    return number if type(number) is int and 0 <= number < 2**62 else damaged()


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory there are from the first to the last."""
    if len(shape) != len(strides) or any(s < 0 for s in strides):
        damaged()
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a plain array, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Decoder(ABC):
    """Makes arguments of what stands for them: objects, or in a `writing.Writer` their text."""

    def value(self, node: Any, depth: int = 0) -> Any:
        """Return the argument that a node stands for; raise `NotReplayable` for none, or one that a capture cannot hold."""
        if node is None or isinstance(node, (bool, int, float, str)):
            return self.literal(node)
        if depth > MOST_NESTED:
            raise NotReplayable("its arguments are nested too deeply")
        if isinstance(node, list):
            return self.sequence("list", [self.value(v, depth + 1) for v in node])
        if not isinstance(node, dict):
            return damaged()
        if "tensor" in node:
            return self.tensor(node)
        for key in ("tuple", "size"):
            if isinstance(node.get(key), list):
                return self.sequence(key, [self.value(v, depth + 1) for v in node[key]])
        if isinstance(node.get("dict"), dict):
            return self.mapping({k: self.value(v, depth + 1) for k, v in node["dict"].items()})
        return self._plain(node)

    def _plain(self, node: Mapping[str, Any]) -> Any:
        if node.get("ellipsis") is True:
            return self.literal(Ellipsis)
        if "float" in node:
            return self.literal(float(node["float"])) if node["float"] in ("nan", "inf", "-inf") else damaged()
        if "complex" in node:
            real, imaginary = node["complex"]
            return self.literal(complex(float.fromhex(str(real)), float.fromhex(str(imaginary))))
        if "slice" in node:
            bounds = node["slice"]
            known = isinstance(bounds, list) and len(bounds) == 3 and all(b is None or type(b) is int for b in bounds)
            return self.literal(slice(*bounds)) if known else damaged()
        if "other" in node:
            raise NotReplayable(f"an argument is a {str(node['other'])[:80]}, which a capture cannot hold")
        return self.constant(node)

    def literal(self, value: Any) -> Any:
        """Return a scalar, a text, a slice or an ellipsis."""
        return value

    def sequence(self, kind: str, items: list[Any]) -> Any:
        """Return a ``list``, a ``tuple``, or the ``size`` of a tensor."""
        return tuple(items) if kind == "tuple" else items

    def mapping(self, items: dict[str, Any]) -> Any:
        """Return a dict."""
        return items

    @abstractmethod
    def tensor(self, node: Mapping[str, Any]) -> Any:
        """Return a tensor."""

    @abstractmethod
    def constant(self, node: Mapping[str, Any]) -> Any:
        """Return what is the framework's own: a dtype, a device."""


ALIGNMENT = 64
"""Bytes to which allocators align at least; where a view begins within such a block may decide how it is vectorised."""
SPARSE = 1 << 26
"""Elements between the first and last of a tensor up to which its strides are kept however few they are."""
Nodes = Mapping[str, Mapping[str, Any]]
"""What stands for tensors in the description of a call, by slot."""


def nodes_of(invocation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what stands for tensors in the description of a call."""
    return {str(node["tensor"]): node for node in tensor_nodes([invocation.get("args"), invocation.get("kwargs")])}


def plain(call: RecordedCall, node: Mapping[str, Any]) -> RecordedTensor:
    """Return the recorded tensor that a node stands for; raise `NotReplayable` where the capture lacks it, or it is no plain
    array."""
    slot = str(node["tensor"])
    recorded = call.tensors.get(slot)
    if recorded is None:
        raise NotReplayable(f"{slot} is not in the capture")
    if "kind" in node or recorded.strides is None:
        raise NotReplayable(f"{slot} is not a plain array ({str(node.get('kind', 'sparse'))[:80]})")
    return recorded


def alike(call: RecordedCall, nodes: Nodes, slot: str, shared: str) -> bool:
    """Tell whether two arguments that share memory show the same elements of it in the same way."""
    a, b = call.tensors.get(slot), call.tensors.get(shared)
    offsets = [nodes.get(name, {}).get("offset", 0) for name in (slot, shared)]
    if a is None or b is None or offsets[0] != offsets[1]:
        return False
    return (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides)


def sharing(nodes: Nodes, group: str) -> list[Mapping[str, Any]]:
    """Return what stands for the tensors that lie in one piece of memory: a group is named after the first of them."""
    return [node for slot, node in nodes.items() if node.get("shares") == group or slot == group]


def span(call: RecordedCall, members: Sequence[Mapping[str, Any]], dtype: str, most: int) -> tuple[int, int] | None:
    """Return where the memory of several arguments begins, and its size, in elements; None: more than ``most``, or no one dtype."""
    spans = []
    for node in members:
        recorded = call.tensors.get(str(node["tensor"]))
        if recorded is None or recorded.strides is None or recorded.dtype != dtype:
            return None
        start = natural(node.get("offset", 0))
        spans.append((start, start + extent(recorded.shape, recorded.strides)))
    first = min(start for start, _ in spans)
    size = max(end for _, end in spans) - first
    return None if size > most else (first, size)


def placed(recorded: RecordedTensor, node: Mapping[str, Any], itemsize: int) -> tuple[tuple[int, ...], int, int]:
    """Return how a tensor is to lie in memory, in elements: strides (without gaps where there are too many, which is unlikely, or
    untrue), from the first to the last, and before the first (where it begins within an `ALIGNMENT`)."""
    strides = recorded.strides or ()
    length = extent(recorded.shape, strides)
    if length > max(SPARSE, 64 * recorded.numel):
        strides, length = contiguous(recorded.shape), recorded.numel
    return strides, length, natural(node.get("offset", 0)) % max(ALIGNMENT // itemsize, 1)


class Builder(Decoder):
    """Decodes the arguments of one call, as far as all frameworks do; ``grad``: gradients will be asked for."""

    def __init__(self, call: RecordedCall, place: Place, *, grad: bool, writes: bool) -> None:
        self._call, self._grad, self._writes = call, grad, writes
        self._kept_at = place
        self._nodes = nodes_of(call.invocation or {})
        self.tensors: dict[str, Any] = {}  # tensors that were made, by slot
        self.leaves: dict[str, Any] = {}  # those that gradients are taken of
        self.drawn: list[str] = []  # slots whose elements were drawn to match recorded numbers
        self.unwritten: list[str] = []  # slots that nobody had written before the call

    def arguments(self, invocation: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a call is given, positional and by name."""
        args = tuple(self.value(v) for v in invocation["args"])
        kwargs = {str(name): self.value(v) for name, v in dict(invocation.get("kwargs") or {}).items()}
        if "out" in invocation:
            kwargs["out"] = self.out(invocation["out"])
        return args, kwargs

    def elements(self, recorded: RecordedTensor) -> NDArray[Any] | None:
        """Return a recorded tensor's elements; None where it has none, or nobody had written them. Raise `NotReplayable` where
        they were not kept."""
        if recorded.kept:
            return moved(recorded) if self._kept_at.perturb else recorded.array()
        if recorded.numel == 0:
            return None
        if recorded.measured and self._kept_at.draw is not None:
            self.drawn.append(recorded.slot)
            return self._kept_at.draw(recorded)
        if recorded.measured or recorded.digest is not None:
            raise NotReplayable(f"{recorded.slot} was kept by its {'numbers' if recorded.measured else 'digest'} alone")
        self.unwritten.append(recorded.slot)
        return None

    @abstractmethod
    def out(self, node: Any) -> Any:
        """Return what the call is to write its result to."""


def differentiated(
    received: Mapping[str, Any], wanted: Sequence[str], outputs: Mapping[str, Any], leaves: Mapping[str, Any],
    tracked: Callable[[Any], bool],
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Return the outputs that gradients ``grad_output.…`` belong to, and the leaves of the ``grad_input.…`` wanted; raises
    NotReplayable where one is not there, or an output is not tracked by autograd."""
    ends = {slot: outputs.get(slot.removeprefix("grad_")) for slot in received}
    for slot, output in ends.items():
        if output is None or not tracked(output):
            raise NotReplayable(f"the result that {slot} belongs to carries no gradient when the call is made alone")
    for slot in wanted:
        if slot.removeprefix("grad_") not in leaves:
            raise NotReplayable(f"{slot} belongs to no argument of the call")
    return list(ends.values()), [leaves[slot.removeprefix("grad_")] for slot in wanted]


Named = Callable[[str], "dict[str, str] | None"]
"""What a text is that names something of the framework's: ``torch.float32`` is ``{"dtype": "float32"}``."""


def assumed(call: RecordedCall, named: Named) -> dict[str, Any]:
    """Return how a call was made as far as slots and values of a capture of less detail tell; raise `NotReplayable` where they do
    not."""
    values = call.values
    if set(values) == {"length", "xxh3"}:
        raise NotReplayable("its arguments were too long to be kept")
    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    for slot in call.inputs:
        first, *rest = slot.split(".")[1:]
        place: Any = {"tensor": slot}
        for name in reversed(rest):
            place = {int(name): place} if name.isdigit() else {name: place}
        _merge(args, int(first), place) if first.isdigit() else _merge(kwargs, first, place)
    for name, value in values.items():
        into: Any = args if name.isdigit() else kwargs
        key: Any = int(name) if name.isdigit() else name
        into[key] = _with_tensors(_guessed(value, named), into.get(key))
    count = max(args, default=-1) + 1
    return {"args": [_listed(args.get(k)) for k in range(count)], "kwargs": {k: _listed(v) for k, v in kwargs.items()}}


def _merge(into: dict[Any, Any], key: Any, value: Any) -> None:
    known = into.get(key)
    if isinstance(known, dict) and isinstance(value, dict) and "tensor" not in known and "tensor" not in value:
        for inner, item in value.items():
            _merge(known, inner, item)
    else:
        into[key] = value


def _with_tensors(value: Any, tensors: Any) -> Any:
    if isinstance(value, list) and isinstance(tensors, dict):
        return [tensors.get(k, v) for k, v in enumerate(value)]
    return value


def _listed(value: Any) -> Any:
    if isinstance(value, dict) and value and all(isinstance(k, int) for k in value):
        return [_listed(value.get(k)) for k in range(max(value) + 1)]
    return value


def _guessed(value: Any, named: Named) -> Any:
    """Read back what `trueup.recording.recorder.arguments` wrote for people: text that names a dtype or a slice."""
    if isinstance(value, list):
        return [_guessed(v, named) for v in value]
    if not isinstance(value, str):
        return value
    if value == "ellipsis":
        return {"ellipsis": True}
    if (found := named(value)) is not None:
        return found
    parts = value.split(":")
    if len(parts) == 3 and all(p == "None" or p.lstrip("-").isdigit() for p in parts):
        return {"slice": [None if p == "None" else int(p) for p in parts]}
    return value


@dataclass
class Source:
    """Calls as the text of a test."""

    expressions: list[str]  # the calls, the last one that whose results count
    body: str  # statements of the function that executes them
    tensors: dict[str, Any] = field(default_factory=dict)  # what the statements load, by variable
    helpers: frozenset[str] = frozenset()  # functions that the statements use


class Writer(Decoder):
    """Writes the arguments of a call; `tensor` and `constant` return their text."""

    def literal(self, value: Any) -> str:
        """Write a scalar, a text, a slice or an ellipsis."""
        if isinstance(value, str):
            return ascii(value)
        if isinstance(value, complex):
            return f"complex({number(value.real)}, {number(value.imag)})"
        return number(value) if isinstance(value, float) else "..." if value is Ellipsis else repr(value)

    def sequence(self, kind: str, items: list[str]) -> str:
        """Write a ``list``, a ``tuple``, or the ``size`` of a tensor."""
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})" if kind == "tuple" else f"[{', '.join(items)}]"

    def mapping(self, items: dict[str, str]) -> str:
        """Write a dict."""
        return "{" + ", ".join(f"{str(key)!a}: {value}" for key, value in items.items()) + "}"


def number(value: float) -> str:
    """Write a number."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def laid(recorded: RecordedTensor, node: Mapping[str, Any], itemsize: int) -> tuple[int, int] | None:
    """Return where a tensor begins in its memory and how much of it it spans, in elements; None: a plain array stands for it."""
    strides = recorded.strides or ()
    lead = natural(node.get("offset", 0)) % max(ALIGNMENT // itemsize, 1)
    reach = extent(recorded.shape, strides)
    plain = (strides == contiguous(recorded.shape) or recorded.numel < 2) and not lead
    return None if plain or reach > max(MOST_MEMORY, 8 * recorded.numel) else (lead, reach)


def returned(items: Iterable[str]) -> list[str]:
    """Write the statement that returns results: ``"output.0": result``."""
    items = list(items)
    line = "return {" + ", ".join(items) + "}"
    return [line] if len(line) < 110 else ["return {", *(f"    {item}," for item in items), "}"]


def path_to(tensor: Any, result: Any, inputs: Mapping[str, Any]) -> Reach | None:
    """Tell how a tensor is reached from the result of a call, else which of its inputs it is."""
    found = _within(tensor, result)
    if found is not None:
        return found
    return next(((slot,) for slot, given in inputs.items() if given is tensor), None)


def _within(tensor: Any, value: Any) -> Reach | None:
    if value is tensor:
        return ()
    items = enumerate(value) if isinstance(value, (tuple, list)) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        inner = _within(tensor, item)
        if inner is not None:
            return (key, *inner)
    return None


def ends(
    received: Mapping[str, str], paths: Mapping[str, Reach], outputs: Sequence[str] | Mapping[str, Any], leaves: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the gradients that reach a result, by the result, and the wanted leaves by slot; raise `NotReplayable` where there
    are none."""
    wanted = {slot: leaves[slot.removeprefix("grad_")] for slot in outputs if slot.removeprefix("grad_") in leaves}
    found = {slot: gradient for slot, gradient in received.items() if slot in paths}
    if not wanted or not found:
        raise NotReplayable("the gradients that it receives belong to none of its results")
    return found, wanted


class OneCall:
    """Stands for a capture that holds a case and nothing else."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.capture = SimpleNamespace(ranks=dict(case.ranks))

    def at(self, rank: int, seq: int) -> RecordedCall:
        """Return the forward call."""
        if self._case.forward is None:
            raise TrueupError(f"no call {seq} on rank {rank}")
        return self._case.forward

    def of_step(self, *_: Any) -> list[RecordedCall]:
        """Return no other calls."""
        return []


INPUTS = "inputs.safetensors"


class CaseErrors(ABC):
    """Executes calls on the device that fails and on the one that is right, and tells how far they are apart."""

    title: str  # of the framework
    needs: str  # what a test needs: ``torch, safetensors and pytest``
    template: str  # of a test
    plugin: str  # a module that makes ``npu`` known, where the framework does not find it by itself

    # ---------------------------------------------------------------- what an adapter adds
    @abstractmethod
    def chained(self, chain: Chain, device: str) -> Judging[Any]:
        """Return what executes and judges the last call of a chain, after those before it."""

    def drew(self, replayer: Any) -> frozenset[int]:
        """Return the calls before the last one that drew random numbers when they were executed."""
        return frozenset(getattr(replayer, "random", ()))

    @abstractmethod
    def seeded(self) -> bytes:
        """Return the state of the CPU's generator at seed 0."""

    @abstractmethod
    def source(self, chain: Chain, against: str, random: frozenset[int]) -> Source:
        """Write a chain, its calls in ``random`` drawing random numbers, as source; raise `NotReplayable` where it cannot be
        written."""

    @abstractmethod
    def names(self, case: Case) -> tuple[str, str]:
        """Return a short name for files and functions, and what people call the function that is executed."""

    @abstractmethod
    def save(self, tensors: dict[str, Any], path: Path) -> list[tuple[str, str, list[int]]]:
        """Write what the statements load to a file, and return name, dtype and shape of each."""

    @abstractmethod
    def switches(self) -> dict[str, str]:
        """Return the values of the framework's numeric switches, as they are set now."""

    # ---------------------------------------------------------------- what all share
    def saved(self, told: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Write the tensors of what `written` returns to a folder, and return the rest of it, as JSON takes it."""
        source: Source = told["source"]
        tensors = self.save(source.tensors, folder / INPUTS)
        (folder / INPUTS).chmod(0o644)
        parts = {"expressions": source.expressions, "body": source.body, "helpers": sorted(source.helpers), "tensors": tensors}
        named = {"title": self.title, "needs": self.needs, "template": self.template, "plugin": self.plugin}
        return told | named | {"source": parts, "environment": self.switches()}

    def settled(self, chain: Chain, against: str) -> Chain:
        """Return a chain whose last call has the results of a device, computed now; a random call without a state is given one,
        and what calls before it draw is not handed on but loaded as recorded. Raises NotReplayable with the reason."""
        case = chain.target
        if not case.made.random:
            chain = chain.with_target(case.with_random({case.home: self.seeded()}))
        result, random = self._execute(chain, against)
        if any(link.maker in random for links in chain.links for link in links.values()):
            chain = chain.without_links_of(random)
            result, _ = self._execute(chain, against)
        return chain.with_target(chain.target.with_outputs(result.arrays))

    def judged(self, chain: Chain, device: str, against: str) -> tuple[Chain, Outcome]:
        """Return a chain whose last call has one device's results as its baseline, and the verdict on another; raise
        `NotReplayable`."""
        chain = self.settled(chain, against)
        replayer = self.chained(chain, device)
        with replayer.undisturbed():
            return chain, replayer.replay(chain.target.call)

    def written(self, chain: Chain, device: str | None, against: str, recorded: Arrays) -> dict[str, Any]:
        """Return source, limits and errors of a reproducer for a chain with the results of ``against``, with which ``device`` is
        compared, where it is expected to fail (None: it is not here); ``recorded`` are the results in the capture, by slot.
        Raises NotReplayable with the reason."""
        replayer, case = self.chained(chain, device or against), chain.target
        with replayer.undisturbed():
            own, random = self._execute(chain, against)
            limits = _limits(replayer, case, own)
            last = len(chain.cases) - 1
            source = self.source(chain, against, random | ({last} if own.random else set()))
            found: dict[str, Any] = {}
            if device is not None:
                found = _found(replayer, case)
        name, function = self.names(case)
        results = {s: t.array() for s, t in case.call.outputs.items() if s in limits}
        return {
            "source": source, "limits": limits, "random": own.random, "name": name,
            "function": function, "calls": len(chain.cases),
            "device": _errors(results, found) if not isinstance(found, str) else found, "recorded": _errors(results, recorded),
        }  # fmt: skip

    def _execute(self, chain: Chain, device: str) -> tuple[Result, frozenset[int]]:
        replayer = self.chained(chain, device)
        with replayer.undisturbed():
            return replayer.execute(chain.target.call, replayer.target), self.drew(replayer)


def _found(replayer: Judging[Any], case: Case) -> Any:
    try:
        return replayer.execute(case.call, replayer.target).arrays
    except NotReplayable as reason:
        return str(reason)


def _errors(expected: Arrays, found: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, float]]:
    errors = {}
    for slot, array in found.items():
        if slot not in expected:
            continue
        if array.shape != expected[slot].shape or array.dtype != expected[slot].dtype:
            errors[slot] = {"form": 1.0}
            continue
        d = Distance.of(expected[slot], array)
        errors[slot] = {
            "rms": d.rms, "largest": d.largest, "relative": d.relative, "differing": d.differing, "disagreeing": d.disagreeing,
        }  # fmt: skip
    return errors


# ---------------------------------------------------------------- limits
def _limits(replayer: Judging[Any], case: Case, own: Result) -> dict[str, dict[str, Any]]:
    """Return how far each result may be from the baseline's: beyond it `execution.local_error.judge` says wrong."""
    call = case.call
    try:
        truth: Result | None = replayer.execute(call, replayer.truth)
    except NotReplayable:
        truth = None
    operation = Operation(call.key.op, call.key.level, call.key.phase)
    read = [replayer._operand(t, None) for t in replayer._read(call)]
    limits = {}
    for slot, recorded in call.outputs.items():
        if slot in own.arrays and recorded.numel:
            exact = None if truth is None else truth.arrays.get(slot)
            random = own.random or criterion().row(operation.op, operation.level, operation.phase).random
            if exact is not None and (exact.shape != recorded.shape or (random and not parallel(exact, own.arrays[slot]))):
                exact = None
            limits[slot] = _limit(replayer, call, operation, recorded, own.arrays[slot], exact, read)
    return limits


def _limit(
    replayer: Judging[Any], call: RecordedCall, operation: Operation, recorded: RecordedTensor, known: NDArray[Any],
    exact: NDArray[Any] | None, read: list[Any],
) -> dict[str, Any]:  # fmt: skip
    kind, table = thresholds().of(operation), thresholds()
    factor = kind.backward if operation.backward else kind.factor
    truth = known if exact is None else exact
    own = Distance.of(truth, known)
    if recorded.dtype.startswith(("int", "uint", "bool")):
        return {"differing": int((factor + 1) * own.differing), "origin": kind.origin, "rule": f"{kind.name}: integers"}
    explained = rounding(operation, read, [replayer._operand(recorded, own)], replayer.precision)[recorded.slot]
    if exact is None:
        explained *= 2  # both sides round
    elif kind.exact and own.rms == 0 and own.truth_rms > 0:
        explained = 0.0  # nothing is rounded here
    moved = None if exact is None else replayer._moved(call, recorded.slot, exact)
    beside = (0.0, 0.0) if moved is None else (moved.rms, moved.largest)
    widest = max(own.truth_largest, 4 * own.truth_rms) or 1.0
    pairs = ((own.rms, explained * (own.truth_rms or 1.0), beside[0]), (own.largest, explained * widest, beside[1]))
    rms, largest = (max(table.certain * max(factor * o, r), table.perturbed * m) + o for o, r, m in pairs)
    by = "rounding" if explained * (own.truth_rms or 1.0) > factor * own.rms else f"error of the baseline, {factor:g} times"
    return {
        "rms": rms, "largest": largest, "origin": kind.origin, "rule": f"{kind.name}: {table.certain:g} times the {by}",
        "relative": rms / own.truth_rms if own.truth_rms else math.nan,
    }  # fmt: skip
