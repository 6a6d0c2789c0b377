"""The arguments of a recorded call, from JSON (docs/format.md) to Python objects; a framework's own are its adapter's matter.

A capture is untrusted: only the very forms that Trueup writes are accepted, and nothing is evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from trueup.recording.execution.recorded import NotReplayable, Place, RecordedCall, RecordedTensor, moved, tensor_nodes

MOST_NESTED = 32


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
