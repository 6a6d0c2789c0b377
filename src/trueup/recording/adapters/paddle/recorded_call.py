"""A recorded call as Paddle executes it: function, arguments on a place, and the modes and random state around it.

>>> call = RecordedCalls(trueup.open_capture("runs/cpu")).at(rank=0, seq=4711)
>>> made = rebuild(call, Place("npu", home="cpu"))              # or Place("cpu", home="cpu", wide=True): the float64 truth
>>> outputs = made.execute()                                    # {'output.0': tensor, 'output.written.1': ...}, slots as recorded
>>> backward = rebuild(forward_call, place, grad=True)
>>> backward.execute(); backward.gradients({"grad_output.0": g}, ["grad_input.0"])

A function is looked up by `allowed`. What cannot be made again raises `NotReplayable` with the reason, never something else in
its place.

Which functions a capture may name to have them executed: Paddle's own operators, and only those that compute tensors. A capture
is untrusted, so a name is never followed: it is looked up among the functions of ``paddle._C_ops`` and ``paddle._legacy_C_ops``
and the operators of `paddle.Tensor` in front of which a capture stands. What loads or saves, talks to other processes, hands out
memory, or runs a program or code that it is given is not among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.amp.amp_lists import black_list, white_list
from paddle.base import core

from trueup.foundation.facts.operators import has, says
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.adapters.paddle import invocations, tensors
from trueup.recording.adapters.paddle.operators import MODULES, name_of, special_methods
from trueup.recording.adapters.paddle.tensors import FACTS, dtype_name, layout_of, named_tensors
from trueup.recording.execution import decoding
from trueup.recording.execution.decoding import contiguous, damaged, natural, placed
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedTensor
from trueup.recording.execution.recorded import Place as BasePlace


# ---------------------------------------------------------------------------------------------------------- arguments
def dtype_of(name: Any) -> Any:
    """Return a dtype of Paddle's by its name."""
    return getattr(paddle, name) if name in FACTS["dtypes"].split() and hasattr(paddle, name) else damaged()


def from_numpy(array: NDArray[Any], place: str) -> paddle.Tensor:
    """Return an array of any dtype of NumPy or ml_dtypes as a tensor on a place; a copy."""
    name = array.dtype.name
    plain = np.array(array, order="C", copy=True)
    if name == "bfloat16":  # Paddle takes its bits as uint16
        return paddle.to_tensor(plain.view(np.uint16), place=place_of(place))
    if name.startswith("float8"):
        return paddle.to_tensor(plain.view(np.uint8), place=place_of(place)).view(name)
    return paddle.to_tensor(plain, dtype=name, place=place_of(place))


def to_numpy(tensor: paddle.Tensor) -> NDArray[Any]:
    """Return a copy of a dense tensor's elements, C order, in the captures' dtype of NumPy or ml_dtypes; raise `NotReplayable`
    for any other."""
    if not tensor.is_dense() or tensor.is_dist():
        raise NotReplayable("its result is not a plain array")
    if not tensor._is_initialized():
        return np.empty(tuple(tensor.shape), np.dtype(dtype_name(tensor.dtype)))
    host = tensor.detach()
    host = host if host.place.is_cpu_place() else host.cpu()
    layout = layout_of(host)
    assert layout is not None
    return np.array(tensors.to_numpy(host, layout), order="C", copy=True)


def place_of(device: str) -> Any:
    """Return a place of Paddle's by the name that captures and `paddle.set_device` give it."""
    kind, _, number = device.partition(":")
    index = int(number) if number.isdigit() else 0
    if kind == "cpu":
        return paddle.CPUPlace()
    if kind in ("gpu", "cuda"):
        return paddle.CUDAPlace(index)
    if kind == "xpu":
        return paddle.XPUPlace(index)
    return paddle.CustomPlace(kind, index)


