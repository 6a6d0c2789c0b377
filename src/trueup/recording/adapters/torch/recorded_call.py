"""A recorded call as PyTorch executes it: function, arguments on a device, and the modes and random state around it.

>>> call = RecordedCalls(trueup.open_capture("runs/cpu")).at(rank=0, seq=4711)
>>> made = rebuild(call, Place("npu", home="cpu"))              # or Place("cpu", home="cpu", wide=True): the float64 truth
>>> outputs = made.execute()                                    # {'output.0': tensor, 'output.written.1': ...}, slots as recorded
>>> backward = rebuild(forward_call, place, grad=True)
>>> backward.execute(); backward.gradients({"grad_output.0": g}, ["grad_input.0"])

Arguments are numbers, names of dtypes and the like, and tensors that are filled with the recorded bytes, laid out in memory as they
were (strides, alignment, arguments that share memory). What cannot be made again raises `NotReplayable` with the reason, never
something else in its place.

A capture is untrusted, so a function's name is never followed (no ``getattr`` along dots, no import): it is looked up among the
functions that PyTorch itself declares overridable, and its dispatcher's operators, and only those that compute tensors. What loads
or saves, opens files, or runs code it is given is not among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import get_ignored_functions, get_testing_overrides
from torch.utils._pytree import tree_map_only

from trueup.foundation.facts.operators import has
from trueup.foundation.store.segment import numpy_dtype
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch import modes
from trueup.recording.adapters.torch.functions import BUFFERS_WRITTEN, Operator, _outputs, name_of
from trueup.recording.adapters.torch.random_states import set_state
from trueup.recording.adapters.torch.tensors import FACTS, named_tensors
from trueup.recording.execution import decoding
from trueup.recording.execution.decoding import damaged, extent, natural, placed
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedTensor, read_state
from trueup.recording.execution.recorded import Place as BasePlace

NAMES: dict[str, list[str]] = {kind: names.split() for kind, names in FACTS["allowed"].items()}


def is_refused(name: str) -> bool:
    """Tell whether a name is of what is never executed."""
    last = name.rpartition("::")[2].rpartition(".")[2].lower()
    return last in NAMES["refused_names"] or any(part in last for part in NAMES["refused"])


def allowed_function(name: str) -> Callable[..., Any] | None:
    """Return the function of level api that a capture means by a name, or None where it is not to be executed."""
    return None if is_refused(name) else _functions().get(name)


def allowed_operator(name: str, overload: str | None) -> Callable[..., Any] | None:
    """Return an operator of the dispatcher, ``aten::add``; an overload of None lets PyTorch choose it by the arguments."""
    namespace, _, bare = name.partition("::")
    if namespace not in NAMES["namespaces"] or not bare.isidentifier() or is_refused(name):
        return None
    if overload is None:
        if name not in _packets():
            return None
        return getattr(getattr(torch.ops, namespace), bare, None)
    if (name if overload in ("", "default") else f"{name}.{overload}") not in _registered():
        return None
    return getattr(getattr(getattr(torch.ops, namespace), bare, None), overload or "default", None)


@lru_cache(maxsize=1)
def _registered() -> frozenset[str]:
    """Return the names of the dispatcher's operators: `torch.ops` also has TorchScript's, ``aten::save`` among them."""
    return frozenset(torch._C._dispatch_get_all_op_names())


@lru_cache(maxsize=1)
def _packets() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in _registered())


@lru_cache(maxsize=1)
def _functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that a capture may name at level api, by name."""
    ignored = get_ignored_functions()
    found: dict[str, Callable[..., Any]] = {}
    for func in [*get_testing_overrides(), *_generated()]:
        if func in ignored or not callable(func):
            continue
        name = name_of(func)
        if name is not None:
            found.setdefault(name, func)
    return found | {f"torch.{name}": getattr(torch, name) for name in NAMES["factories"] if hasattr(torch, name)} | {
        f"torch.Tensor.{name}": getattr(torch.Tensor, name) for name in NAMES["methods"]
    }


