"""A recorded call as PyTorch executes it: function, arguments on a device, and the modes and random state around it.

>>> call = RecordedCalls(trueup.open_capture("runs/cpu")).at(rank=0, seq=4711)
>>> made = rebuild(call, Place("npu", home="cpu"))              # or Place("cpu", home="cpu", wide=True): the float64 truth
>>> outputs = made.execute()                                    # {'output.0': tensor, 'output.written.1': ...}, slots as recorded
>>> backward = rebuild(forward_call, place, grad=True)
>>> backward.execute(); backward.gradients({"grad_output.0": g}, ["grad_input.0"])

A function or operator is looked up in `allowed`; arguments are numbers, names of dtypes and the like, and tensors that are filled
with the recorded bytes, laid out in memory as they were (strides, alignment, arguments that share memory). What cannot be made
again raises `NotReplayable` with the reason, never something else in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trueup.adapters.torch import allowed
from trueup.adapters.torch.dispatch import Operator, _outputs
from trueup.adapters.torch.functions import BUFFERS_WRITTEN
from trueup.adapters.torch.tensors import named_tensors
from trueup.rerun.recorded import RecordedCall, RecordedTensor, read_state
from trueup.verdict.criteria import UNIT_ROUNDOFF

ALIGNMENT = 64
"""Bytes to which PyTorch's allocators align; where a view begins within such a block may decide how it is vectorised."""
SPARSE = 1 << 26
"""Elements between the first and last of a tensor up to which its strides are kept however few they are."""


class NotReplayable(Exception):
    """A call cannot be executed again; the text says why."""


Draw = Callable[[RecordedTensor], NDArray[Any]]


@dataclass(frozen=True)
class Place:
    """Where and how calls are executed.

    Args:
        device: ``npu``, ``cuda:1``, ``cpu``.
        home: type of device that the capture was taken on; its tensors move to ``device``, others (a CPU scalar beside them) stay.
        wide: on the CPU in float64 and complex128, without autocast: the truth.
        draw: makes the elements of tensors of which only numbers were kept; None: such calls are not executed.
    """

    device: str
    home: str = "cpu"
    wide: bool = False
    draw: Draw | None = None
    hosted: tuple[str, ...] = ()
    """Slots that are on the CPU whatever the device."""
    perturb: bool = False
    """Move each floating-point element by one unit in its last place, up or down."""

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


