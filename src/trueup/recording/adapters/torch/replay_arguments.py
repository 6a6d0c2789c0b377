"""The arguments of a recorded call: from their description to objects on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from trueup.foundation.facts.operators import has
from trueup.recording.adapters.torch.replay_memory import NotReplayable, constant, contiguous, damaged, extent, fill, natural
from trueup.recording.execution import places
from trueup.recording.execution.decoding import Decoder
from trueup.recording.execution.drawing import moved
from trueup.recording.execution.recorded import RecordedCall, RecordedTensor, read_state, tensor_nodes

ALIGNMENT = 64
"""Bytes to which PyTorch's allocators align; where a view begins within such a block may decide how it is vectorised."""
SPARSE = 1 << 26
"""Elements between the first and last of a tensor up to which its strides are kept however few they are."""


class Place(places.Place):
    """Where and how PyTorch executes calls."""

    def of(self, recorded: str) -> torch.device:
        """Return the device for what was on a recorded one."""
        if self.wide:
            return torch.device("cpu")
        return torch.device(self.device if recorded.partition(":")[0] == self.home else "cpu")

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that a recorded one is computed in here."""
        if not self.wide:
            return dtype
        return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


class Builder(Decoder):
    """Decodes the arguments of one call."""

    def __init__(
        self, call: RecordedCall, place: Place, grad: bool, given: Mapping[str, torch.Tensor] | None = None
    ) -> None:  # fmt: skip
        self._call, self._place, self._grad, self._given = call, place, grad, given or {}
        self._buffers: dict[str, _Buffer] = {}
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self.drawn: list[str] = []
        self.unwritten: list[str] = []
        self.samples: dict[str, dict[int, int]] = {}
        self._writes = writes(call)
        invocation = call.invocation or {}
        for node in tensor_nodes([invocation.get("args"), invocation.get("kwargs")]):
            self._nodes[str(node["tensor"])] = node

    def sequence(self, kind: str, items: list[Any]) -> Any:
        """Return a tuple, or the size of a tensor."""
        return torch.Size(items) if kind == "size" else tuple(items)

    def constant(self, node: Mapping[str, Any]) -> Any:
        """Return a dtype, device, layout, memory format or generator of PyTorch."""
        if "dtype" in node:
            return self._place.dtype(constant(torch.dtype, node["dtype"]))
        if "device" in node:
            return self._place.of(str(node["device"]))
        if "layout" in node:
            return constant(torch.layout, node["layout"])
        if "memory_format" in node:
            return constant(torch.memory_format, node["memory_format"])
        if "generator" in node:
            return self._generator(node["generator"])
        return damaged()

    def _generator(self, node: Mapping[str, Any]) -> torch.Generator:
        state = read_state(node.get("state"))
        where = self._place.of(str(node.get("device", "cpu")))
        try:
            made = torch.Generator(where)
            made.set_state(torch.frombuffer(bytearray(state or b""), dtype=torch.uint8))
        except (RuntimeError, ValueError) as error:
            raise NotReplayable(f"its generator cannot be made again on {where}: {first_line(error)}") from None
        return made

    def out(self, node: Any) -> Any:
        """Return what the call is to write its result to."""
        if isinstance(node, list):
            return tuple(self.out(n) for n in node)
        if not (isinstance(node, dict) and isinstance(node.get("empty"), list) and len(node["empty"]) == 4):
            damaged()
        dtype, shape, strides, device = node["empty"]
        kept = self._call.tensors.get("output.out") or self._call.tensors.get("output.0")
        if kept is not None and kept.numel < math.prod(shape):  # as large as what came out, or an untrue size
            damaged()
        wanted = self._place.dtype(constant(torch.dtype, dtype)), self._place.of(device)
        if strides is None:
            raise NotReplayable("it writes to a tensor that is no plain array")
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=wanted[0], device=wanted[1])

    # ---------------------------------------------------------------- tensors
    def tensor(self, node: Mapping[str, Any]) -> torch.Tensor:
        """Return a tensor argument."""
        slot = str(node["tensor"])
        if slot in self.tensors:
            return self.tensors[slot]
        recorded = self._call.tensors.get(slot)
        if recorded is None:
            raise NotReplayable(f"{slot} is not in the capture")
        if "kind" in node or recorded.strides is None:
            raise NotReplayable(f"{slot} is no plain array ({str(node.get('kind', 'sparse'))[:80]})")
        shared = node.get("shares")
        if isinstance(shared, str) and (same := self._same(slot, shared)) is not None:
            self.tensors[slot] = same
            if shared in self.samples:
                self.samples[slot] = self.samples[shared]
            if slot.replace("grad_", "") not in self.leaves and shared in self.leaves:
                self.leaves[slot] = self.leaves[shared]
            return same
        tensor = self._given[slot].detach() if slot in self._given else self._lay(recorded, node)
        if node.get("samples"):
            self.samples[slot] = _samples(node["samples"])
        wants = node.get("grad") is True and (tensor.is_floating_point() or tensor.is_complex())
        if call_grad(self._call, self._grad) and wants:
            leaf = tensor.data.requires_grad_()  # no view: what is one, autocast casts anew for each use
            self.leaves[slot] = leaf
            tensor = _unleafed(leaf) if self._writes or may_write(self._call) else leaf
        self.tensors[slot] = tensor
        return tensor

    def _same(self, slot: str, shared: str) -> torch.Tensor | None:
        """Return the tensor of another argument where both are one and the same."""
        a, b = self._call.tensors.get(slot), self._call.tensors.get(shared)
        nodes = self._nodes.get(slot, {}), self._nodes.get(shared, {})
        if a is None or b is None or shared not in self.tensors or nodes[0].get("offset", 0) != nodes[1].get("offset", 0):
            return None
        return self.tensors[shared] if (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides) else None

    def _lay(self, recorded: RecordedTensor, node: Mapping[str, Any]) -> torch.Tensor:
        array = self._elements(recorded)
        dtype = self._place.dtype(constant(torch.dtype, recorded.dtype))
        group = str(node.get("shares", recorded.slot))
        members = [n for n in self._nodes.values() if n.get("shares") == group or n["tensor"] == group] if self._writes else []
        hosted = recorded.slot in self._place.hosted and recorded.dtype == "int64"  # else it is another argument at that place
        where = torch.device("cpu") if hosted else self._place.of(recorded.device)
        strides = recorded.strides or ()
        if len(members) > 1 and (found := self._shared(group, members, dtype, where)) is not None:
            offset = natural(node.get("offset", 0)) - found.start
            return _view(found, array, recorded.shape, strides, offset)
        length = extent(recorded.shape, strides)
        if length > max(SPARSE, 64 * recorded.numel):  # unlikely, or untrue
            strides, length = contiguous(recorded.shape), recorded.numel
        lead = natural(node.get("offset", 0)) % max(ALIGNMENT // dtype.itemsize, 1)
        buffer = _Buffer(torch.zeros(lead + length, dtype=dtype), where, lead)
        return _view(buffer, array, recorded.shape, strides, lead)

    def _shared(
        self, group: str, members: list[Mapping[str, Any]], dtype: torch.dtype, where: torch.device
    ) -> _Buffer | None:  # fmt: skip
        """Return the memory that several arguments share, of which the call writes one; None where it would be too much."""
        if group not in self._buffers:
            spans = []
            for node in members:
                recorded = self._call.tensors.get(str(node["tensor"]))
                if recorded is None or recorded.strides is None or recorded.dtype != str(dtype).removeprefix("torch."):
                    return None
                start = natural(node.get("offset", 0))
                spans.append((start, start + extent(recorded.shape, recorded.strides)))
            first = min(start for start, _ in spans)
            size = max(end for _, end in spans) - first
            if size > SPARSE:
                return None
            self._buffers[group] = _Buffer(torch.zeros(size, dtype=dtype), where, first)
        return self._buffers[group]

    def _elements(self, recorded: RecordedTensor) -> NDArray[Any] | None:
        if recorded.kept:
            return moved(recorded) if self._place.perturb else recorded.array()
        if recorded.numel == 0:
            return None
        if recorded.measured and self._place.draw is not None:
            self.drawn.append(recorded.slot)
            return self._place.draw(recorded)
        if recorded.measured or recorded.digest is not None:
            raise NotReplayable(f"{recorded.slot} was kept by its {'numbers' if recorded.measured else 'digest'} alone")
        self.unwritten.append(recorded.slot)
        return None


def load(call: RecordedCall, place: Place, *, leave: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return the tensors that a call is given, by slot, but those in ``leave``; arguments that share memory share it."""
    builder = Builder(call, place, grad=False)
    return {slot: builder.tensor(node).detach() for slot, node in builder._nodes.items() if slot not in leave}