def _generated() -> Iterator[Callable[..., Any]]:
    """Yield functions and methods that PyTorch generates from its operators, also those it does not declare overridable."""
    native: Any = torch._C
    for holder in (native._VariableFunctions, native.TensorBase, native._nn, native._fft, native._linalg, native._special):
        for name in dir(holder):
            if not name.startswith("__"):
                value = getattr(holder, name, None)
                if callable(value) and not isinstance(value, type):
                    yield value


def assumed(call: RecordedCall) -> dict[str, Any]:
    """Return how a call was made as far as its slots and values tell; see `trueup.recording.execution.decoding.assumed`."""
    return decoding.assumed(call, _named)


def _named(text: str) -> dict[str, str] | None:
    name = text.removeprefix("torch.")
    if name == text:
        return None
    kinds = ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format"))
    return next(({key: name} for kind, key in kinds if isinstance(getattr(torch, name, None), kind)), None)


def fill(host: torch.Tensor, array: NDArray[Any] | None) -> None:
    """Write elements into a tensor on the CPU of any strides, overlapping ones too; None: NaN, for memory that nobody wrote."""
    if array is None:
        if host.numel():
            flat = torch.as_strided(host, (extent(tuple(host.shape), host.stride()),), (1,))
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
        into = np.lib.stride_tricks.as_strided(bits(torch.as_strided(host, (extent(tuple(host.shape), host.stride()),), (1,))),
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
    dtype = constant(torch.dtype, array.dtype.name)
    copied = np.array(array, order="C", copy=True)
    if array.dtype.kind in "biufc":
        return torch.from_numpy(copied.reshape(-1)).reshape(array.shape)
    kind = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
    return torch.from_numpy(copied.reshape(-1).view(kind)).view(dtype).reshape(array.shape)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the elements of a tensor on any device, C order, in the dtype of NumPy or ml_dtypes that captures use."""
    if tensor._is_zerotensor():  # zeros that autograd never allocated
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    name = str(host.dtype).removeprefix("torch.")
    wanted = numpy_dtype(name)
    if wanted.kind in "biufc":
        found: NDArray[Any] = host.numpy()
        return found
    plain: NDArray[Any] = bits(host.reshape(-1)).view(wanted).reshape(tuple(host.shape))
    return plain


def constant(kind: type, name: Any) -> Any:
    """Return a dtype, layout or memory format of PyTorch by its name."""
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    return found if isinstance(found, kind) else damaged()


class Place(BasePlace):
    """Where and how PyTorch executes calls."""

    def of(self, recorded: str) -> torch.device:
        if self.wide:
            return torch.device("cpu")
        return torch.device(self.device if recorded.partition(":")[0] == self.home else "cpu")

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        if not self.wide:
            return dtype
        return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


class Builder(decoding.Builder):
    """Decodes the arguments of one call."""

    def __init__(self, call: RecordedCall, place: Place, grad: bool, given: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(call, place, grad=grad, writes=writes(call))
        self._place, self._given = place, given or {}
        self._buffers: dict[str, _Buffer] = {}
        self.samples: dict[str, dict[int, int]] = {}

    def sequence(self, kind: str, items: list[Any]) -> Any:
        return torch.Size(items) if kind == "size" else super().sequence(kind, items)

    def constant(self, node: Mapping[str, Any]) -> Any:
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
            raise NotReplayable("it writes to a tensor that is not a plain array")
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=wanted[0], device=wanted[1])

    # ---------------------------------------------------------------- tensors
    def tensor(self, node: Mapping[str, Any]) -> torch.Tensor:
        slot = str(node["tensor"])
        if slot in self.tensors:
            return self.tensors[slot]
        recorded = decoding.plain(self._call, node)
        shared = node.get("shares")
        if isinstance(shared, str) and shared in self.tensors and decoding.alike(self._call, self._nodes, slot, shared):
            same: torch.Tensor = self.tensors[shared]
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

    def _lay(self, recorded: RecordedTensor, node: Mapping[str, Any]) -> torch.Tensor:
        array = self.elements(recorded)
        dtype = self._place.dtype(constant(torch.dtype, recorded.dtype))
        group = str(node.get("shares", recorded.slot))
        members = decoding.sharing(self._nodes, group) if self._writes else []
        hosted = recorded.slot in self._place.hosted and recorded.dtype == "int64"  # else it is another argument at that place
        where = torch.device("cpu") if hosted else self._place.of(recorded.device)
        strides = recorded.strides or ()
        if len(members) > 1 and (found := self._shared(group, members, dtype, where)) is not None:
            offset = natural(node.get("offset", 0)) - found.start
            return _view(found, array, recorded.shape, strides, offset)
        strides, length, lead = placed(recorded, node, dtype.itemsize)
        buffer = _Buffer(torch.zeros(lead + length, dtype=dtype), where, lead)
        return _view(buffer, array, recorded.shape, strides, lead)

    def _shared(self, group: str, members: list[Mapping[str, Any]], dtype: torch.dtype, where: torch.device) -> _Buffer | None:
        """Return the memory that several arguments share, of which the call writes one; None where it would be too much."""
        if group not in self._buffers:
            found = decoding.span(self._call, members, str(dtype).removeprefix("torch."), decoding.SPARSE)
            if found is None:
                return None
            self._buffers[group] = _Buffer(torch.zeros(found[1], dtype=dtype), where, found[0])
        return self._buffers[group]


def load(call: RecordedCall, place: Place, *, leave: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return the tensors that a call is given, by slot, but those in ``leave``; arguments that share memory share it."""
    builder = Builder(call, place, grad=False)
    return {slot: builder.tensor(node).detach() for slot, node in builder._nodes.items() if slot not in leave}


def as_tensor(call: RecordedCall, recorded: RecordedTensor, place: Place) -> torch.Tensor:
    """Return a recorded tensor by itself, such as a gradient that a call receives."""
    if recorded.strides is None:
        raise NotReplayable(f"{recorded.slot} is not a plain array")
    return Builder(call, place, grad=False)._lay(recorded, {"tensor": recorded.slot})


@dataclass
class _Buffer:
    """Memory that arguments lie in: on the host until it is filled, then on its device."""

    host: torch.Tensor
    where: torch.device
    start: int  # offset, in the recorded storage, of its first element
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
    caches: bool = True
    """Whether autocast casts a weight once for all its uses in the call, so that their gradients add up in the narrow dtype."""
    random: Mapping[str, bytes] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    """Slots whose elements were drawn to match recorded numbers."""
    unwritten: list[str] = field(default_factory=list)
    """Slots that nobody had written before the call."""
    transforms: Sequence[modes.Transform] = ()
    """Those of `torch.func` that it was made in."""
    samples: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Slots with all samples of a vmap: where those lie, by the level of the vmap."""
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    """Gradients that the call itself sends to one of its results, beside what it is given."""

    def execute(self) -> dict[str, torch.Tensor]:
        """Execute the call, which may raise anything; return what it computed, by the slots in which a capture records it."""
        with self.modes():
            if self.transforms:
                self._execute_inside()
            else:
                self.outputs = self._named(self.function(*self.args, **self.kwargs))
        return self.outputs

    def _execute_inside(self) -> None:
        """Execute the call inside the `torch.func` transforms that it was made in."""
        slots = list(self.samples)

        def call(given: list[torch.Tensor]) -> None:
            inner = {id(self.inputs[slot]): tensor for slot, tensor in zip(slots, given, strict=True)}
            args, kwargs = tree_map_only(torch.Tensor, lambda t: inner.get(id(t), t), (self.args, self.kwargs))
            result = self.function(*args, **kwargs)
            self.outputs = self._named(tree_map_only(torch.Tensor, modes.below, result))

        modes.execute(self.transforms, [self.inputs[slot] for slot in slots], list(self.samples.values()), call)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Set the generators, autocast and the grad mode as they were when the call was recorded."""
        if self.random:
            restore_random(self.random, self.place)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast.items():
                where = self.place.of(kind).type
                stack.enter_context(torch.autocast(where, dtype=constant(torch.dtype, dtype), cache_enabled=self.caches))
            yield

    def gradients(self, received: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the gradients ``grad_input.…`` that the call sends back for ``grad_output.…`` received, after `execute`; raise
        `NotReplayable` where what one belongs to is not there, or carries none."""
        ends, leaves = decoding.differentiated(received, wanted, self.outputs, self.leaves, lambda end: end.requires_grad)
        given = [gradient.to(end.dtype) for gradient, end in zip(received.values(), ends, strict=True)]
        # What was recorded is all that arrived there, also from another result of the call that was computed from this one
        # (the cell state of `lstm_cell`): it takes the place of what arrives now.
        instead = zip(received, given, ends, strict=True)
        hooks = [end.register_hook(partial(self._instead, slot, gradient)) for slot, gradient, end in instead]
        found = torch.autograd.grad(ends, leaves, given, allow_unused=True)
        for hook in hooks:  # it holds this object, which holds the graph that holds it, where the garbage collector does not look
            hook.remove()
        return {slot: gradient for slot, gradient in zip(wanted, found, strict=True) if gradient is not None}

    def _instead(self, slot: str, recorded: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        if recorded.shape != arrived.shape:
            return arrived
        if not torch.equal(recorded, arrived):
            self.inner.add(slot)
        return recorded

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


def rebuild(call: RecordedCall, place: Place, *, grad: bool = False, given: Mapping[str, torch.Tensor] | None = None) -> Rebuilt:
    """Make a recorded forward call of level api, or any of aten, ready to be executed at a place (of a backward call of level
    api, its forward call); with ``grad`` gradients can be asked for. Tensors ``given`` by slot, results of calls executed before,
    stand for what was recorded. Raises NotReplayable with the reason, TrueupError where the file that holds its tensors is
    damaged."""
    function = _function(call)
    try:
        return _rebuild(call, place, function, grad, given)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError):  # no capture of ours
        return damaged()  # type: ignore[no-any-return]
    except RuntimeError as error:  # no memory, among others
        raise NotReplayable(f"its arguments cannot be made on {place.device}: {first_line(error)}") from None


def _rebuild(
    call: RecordedCall, place: Place, function: Callable[..., Any], grad: bool, given: Mapping[str, torch.Tensor] | None
) -> Rebuilt:
    builder = Builder(call, place, grad, given)
    invocation = call.invocation if call.invocation is not None else assumed(call)
    args, kwargs = builder.arguments(invocation)
    enabled = bool(invocation.get("grad", False)) or grad
    around = invocation.get("transforms") or []
    if not modes.is_known(around):
        damaged()
    if grad and around:
        raise NotReplayable("it is the backward of a call inside a torch.func transform; its aten calls are executed instead")
    autocast = {} if place.wide else {str(k): str(v) for k, v in dict(invocation.get("autocast") or {}).items()}
    return Rebuilt(
        call, place, function, args, kwargs, builder.tensors, builder.leaves, enabled, autocast,
        invocation.get("autocast_cache") is not False, call.random, builder.drawn, builder.unwritten, around, builder.samples,
    )  # fmt: skip


def _function(call: RecordedCall) -> Callable[..., Any]:
    op, level = call.key.op, call.key.level
    if level == "module":
        raise NotReplayable("a module is code, which no capture holds; its api and aten calls are executed instead")
    if call.key.phase == "collective":
        raise NotReplayable("a collective needs the other ranks")
    if level == "aten":
        overload = (call.invocation or {}).get("overload")
        found = allowed_operator(op, overload if isinstance(overload, str) else None)
    else:
        found = allowed_function(op)
    if found is not None and op in TANGENTS:
        raise NotReplayable("it is about tangents of forward-mode differentiation, which no capture holds")
    if found is None:
        raise NotReplayable(f"{op} is not among the functions that a capture may have executed")
    return found


TANGENTS = frozenset({"torch._make_dual", "torch._unpack_dual", "aten::_make_dual", "aten::_unpack_dual"})


def restore_random(random: Mapping[str, bytes], place: Place) -> None:
    """Set the generators to recorded states, those that take them: a GPU's cannot go on from a CPU's."""
    for kind, state in random.items():
        set_state(place.of(kind).type, torch.frombuffer(bytearray(state), dtype=torch.uint8))


ON_HOST: dict[str, tuple[str, ...]] = {op: tuple(slots) for op, slots in FACTS["on_host"].items()}


def with_host(place: Place, call: RecordedCall) -> Place:
    """Return the place for a call some of whose arguments stay on the CPU."""
    return replace(place, hosted=ON_HOST[call.key.op]) if call.key.op in ON_HOST else place