@dataclass
class Rebuilt:
    """A call ready to be executed, once: what it is given may be written by it."""

    call: RecordedCall
    place: Place
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    """Tensor arguments by slot, as they are given; memory that the capture has no bytes of holds NaN (integers: 0)."""
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those that gradients are taken of."""
    grad: bool = False
    autocast: dict[str, str] = field(default_factory=dict)
    random: Mapping[str, bytes] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    """Slots whose elements were drawn to match recorded numbers."""
    unwritten: list[str] = field(default_factory=list)
    """Slots that nobody had written before the call."""
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def execute(self) -> dict[str, torch.Tensor]:
        """Execute the call and return what it computed, by the slots in which a capture records it.

        Raises:
            Exception: whatever the function raises.
        """
        with self.modes():
            result = self.function(*self.args, **self.kwargs)
        self.outputs = self._named(result)
        return self.outputs

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Set the generators, autocast and the grad mode as they were when the call was recorded."""
        if self.random:
            restore_random(self.random, self.place)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast.items():
                where = self.place.of(kind).type
                stack.enter_context(torch.autocast(where, dtype=_constant(torch.dtype, dtype), cache_enabled=False))
            yield

    def gradients(self, received: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the gradients ``grad_input.…`` that the call sends back for ``grad_output.…`` received; after `execute`.

        Raises:
            NotReplayable: an output or input that a gradient belongs to is not there, or carries none.
        """
        ends, given = [], []
        for slot, gradient in received.items():
            output = self.outputs.get(slot.removeprefix("grad_"))
            if output is None or not output.requires_grad:
                raise NotReplayable(f"the result that {slot} belongs to carries no gradient when the call is made alone")
            ends.append(output)
            given.append(gradient)
        missing = [slot for slot in wanted if slot.removeprefix("grad_") not in self.leaves]
        if missing:
            raise NotReplayable(f"{missing[0]} belongs to no argument of the call")
        leaves = [self.leaves[slot.removeprefix("grad_")] for slot in wanted]
        found = torch.autograd.grad(ends, leaves, given, allow_unused=True)
        return {slot: gradient for slot, gradient in zip(wanted, found, strict=True) if gradient is not None}

    def _named(self, result: Any) -> dict[str, torch.Tensor]:
        if self.call.key.level == "aten" and getattr(self.function, "_schema", None) is not None:
            pairs, _ = _outputs(Operator.of(self.function), self.args, self.kwargs, result)
            return dict(pairs)
        found = dict(named_tensors("output", result))
        found |= {slot.replace("input", "output.written", 1): t for slot, t in self.inputs.items()}
        for slot, (position, keyword) in BUFFERS_WRITTEN.get(self.call.key.op, {}).items():
            tensor = self.kwargs.get(keyword, self.args[position] if len(self.args) > position else None)
            if isinstance(tensor, torch.Tensor):
                found[f"output.{slot}"] = tensor
        if "out" in self.kwargs:
            found |= dict(named_tensors("output", (), {"out": self.kwargs["out"]}))
        return {slot: t for slot, t in found.items() if slot in self.call.tensors or not slot.startswith("output.written")}


def rebuild(call: RecordedCall, place: Place, *, grad: bool = False) -> Rebuilt:
    """Make a recorded call of level api or aten ready to be executed.

    Args:
        call: a forward call, or any call of level aten. Of a backward call of level api, its forward call.
        place: where.
        grad: gradients will be asked for.

    Raises:
        NotReplayable: it cannot be executed again, and why.
        TrueupError: the file that holds its tensors is damaged.
    """
    function = _function(call)
    builder = _Builder(call, place, grad)
    invocation = call.invocation if call.invocation is not None else assumed(call)
    args = tuple(builder.value(v, f"input.{k}") for k, v in enumerate(invocation["args"]))
    kwargs = {str(name): builder.value(v, f"input.{name}") for name, v in dict(invocation.get("kwargs") or {}).items()}
    if "out" in invocation:
        kwargs["out"] = builder.out(invocation["out"])
    enabled = bool(invocation.get("grad", False)) or grad
    autocast = {} if place.wide else {str(k): str(v) for k, v in dict(invocation.get("autocast") or {}).items()}
    return Rebuilt(
        call, place, function, args, kwargs, builder.tensors, builder.leaves, enabled, autocast, call.random, builder.drawn,
        builder.unwritten,
    )  # fmt: skip


def _function(call: RecordedCall) -> Callable[..., Any]:
    op, level = call.key.op, call.key.level
    if level == "module":
        raise NotReplayable("a module is code, which no capture holds; its api and aten calls are executed instead")
    if call.key.phase == "collective":
        raise NotReplayable("a collective needs the other ranks")
    if level == "aten":
        overload = (call.invocation or {}).get("overload")
        found = allowed.operator(op, overload if isinstance(overload, str) else None)
    else:
        found = allowed.function(op)
    if found is None:
        raise NotReplayable(f"{op} is not among the functions that a capture may have executed")
    return found


def assumed(call: RecordedCall) -> dict[str, Any]:
    """Return how a call was made as far as the slots and values of a capture of less detail tell."""
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
        into[key] = _with_tensors(_guessed(value), into.get(key))
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


def _guessed(value: Any) -> Any:
    """Read back what `tensors.encode_values` wrote for people: text that names a dtype or a slice."""
    if isinstance(value, list):
        return [_guessed(v) for v in value]
    if not isinstance(value, str):
        return value
    if value == "ellipsis":
        return {"ellipsis": True}
    if value.startswith("torch."):
        name = value.removeprefix("torch.")
        for kind, key in ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format")):
            if isinstance(getattr(torch, name, None), kind):
                return {key: name}
    parts = value.split(":")
    if len(parts) == 3 and all(p == "None" or p.lstrip("-").isdigit() for p in parts):
        return {"slice": [None if p == "None" else int(p) for p in parts]}
    return value


class _Builder:
    """Decodes the arguments of one call."""

    def __init__(self, call: RecordedCall, place: Place, grad: bool) -> None:
        self._call, self._place, self._grad = call, place, grad
        self._buffers: dict[str, _Buffer] = {}
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self.drawn: list[str] = []
        self.unwritten: list[str] = []
        self._writes = writes(call)
        invocation = call.invocation or {}
        for node in _tensor_nodes([invocation.get("args"), invocation.get("kwargs")]):
            self._nodes[str(node["tensor"])] = node

    def value(self, node: Any, slot: str, depth: int = 0) -> Any:
        """Return the argument that a node stands for."""
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if depth > 32:
            raise NotReplayable("its arguments are nested too deeply")
        if isinstance(node, list):
            return [self.value(v, f"{slot}.{k}", depth + 1) for k, v in enumerate(node)]
        if not isinstance(node, dict):
            raise NotReplayable("its arguments are damaged in the capture")
        if "tensor" in node:
            return self._tensor(node)
        for key, read in (("tuple", tuple), ("size", torch.Size)):
            if isinstance(node.get(key), list):
                return read([self.value(v, f"{slot}.{k}", depth + 1) for k, v in enumerate(node[key])])
        if isinstance(node.get("dict"), dict):
            return {k: self.value(v, f"{slot}.{k}", depth + 1) for k, v in node["dict"].items()}
        return self._constant(node)

    def _constant(self, node: Mapping[str, Any]) -> Any:
        if node.get("ellipsis") is True:
            return Ellipsis
        if "dtype" in node:
            return self._place.dtype(_constant(torch.dtype, node["dtype"]))
        if "device" in node:
            return self._place.of(str(node["device"]))
        if "layout" in node:
            return _constant(torch.layout, node["layout"])
        if "memory_format" in node:
            return _constant(torch.memory_format, node["memory_format"])
        if "float" in node:
            return float(node["float"]) if node["float"] in ("nan", "inf", "-inf") else _damaged()
        if "complex" in node:
            real, imaginary = node["complex"]
            return complex(float.fromhex(str(real)), float.fromhex(str(imaginary)))
        if "slice" in node:
            bounds = node["slice"]
            return slice(*bounds) if len(bounds) == 3 and all(b is None or type(b) is int for b in bounds) else _damaged()
        if "generator" in node:
            return self._generator(node["generator"])
        if "other" in node:
            raise NotReplayable(f"an argument is a {str(node['other'])[:80]}, which a capture cannot hold")
        return _damaged()

    def _generator(self, node: Mapping[str, Any]) -> torch.Generator:
        state = read_state(node.get("state"))
        where = self._place.of(str(node.get("device", "cpu")))
        try:
            made = torch.Generator(where)
            made.set_state(torch.frombuffer(bytearray(state or b""), dtype=torch.uint8))
        except (RuntimeError, ValueError) as error:
            raise NotReplayable(f"its generator cannot be made again on {where}: {_first_line(error)}") from None
        return made

    def out(self, node: Any) -> Any:
        """Return what the call is to write its result to."""
        if isinstance(node, list):
            return tuple(self.out(n) for n in node)
        if not (isinstance(node, dict) and isinstance(node.get("empty"), list) and len(node["empty"]) == 4):
            _damaged()
        dtype, shape, strides, device = node["empty"]
        kept = self._call.tensors.get("output.out") or self._call.tensors.get("output.0")
        if kept is not None and kept.numel < math.prod(shape):  # as large as what came out, or an untrue size
            _damaged()
        wanted = self._place.dtype(_constant(torch.dtype, dtype)), self._place.of(device)
        if strides is None:
            raise NotReplayable("it writes to a tensor that is no plain array")
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=wanted[0], device=wanted[1])

    # ---------------------------------------------------------------- tensors
    def _tensor(self, node: Mapping[str, Any]) -> torch.Tensor:
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
            if slot.replace("grad_", "") not in self.leaves and shared in self.leaves:
                self.leaves[slot] = self.leaves[shared]
            return same
        tensor = self._lay(recorded, node)
        wants = node.get("grad") is True and (tensor.is_floating_point() or tensor.is_complex())
        if call_grad(self._call, self._grad) and wants:
            leaf = tensor.requires_grad_()
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
        dtype = self._place.dtype(_constant(torch.dtype, recorded.dtype))
        group = str(node.get("shares", recorded.slot))
        members = [n for n in self._nodes.values() if n.get("shares") == group or n["tensor"] == group] if self._writes else []
        where = torch.device("cpu") if recorded.slot in self._place.hosted else self._place.of(recorded.device)
        strides = recorded.strides or ()
        if len(members) > 1 and (found := self._shared(group, members, dtype, where)) is not None:
            offset = _natural(node.get("offset", 0)) - found.start
            return _view(found, array, recorded.shape, strides, offset)
        extent = _extent(recorded.shape, strides)
        if extent > max(SPARSE, 64 * recorded.numel):  # unlikely, or untrue
            strides, extent = _contiguous(recorded.shape), recorded.numel
        lead = _natural(node.get("offset", 0)) % max(ALIGNMENT // dtype.itemsize, 1)
        buffer = _Buffer(torch.zeros(lead + extent, dtype=dtype), where, lead)
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
                start = _natural(node.get("offset", 0))
                spans.append((start, start + _extent(recorded.shape, recorded.strides)))
            first = min(start for start, _ in spans)
            size = max(end for _, end in spans) - first
            if size > SPARSE:
                return None
            self._buffers[group] = _Buffer(torch.zeros(size, dtype=dtype), where, first)
        return self._buffers[group]

    def _elements(self, recorded: RecordedTensor) -> NDArray[Any] | None:
        if recorded.kept:
            return _moved(recorded) if self._place.perturb else recorded.array()
        if recorded.numel == 0:
            return None
        if recorded.measured and self._place.draw is not None:
            self.drawn.append(recorded.slot)
            return self._place.draw(recorded)
        if recorded.measured or recorded.digest is not None:
            raise NotReplayable(f"{recorded.slot} was kept by its {'numbers' if recorded.measured else 'digest'} alone")
        self.unwritten.append(recorded.slot)
        return None


def as_tensor(call: RecordedCall, recorded: RecordedTensor, place: Place) -> torch.Tensor:
    """Return a recorded tensor by itself, such as a gradient that a call receives."""
    if recorded.strides is None:
        raise NotReplayable(f"{recorded.slot} is no plain array")
    return _Builder(call, place, grad=False)._lay(recorded, {"tensor": recorded.slot})


def _moved(recorded: RecordedTensor) -> NDArray[Any]:
    """Return the elements, each one unit in its last place away, in float64."""
    array, unit = recorded.array(), UNIT_ROUNDOFF.get(recorded.dtype, 0.0)
    if not unit or array.dtype.kind == "c":
        return array
    signs = np.random.default_rng(0).integers(0, 2, array.shape) * 2.0 - 1.0
    wide = array.astype(np.float64)
    return np.where(np.abs(wide) < 1e30, wide * (1 + 2 * unit * signs), wide)


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
    there = torch.as_strided(buffer.there, shape, strides, offset)
    if buffer.start:  # memory that several share: filled one after the other
        there.copy_(host.to(buffer.where))
    return there


def fill(host: torch.Tensor, array: NDArray[Any] | None) -> None:
    """Write elements into a tensor on the CPU of any strides, overlapping ones too; None: NaN, for memory that nobody wrote."""
    if array is None:
        if host.numel():
            flat = torch.as_strided(host, (_extent(tuple(host.shape), host.stride()),), (1,))
            flat.fill_(math.nan if host.dtype.is_floating_point or host.dtype.is_complex else 0)
        return
    given = from_numpy(array)
    if given.dtype != host.dtype:
        given = given.to(host.dtype)
    if 0 in host.stride() and host.numel():  # repeated elements: each is written once
        once = [slice(0, 1) if stride == 0 else slice(None) for stride in host.stride()]
        host[tuple(once)].copy_(given[tuple(once)])
        return
    try:
        host.copy_(given)
    except RuntimeError:  # elements overlap otherwise (unfold): NumPy writes them one after the other
        into = np.lib.stride_tricks.as_strided(bits(torch.as_strided(host, (_extent(tuple(host.shape), host.stride()),), (1,))),
                                               host.shape, [s * host.dtype.itemsize for s in host.stride()])  # fmt: skip
        into[...] = bits(given)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a dense tensor on the CPU as integers of its width, sharing its memory; complex128 as itself."""
    kind = _BITS.get(tensor.dtype.itemsize)
    plain: NDArray[Any] = (tensor.detach() if kind is None else tensor.detach().view(kind)).numpy()
    return plain


def from_numpy(array: NDArray[Any]) -> torch.Tensor:
    """Return an array of any dtype of NumPy or ml_dtypes as a tensor on the CPU; a copy."""
    dtype = _constant(torch.dtype, array.dtype.name)
    copied = np.array(array, order="C", copy=True)
    if array.dtype.kind in "biufc":
        return torch.from_numpy(copied.reshape(-1)).reshape(array.shape)
    kind = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
    return torch.from_numpy(copied.reshape(-1).view(kind)).view(dtype).reshape(array.shape)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the elements of a tensor on any device, C order, in the dtype of NumPy or ml_dtypes that captures use."""
    from trueup.store.segment import numpy_dtype

    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    name = str(host.dtype).removeprefix("torch.")
    wanted = numpy_dtype(name)
    if wanted.kind in "biufc":
        found: NDArray[Any] = host.numpy()
        return found
    plain: NDArray[Any] = bits(host.reshape(-1)).view(wanted).reshape(tuple(host.shape))
    return plain


def restore_random(random: Mapping[str, bytes], place: Place) -> None:
    """Set the generators to recorded states, those that take them: a GPU's cannot go on from a CPU's."""
    for kind, state in random.items():
        where = place.of(kind).type
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        try:
            if where == "cpu":
                torch.set_rng_state(tensor)
            else:
                torch.get_device_module(where).set_rng_state(tensor)
        except (RuntimeError, TypeError, AttributeError):
            continue


def writes(call: RecordedCall) -> bool:
    """Tell whether a call writes some of its arguments."""
    last = call.key.op.rpartition("::")[2].rpartition(".")[2]
    in_place = (last.endswith("_") and not last.endswith("__")) or last in _WRITING
    return in_place or any(s.startswith("output.written") for s in call.outputs)


_WRITING = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ipow__", "__imod__"}
)


def may_write(call: RecordedCall) -> bool:
    """Tell whether a flag of the call may be the ``inplace`` of ``relu(x, inplace=True)``."""
    made = call.invocation or {}
    return True in [v for v in made.get("args") or () if isinstance(v, bool)] or bool(dict(made.get("kwargs") or {}).get("inplace"))


def call_grad(call: RecordedCall, asked: bool) -> bool:
    """Tell whether arguments are to require gradients: kernels are chosen by that, too."""
    return asked or (call.key.level == "api" and bool((call.invocation or {}).get("grad")))


def _unleafed(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same elements and strides that a call may write to."""
    copied = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return copied.copy_(leaf) if _dense(leaf) else leaf.clone()


def _dense(tensor: torch.Tensor) -> bool:
    return _extent(tuple(tensor.shape), tensor.stride()) >= tensor.numel() and 0 not in tensor.stride()


def _tensor_nodes(node: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    if depth > 32:
        return
    if isinstance(node, dict):
        if "tensor" in node:
            yield node
        for inner in node.values():
            yield from _tensor_nodes(inner, depth + 1)
    elif isinstance(node, list):
        for inner in node:
            yield from _tensor_nodes(inner, depth + 1)


def _constant(kind: type, name: Any) -> Any:
    """Return a dtype, layout or memory format of PyTorch by its name."""
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    return found if isinstance(found, kind) else _damaged()


def _damaged() -> Any:
    raise NotReplayable("its arguments are damaged in the capture")


def _natural(number: Any) -> int:
    return number if type(number) is int and 0 <= number < 2**62 else _damaged()


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    if len(shape) != len(strides) or any(s < 0 for s in strides):
        _damaged()
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
