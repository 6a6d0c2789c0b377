"""The arguments of a recorded call: from their description to objects on a place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from trueup.foundation.facts.operators import has
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.adapters.paddle.replay_memory import buffer, dtype_of, from_numpy, place_of, view_of
from trueup.recording.execution import places
from trueup.recording.execution.cases import contiguous
from trueup.recording.execution.decoding import Decoder, damaged, extent, natural
from trueup.recording.execution.drawing import moved
from trueup.recording.execution.places import NotReplayable
from trueup.recording.execution.recorded import RecordedCall, RecordedTensor, tensor_nodes

ALIGNMENT = 64
"""Bytes to which Paddle's allocators align at least; where a view begins within such a block may decide how it is vectorised."""
SPARSE = 1 << 26
"""Elements between the first and last of a tensor up to which its strides are kept however few they are."""

class Place(places.Place):
    """Where and how Paddle executes calls."""

    @property
    def here(self) -> str:
        """The device that stands for the capture's own."""
        return "cpu" if self.wide else self.device

    def of(self, recorded: str) -> str:
        """Return the device for what was on a recorded one."""
        return self.here if recorded.partition(":")[0] == self.home else "cpu"

    def dtype(self, name: str) -> str:
        """Return the dtype that a recorded one is computed in here."""
        if not self.wide:
            return name
        return "complex128" if name.startswith("complex") else "float64" if name.startswith(("float", "bfloat")) else name


class Builder(Decoder):
    """Decodes the arguments of one call.

    Args:
        call: a forward call, or one of the optimizer's.
        place: where it is to be executed.
        grad: gradients will be asked for.
    """

    def __init__(self, call: RecordedCall, place: Place, *, grad: bool) -> None:
        self._call, self._place, self._grad = call, place, grad
        self.invocation: Mapping[str, Any] = {"args": []} if call.invocation is None else call.invocation
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self._memories: dict[str, tuple[paddle.Tensor, int]] = {}
        self.tensors: dict[str, paddle.Tensor] = {}
        self.leaves: dict[str, paddle.Tensor] = {}
        self.drawn: list[str] = []
        self.unwritten: list[str] = []
        self._writes = writes(call)
        for node in tensor_nodes([self.invocation.get("args"), self.invocation.get("kwargs")]):
            self._nodes[str(node["tensor"])] = node

    def constant(self, node: Mapping[str, Any]) -> Any:
        """Return a dtype or place of Paddle's, or an argument that was not given."""
        if "dtype" in node:
            return dtype_of(self._place.dtype(str(node["dtype"])))
        if "device" in node:
            return place_of(self._place.of(str(node["device"])))
        if node.get("undefined") is True:
            return paddle.Tensor()
        return damaged()

    def out(self, node: Any) -> paddle.Tensor:
        """Return what the call is to write its result to."""
        if not (isinstance(node, dict) and isinstance(node.get("empty"), list) and len(node["empty"]) == 4):
            damaged()
        dtype, shape, _, _ = node["empty"]
        kept = self._call.tensors.get("output.out") or self._call.tensors.get("output.0")
        if kept is None or kept.numel < math.prod(natural(n) for n in shape):  # as large as what came out, or an untrue size
            damaged()
        return paddle.empty(shape, self._place.dtype(dtype))

    def tensor(self, node: Mapping[str, Any]) -> paddle.Tensor:
        """Return a tensor argument."""
        slot = str(node["tensor"])
        if slot in self.tensors:
            return self.tensors[slot]
        recorded = self._call.tensors.get(slot)
        if recorded is None:
            raise NotReplayable(f"{slot} is not in the capture")
        if "kind" in node or recorded.strides is None:
            raise NotReplayable(f"{slot} is no plain array ({str(node.get('kind', 'sparse'))[:80]})")
        if (same := self._same(slot, node)) is not None:
            self.tensors[slot] = same
            return same
        made = self.lay(recorded, node)
        if node.get("grad") is True and recorded.dtype.startswith(("float", "bfloat", "complex")):
            made.stop_gradient = False
            self.leaves[slot] = made
            if self._writes and (self._grad or self.invocation.get("grad") is True):
                with paddle.enable_grad():
                    made = paddle.assign(made)  # a leaf must not be written
        self.tensors[slot] = made
        return made

    def _same(self, slot: str, node: Mapping[str, Any]) -> paddle.Tensor | None:
        """Return the tensor of another argument where both are one and the same, and the call writes to it.

        Where gradients are asked for each argument has a tensor of its own: one tensor would get the sum of both.
        """
        shared = str(node.get("shares", ""))
        a, b = self._call.tensors.get(slot), self._call.tensors.get(shared)
        if not self._writes or self._grad or a is None or b is None or shared not in self.tensors:
            return None
        if node.get("offset", 0) != self._nodes.get(shared, {}).get("offset", 0):
            return None
        return self.tensors[shared] if (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides) else None

    def lay(self, recorded: RecordedTensor, node: Mapping[str, Any]) -> paddle.Tensor:
        """Return a recorded tensor, laid out in memory as it was."""
        where, dtype = self._place.of(recorded.device), numpy_dtype(self._place.dtype(recorded.dtype))
        array = self._elements(recorded).astype(dtype, copy=False)
        strides = recorded.strides or ()
        length = extent(recorded.shape, strides)
        if length > max(SPARSE, 64 * recorded.numel):  # unlikely, or untrue
            strides, length = contiguous(recorded.shape), recorded.numel
        lead = natural(node.get("offset", 0)) % max(ALIGNMENT // numpy_dtype(recorded.dtype).itemsize, 1)
        if self._place.wide or (strides == contiguous(recorded.shape) and not lead):
            return from_numpy(array, where)
        memory = from_numpy(buffer([(array, strides, lead)], lead + length, dtype), where)
        try:
            return view_of(memory, recorded.shape, strides, lead)
        except (RuntimeError, ValueError):  # a device without strides: its kernels get copies
            return from_numpy(array, where)

    def _elements(self, recorded: RecordedTensor) -> NDArray[Any]:
        if recorded.kept:
            return moved(recorded) if self._place.perturb else recorded.array()
        if recorded.numel == 0:
            return np.empty(recorded.shape, numpy_dtype(recorded.dtype))
        if recorded.measured and self._place.draw is not None:
            self.drawn.append(recorded.slot)
            return self._place.draw(recorded)
        if recorded.measured or recorded.digest is not None:
            raise NotReplayable(f"{recorded.slot} was kept by its {'numbers' if recorded.measured else 'digest'} alone")
        self.unwritten.append(recorded.slot)
        dtype = numpy_dtype(recorded.dtype)
        return np.full(recorded.shape, 0 if dtype.kind in "biu" else math.nan).astype(dtype)


def writes(call: RecordedCall) -> bool:
    """Tell whether a call writes some of its arguments."""
    op = call.key.op
    return has(op, "in-place") or has(op, "rewrites") or any(s.startswith("output.written") for s in call.outputs)


def first_line(error: BaseException) -> str:
    """Return what an exception of Paddle's says, without the traceback in C++ that it begins with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    summary = next((k for k, line in enumerate(lines) if "Error Message Summary" in line), None)
    told = lines[summary + 2] if summary is not None and summary + 2 < len(lines) else next(iter(lines), type(error).__name__)
    return told[:200]