def buffer(parts: Sequence[tuple[NDArray[Any], Sequence[int], int]], size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return memory of some elements in which arrays lie: ``(array, strides, offset)`` each, strides and offset in elements."""
    memory = np.zeros(size, dtype)
    for array, strides, offset in parts:
        if not array.size:
            continue
        steps = [stride * dtype.itemsize for stride in strides]
        window = np.lib.stride_tricks.as_strided(memory[offset:], array.shape, steps)
        window[...] = array
    return memory


def view_of(memory: paddle.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> paddle.Tensor:
    """Return a tensor that shows a part of flat memory; strides and offset in elements."""
    if not offset and tuple(memory.shape) == tuple(shape) and tuple(strides) == contiguous(tuple(shape)):
        return memory
    with paddle.no_grad():
        return paddle.as_strided(memory, list(shape), list(strides), offset * memory.element_size())


class Place(BasePlace):
    """Where and how Paddle executes calls."""

    @property
    def here(self) -> str:
        """The device that stands for the capture's own."""
        return "cpu" if self.wide else self.device

    def of(self, recorded: str) -> str:
        return self.here if recorded.partition(":")[0] == self.home else "cpu"

    def dtype(self, name: str) -> str:
        if not self.wide:
            return name
        return "complex128" if name.startswith("complex") else "float64" if name.startswith(("float", "bfloat")) else name


class Builder(decoding.Builder):
    """Decodes the arguments of one call, forward or of the optimizer's."""

    def __init__(self, call: RecordedCall, place: Place, *, grad: bool) -> None:
        super().__init__(call, place, grad=grad, writes=writes(call))
        self._place = place
        self.invocation: Mapping[str, Any] = {"args": []} if call.invocation is None else call.invocation

    def constant(self, node: Mapping[str, Any]) -> Any:
        if "dtype" in node:
            return dtype_of(self._place.dtype(str(node["dtype"])))
        if "device" in node:
            return place_of(self._place.of(str(node["device"])))
        if node.get("undefined") is True:
            return paddle.Tensor()
        return damaged()

    def out(self, node: Any) -> paddle.Tensor:
        if not (isinstance(node, dict) and isinstance(node.get("empty"), list) and len(node["empty"]) == 4):
            damaged()
        dtype, shape, _, _ = node["empty"]
        kept = self._call.tensors.get("output.out") or self._call.tensors.get("output.0")
        if kept is None or kept.numel < math.prod(natural(n) for n in shape):  # as large as what came out, or an untrue size
            damaged()
        return paddle.empty(shape, self._place.dtype(dtype))

    def tensor(self, node: Mapping[str, Any]) -> paddle.Tensor:
        slot = str(node["tensor"])
        if slot in self.tensors:
            return self.tensors[slot]
        recorded, shared = decoding.plain(self._call, node), str(node.get("shares", ""))
        # Where gradients are asked for each argument has a tensor of its own: one tensor would get the sum of both.
        if self._writes and not self._grad and shared in self.tensors and decoding.alike(self._call, self._nodes, slot, shared):
            self.tensors[slot] = self.tensors[shared]
            return self.tensors[slot]
        made = self.lay(recorded, node)
        if node.get("grad") is True and recorded.dtype.startswith(("float", "bfloat", "complex")):
            made.stop_gradient = False
            self.leaves[slot] = made
            if self._writes and (self._grad or self.invocation.get("grad") is True):
                with paddle.enable_grad():
                    made = paddle.assign(made)  # a leaf must not be written
        self.tensors[slot] = made
        return made

    def lay(self, recorded: RecordedTensor, node: Mapping[str, Any]) -> paddle.Tensor:
        """Return a recorded tensor, laid out in memory as it was."""
        where, dtype = self._place.of(recorded.device), numpy_dtype(self._place.dtype(recorded.dtype))
        array = self._filled(recorded).astype(dtype, copy=False)
        strides, length, lead = placed(recorded, node, numpy_dtype(recorded.dtype).itemsize)
        if self._place.wide or (strides == contiguous(recorded.shape) and not lead):
            return from_numpy(array, where)
        memory = from_numpy(buffer([(array, strides, lead)], lead + length, dtype), where)
        try:
            return view_of(memory, recorded.shape, strides, lead)
        except (RuntimeError, ValueError):  # a device without strides: its kernels get copies
            return from_numpy(array, where)

    def _filled(self, recorded: RecordedTensor) -> NDArray[Any]:
        """Return the elements of a tensor, NaN (integers: 0) for memory that nobody had written."""
        array, dtype = self.elements(recorded), numpy_dtype(recorded.dtype)
        return np.full(recorded.shape, 0 if dtype.kind in "biu" else math.nan).astype(dtype) if array is None else array


def writes(call: RecordedCall) -> bool:
    """Tell whether a call writes some of its arguments."""
    op = call.key.op
    return has(op, "in-place") or has(op, "rewrites") or any(s.startswith("output.written") for s in call.outputs)


def first_line(error: BaseException) -> str:
    """Return the message of an exception of Paddle's, without the C++ traceback that it begins with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    summary = next((k for k, line in enumerate(lines) if "Error Message Summary" in line), None)
    said = lines[summary + 2] if summary is not None and summary + 2 < len(lines) else next(iter(lines), type(error).__name__)
    return said[:200]


# ------------------------------------------------------------------------------- functions that may be executed
REFUSED = {kind: names.split() for kind, names in FACTS["refused"].items()}


def is_refused(name: str) -> bool:
    """Tell whether a name, without its module, is of what is never executed."""
    return name not in REFUSED["allowed"] and (name in REFUSED["names"] or any(part in name for part in REFUSED["parts"]))


def allowed(name: str) -> Callable[..., Any] | None:
    """Return the function that a capture means by a name, or None where it is not to be executed. It is looked up each time: what
    stands in the place of an operator now is what this process executes."""
    found = _holders().get(name)
    return None if found is None else getattr(found, name.rpartition(".")[2], None)


@lru_cache(maxsize=1)
def _holders() -> dict[str, Any]:
    """Return the owner of each function that a capture may name, by that name."""
    found: dict[str, Any] = {}
    for path, module in MODULES:
        for name in dir(module):
            if not name.startswith("_") and callable(getattr(module, name)) and not is_refused(name):
                found[f"{path}.{name}"] = module
    return found | {f"paddle.Tensor.{name}": paddle.Tensor for name in special_methods()}


# ---------------------------------------------------------------------------------------------------------- calls
LEVELS = ("O1", "O2", "OD")

IN_BYTES = frozenset({"as_strided", "view_dtype"})
"""Operators that take places in memory in bytes, or read bits as another dtype: in float64 they compute something else."""


@dataclass
class Rebuilt:
    """A call ready to be executed, once: what it is given may be written by it."""

    call: RecordedCall
    place: Place
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, paddle.Tensor]
    """Tensor arguments by slot, as they are given; memory that the capture has no bytes of holds NaN (integers: 0)."""
    leaves: dict[str, paddle.Tensor]
    """Those that gradients are taken of."""
    grad: bool
    amp: Mapping[str, Any] | None
    """Automatic mixed precision: dtype, level, and what differs from its lists."""
    drawn: list[str]
    """Slots whose elements were drawn to match recorded numbers."""
    unwritten: list[str]
    """Slots that nobody had written before the call."""
    outputs: dict[str, paddle.Tensor] = field(default_factory=dict)
    result: Any = None
    """As the function returned it."""
    random: bool = False
    """Whether it drew random numbers of a generator of the CPU's."""

    def execute(self) -> dict[str, paddle.Tensor]:
        """Execute the call, which may raise anything; return what it computed, by the slots in which a capture records it."""
        generator = invocations.generator_of("cpu")
        with self.modes():
            before = invocations.described(generator)
            self.result = self.function(*self.args, **self.kwargs)
            self.random = invocations.described(generator) != before
        self.outputs = self._named(self.result)
        return self.outputs

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Set the generators, mixed precision and the grad mode as they were when the call was recorded."""
        restore_random(self.call.random, self.place)
        default = paddle.get_default_dtype()
        paddle.set_default_dtype(self.place.dtype(default))  # of quotients of integers
        try:
            with paddle.set_grad_enabled(self.grad), invocations.casting(_auto_cast(self.amp)):
                yield
        finally:
            paddle.set_default_dtype(default)

    def gradients(self, received: Mapping[str, paddle.Tensor], wanted: Sequence[str]) -> dict[str, paddle.Tensor]:
        """Return the gradients ``grad_input.…`` that the call sends back for ``grad_output.…`` received, after `execute`; raise
        `NotReplayable` where what one belongs to is not there, or carries none."""
        ends, leaves = decoding.differentiated(received, wanted, self.outputs, self.leaves, lambda end: not end.stop_gradient)
        given = [g if g.dtype == end.dtype else g.cast(end.dtype) for g, end in zip(received.values(), ends, strict=True)]
        found = paddle.grad(ends, leaves, given, allow_unused=True)
        return {slot: gradient for slot, gradient in zip(wanted, found, strict=True) if gradient is not None}

    def _named(self, result: Any) -> dict[str, paddle.Tensor]:
        unwritten = tuple(says(self.call.key.op, "unwritten") or ())
        found = {s: t for s, t in named_tensors("output", result) if not s.startswith(unwritten)}
        if isinstance(out := self.kwargs.get("out"), paddle.Tensor):
            found.setdefault("output.out", out)
        for slot, tensor in self.inputs.items():
            if (written := slot.replace("input", "output.written", 1)) in self.call.tensors:
                found[written] = tensor
        return found


def rebuild(call: RecordedCall, place: Place, *, grad: bool = False) -> Rebuilt:
    """Make a recorded forward call of level api (of a backward call, its forward call) ready to be executed at a place, with
    ``grad`` so that gradients can be asked for. Raises NotReplayable with the reason, TrueupError where the file that holds its
    tensors is damaged."""
    function = function_of(call)
    if call.invocation is None:
        raise NotReplayable("the capture does not say how it was made")
    if place.wide and name_of(call.key.op) in IN_BYTES:
        raise NotReplayable("it reads bytes, and float64 has different ones")
    try:
        return _rebuild(call, place, function, grad)
    except (TypeError, KeyError, IndexError, OverflowError, AttributeError):  # no capture of ours
        return damaged()  # type: ignore[no-any-return]
    except (RuntimeError, ValueError, OSError) as error:  # no memory, among others
        raise NotReplayable(f"its arguments cannot be made on {place.here}: {first_line(error)}") from None


def _rebuild(call: RecordedCall, place: Place, function: Callable[..., Any], grad: bool) -> Rebuilt:
    builder = Builder(call, place, grad=grad)
    invocation = builder.invocation
    args, kwargs = builder.arguments(invocation)
    enabled = bool(invocation.get("grad", False)) or grad
    return Rebuilt(
        call, place, function, args, kwargs, builder.tensors, builder.leaves, enabled,
        None if place.wide else amp_of(invocation), builder.drawn, builder.unwritten,
    )  # fmt: skip


def function_of(call: RecordedCall) -> Callable[..., Any]:
    """Return the function that a call executes; raise `NotReplayable` where a capture may not have it executed."""
    if call.key.level == "module":
        raise NotReplayable("a Layer is code, which no capture holds; its api calls are executed instead")
    if call.key.phase == "collective":
        raise NotReplayable("a collective needs the other ranks")
    found = allowed(call.key.op)
    if found is None:
        if call.key.op.endswith(".apply"):
            raise NotReplayable("a PyLayer is code, which no capture holds; the calls inside it are executed instead")
        raise NotReplayable(f"{call.key.op} is not among the functions that a capture may have executed")
    return found


def amp_of(invocation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return dtype, level and lists of automatic mixed precision; None where it was off."""
    casts, how = invocation.get("autocast"), invocation.get("amp")
    if not (isinstance(casts, dict) and isinstance(how, dict)):
        return None
    dtype = next(iter(casts.values()), None)
    if dtype not in ("float16", "bfloat16") or how.get("level") not in LEVELS:
        damaged()
    return {"dtype": dtype, **how}


def _auto_cast(how: Mapping[str, Any] | None) -> invocations.AutoCast | None:
    """Return how Paddle cast; on the CPU it never does."""
    if how is None:
        return None
    dtype, level = how["dtype"], how["level"]
    usual, banned = white_list()[dtype][level], black_list()[dtype][level]
    white, black = ({str(name) for name in how.get(key) or ()} for key in ("white", "black"))
    return getattr(core.AmpLevel, level), dtype, how.get("promote") is True, (white | set(usual), black | set(banned))


def restore_random(random: Mapping[str, bytes], place: Place) -> None:
    """Set the generators to recorded states, those that take them; without one, so that all executions draw alike."""
    if not random:
        paddle.seed(0)
    for kind, state in random.items():
        name, _, number = place.of(kind).partition(":")
        generator = invocations.generator_of(name, int(number) if number.isdigit() else 0)
        if generator is None or not invocations.set_state(generator, state):  # kernels that a device lacks draw on the CPU
            invocations.set_state(invocations.generator_of("cpu"), state)