def as_tensor(call: RecordedCall, recorded: RecordedTensor, place: Place) -> torch.Tensor:
    """Return a recorded tensor by itself, such as a gradient that a call receives."""
    if recorded.strides is None:
        raise NotReplayable(f"{recorded.slot} is no plain array")
    return Builder(call, place, grad=False)._lay(recorded, {"tensor": recorded.slot})


@dataclass
class _Buffer:
    """Memory that arguments lie in: on the host until it is filled, then on its device."""

    host: torch.Tensor
    where: torch.device
    start: int
    """Offset, in the recorded storage, of its first element."""
    there: torch.Tensor | None = None


def _view(
    buffer: _Buffer, array: NDArray[Any] | None, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    host = torch.as_strided(buffer.host, shape, strides, offset)
    fill(host, array)
    if buffer.where.type == "cpu":
        return host
    if buffer.there is None:
        buffer.there = buffer.host.to(buffer.where)
        return torch.as_strided(buffer.there, shape, strides, offset)
    there = torch.as_strided(buffer.there, shape, strides, offset)
    with torch.no_grad():
        there.copy_(host.to(buffer.where))  # memory that several share: filled one after the other
    return there


def writes(call: RecordedCall) -> bool:
    """Tell whether a call writes some of its arguments."""
    return has(call.key.op, "in-place") or any(s.startswith("output.written") for s in call.outputs)


def may_write(call: RecordedCall) -> bool:
    """Tell whether a flag of the call may be the ``inplace`` of ``relu(x, inplace=True)``: those of `nn.functional` have one."""
    made = call.invocation or {}
    if not call.key.op.startswith("torch.nn.functional."):
        return False
    return True in [v for v in made.get("args") or () if isinstance(v, bool)] or bool(dict(made.get("kwargs") or {}).get("inplace"))


def call_grad(call: RecordedCall, asked: bool) -> bool:
    """Tell whether arguments are to require gradients: kernels are chosen by that, too."""
    return asked or (call.key.level == "api" and bool((call.invocation or {}).get("grad")))


def _unleafed(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same elements and strides that a call may write to."""
    copied = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return copied.copy_(leaf) if _dense(leaf) else leaf.clone()


def _dense(tensor: torch.Tensor) -> bool:
    return extent(tuple(tensor.shape), tensor.stride()) >= tensor.numel() and 0 not in tensor.stride()


def _samples(node: Any) -> dict[int, int]:
    """Return where the samples of each vmap lie in a tensor, by the vmap's level."""
    if not isinstance(node, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in node):
        damaged()
    return {natural(level): natural(dimension) for level, dimension in node}


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
