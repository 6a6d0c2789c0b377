"""The npu tensor: a wrapper subclass that owns a CPU tensor and runs every aten operator on it.

An `NPUTensor` has the device, sizes, strides, storage identity and version counter of a device tensor, and no memory
of its own; ``_raw`` is the CPU tensor that holds the numbers. Views of a wrapper wrap views of its raw tensor, so an
in-place write through any of them is seen by all, as on a device.

How an operator runs follows from its schema, worked out once (`Plan`). `torch.save` writes the file format of a real device: a
storage is saved as bytes with the location tag ``npu:0``, so a file can be loaded with ``map_location="cpu"`` where no
simulated device is installed, with ``weights_only=True``, and storages shared by views stay shared.

Bytes of the device are what its living tensors hold, exactly: memory is counted when its first tensor is made, and given back when
PyTorch frees it. What a kernel needs while it runs is not seen. Nothing is kept in reserve, so bytes reserved are bytes allocated.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_held: dict[int, tuple[Any, int]] = {}
"""By address of the C++ storage: a weak reference, which PyTorch keeps as long as the memory lives, and its bytes."""
allocated = peak = made = freed = 0
"""Bytes now and at most since the last reset; all bytes ever made and freed."""


NPU = torch.device("privateuseone", 0)  # named npu once the device is installed
CPU = torch.device("cpu")
DEVICE = torch.device  # the class itself, whatever stands in its place later
COUNT = "TRUEUP_SIMULATED_DEVICES"
"""Environment variable: how many devices there are; else as many as processes that a launcher started here, or one."""
count = 1
"""How many devices there are. To PyTorch's C++ all are index 0, for the engine of a Python backend has one queue (PyTorch 2.13); a
tensor keeps its own index, which Python sees, and operators check it."""
current = 0
"""Index of the device that ``npu`` without an index means."""
asked = False
"""Whether Python asks for memory now. C++ that asks (the buckets of DistributedDataParallel) means the device of what it will put
there, and can name index 0 alone: its tensors are `UNSETTLED`, and on the device of the first tensor that they meet."""
UNSETTLED = -1
home = CPU
"""Where the memory behind the device is: on the CPU, or nowhere (`trueup.simdev.shapes`)."""
runner: Callable[..., Any] | None = None
"""What runs operators in the place of their kernels."""
mixed = False
"""Whether the host's tensors are taken beside the device's, and numbers read without a copy: for a script that knows no device."""


def hold(raw: torch.Tensor) -> None:
    """Count the memory behind a tensor, once."""
    global allocated, peak, made
    storage = raw.untyped_storage()
    key = storage._cdata
    if key in _held:
        return
    size = storage.nbytes()

    def gone(_: Any) -> None:
        global allocated, freed
        allocated -= _held.pop(key)[1]
        freed += size

    _held[key] = weakref.ref(storage, gone), size
    allocated += size
    made += size
    peak = max(peak, allocated)


def reset_peak() -> None:
    """Count the most from now on."""
    global peak
    peak = allocated


def figures() -> dict[str, int]:
    """Return the figures under the names of PyTorch's allocators. Those of blocks, segments and pools are not there: there are
    none."""
    bytes_ = {"current": allocated, "peak": peak, "allocated": made, "freed": freed}
    kinds = ("allocated", "reserved", "active")
    return {f"{kind}_bytes.all.{which}": value for kind in kinds for which, value in bytes_.items()}


def host() -> tuple[int, int]:
    """Return the free and the total bytes of the machine, whose memory is the device's."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


class NPUStorage(torch.UntypedStorage):
    """Host memory that says it is on the device. PyTorch keeps one Python object per storage; it is re-labelled in place, because
    a second one cannot be made."""

    index = 0

    @property
    def device(self) -> torch.device:
        """Where the bytes are said to be."""
        return DEVICE("npu", self.index)

    def cpu(self) -> torch.UntypedStorage:
        """Return the bytes themselves: they are in host memory already."""
        return self


# ---------------------------------------------------------------- what a schema tells
# Operators that take CPU tensors beside device tensors on real devices too (indices, lengths, copies between devices).
_CROSS_DEVICE = frozenset((
    "copy_", "_copy_from", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put",
    "set_", "_pack_padded_sequence", "_pack_padded_sequence_backward", "tensor_split",
    "_ctc_loss", "_ctc_loss_backward",
    # The step counters of optimizers stay on the CPU beside device parameters; the foreach kernels take both.
    "_foreach_add_", "_foreach_add", "_foreach_mul_", "_foreach_div_", "_foreach_addcdiv_", "_foreach_addcmul_",
    "_foreach_pow", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_",
))  # fmt: skip

COMPOSITE_ELSEWHERE = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Elsewhere than on the CPU these are decomposed; a kernel on our key keeps them whole, as torch_npu does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the schema of an operator tells the dispatcher; worked out once per operator."""

    name: str  # ``aten::add.Tensor``, the spelling used by faults and by `Fired`
    view_of: int | None  # position of the argument whose storage the outputs share, or None
    written: tuple[int | str, ...]  # arguments written in place: positions, and names of keyword-only ones
    reshapes: bool  # the operator may change size, strides or storage of a written argument (``resize_``, ``t_``, ``out=``)
    cross_device: bool
    on_host: tuple[int, ...]  # outputs that stay on the CPU
    composite: bool  # it is made of other operators; it gets here only for tensors made under ``inference_mode``


def _is_composite(func: Any) -> bool:
    # Not func._can_decompose(): that also counts Python decompositions, present or not by what else was imported.
    return (
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        and func not in KERNELS
        and func._opname not in COMPOSITE_ELSEWHERE
    )


def _plan(func: Any) -> Plan:
    schema = func._schema
    written: list[int | str] = []
    view_of = None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        if argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
        elif view_of is None:
            view_of = position
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    return Plan(
        name=f"{schema.name}{overload}",
        view_of=view_of,
        written=tuple(written),
        reshapes=torch.Tag.inplace_view in func.tags or any(isinstance(place, str) for place in written),
        cross_device=schema.name.removeprefix("aten::") in _CROSS_DEVICE,
        on_host=(1,) if schema.name == "aten::_pack_padded_sequence" else (),  # the batch sizes steer the host's loop
        composite=_is_composite(func),
    )


plans: dict[Any, Plan] = {}


def plan_of(func: Any) -> Plan:
    """Return the dispatch plan of an ``OpOverload``."""
    if func not in plans:
        plans[func] = _plan(func)
    return plans[func]


KERNELS: dict[Any, Callable[..., Any]] = {}
"""Operators that the CPU has no kernel for, or draws other random numbers in; the rest run as they are."""


OWN = ("_raw", "_index", "_is_param")
"""Attributes of a tensor of the device that are no user's."""


# ---------------------------------------------------------------- tensors
Interceptor = Callable[[Plan, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
interceptors: dict[Any, Interceptor] = {}
"""Operators touched by the faults and noise that are on now. Empty on a healthy device: then nothing is paid."""


class NPUTensor(torch.Tensor):
    """A tensor on the simulated device; made by the device's kernels, never by hand."""

    _raw: torch.Tensor
    _index = 0

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int = 0) -> NPUTensor:
        """Wrap a dense CPU tensor as one of the device with an index."""
        if raw.layout is not torch.strided:
            raise NotImplementedError(f"The simulated npu has dense tensors only; an operator made a {raw.layout} one.")
        tensor: NPUTensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            storage_size=raw.untyped_storage().nbytes(), dtype=raw.dtype, device=NPU,
        )  # fmt: skip
        tensor._raw = raw
        if raw.is_conj():  # what reads the numbers then asks for them resolved, as on any device
            torch._C._set_conj(tensor, True)
        if raw.is_neg():
            torch._C._set_neg(tensor, True)
        if index:
            tensor._index = index
        hold(raw)
        return tensor

    # Subclass dispatch of the *function* level is off: the device is a device, not a tensor-like type.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on the raw tensors."""
        try:
            return dispatch(func, args, kwargs or {})
        except Exception:
            # PyTorch 2.13 aborts the process when an operator raises on a Python backend's backward thread (a noexcept
            # stream guard, torch::acc::PythonDeviceGuard::exchangeStream): say why before it does.
            if threading.current_thread() is not threading.main_thread() and torch._C._current_graph_task_id() != -1:
                traceback.print_exc()
            raise

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        with torch.no_grad():
            text = repr(self._raw.detach())
        parts = [text.removesuffix(")"), f"device='{self.device}'"]
        if self.grad_fn is not None:
            parts.append(f"grad_fn=<{self.grad_fn.name()}>")
        elif self.requires_grad:
            parts.append("requires_grad=True")
        text = ", ".join(parts) + ")"
        return "Parameter containing:\n" + text if getattr(self, "_is_param", False) else text

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory behind the device: its identity is shared by all views, its address is real."""
        storage = self._raw.untyped_storage()
        storage.__class__ = NPUStorage
        storage.index = self.get_device()
        return storage

    @property
    def device(self) -> torch.device:
        """Which device it is on."""
        return DEVICE("npu", self.get_device())

    def get_device(self) -> int:
        """Return the index of its device."""
        return current if self._index == UNSETTLED else self._index

    def npu_format_cast(self, acl_format: int) -> NPUTensor:  # noqa: ARG002 - torch_npu's
        """Return the tensor: numbers are the same in every format, and the simulated device has one (ND, 2)."""
        return self

    npu_format_cast_ = npu_format_cast

    def data_ptr(self) -> int:
        """Address of the first element in the memory behind the device."""
        return int(self._raw.data_ptr())

    def tolist(self) -> Any:
        """Return the numbers as nested lists; PyTorch's own refuses subclasses."""
        return self.detach().cpu().tolist() if self._raw.is_meta else self._raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse as every device does, unless ``force``."""
        if force or mixed:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
            )
        with torch.no_grad():
            copied: Any = NPUTensor(self._raw.clone(), self._index)
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce(self)

    # ``x.data = y`` swaps the C++ side only; the raw tensor has to follow.
    def _get_data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    def _set_data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self._raw = raw(value)

    data = property(_get_data, _set_data)

    # With these two, nn.Module.to() swaps parameters in place instead of replacing them, so tied weights stay tied
    # and an optimizer made before .to("npu") keeps its parameters (torch/nn/modules/module.py, _apply).
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> NPUTensor:
        return NPUTensor(inner["_raw"])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor behind an npu tensor, sharing its memory; one of another device is returned as it is."""
    return tensor._raw if isinstance(tensor, NPUTensor) else tensor


def _unwrap(value: Any, owners: dict[int, torch.Tensor], foreign: list[torch.Tensor]) -> Any:
    kind = value.__class__
    if kind is NPUTensor:
        inner = value._raw
        owners[id(inner)] = value
        return inner
    if kind is tuple or kind is list:
        return kind([_unwrap(item, owners, foreign) for item in value])
    if kind is DEVICE:
        return home if value.type == "npu" else value
    if isinstance(value, torch.Tensor):
        owners[id(value)] = value
        if value.dim():  # device kernels take CPU scalars
            foreign.append(value)
    return value


def _wrap(value: Any, owners: dict[int, torch.Tensor], source: torch.Tensor | None, index: int) -> Any:
    if isinstance(value, torch.Tensor):
        owner = owners.get(id(value))
        if owner is not None:
            return owner
        if value.device != home:
            return value
        wrapped = NPUTensor(value, index)
        if source is not None:
            torch._functionalize_unsafe_set(wrapped, source)
        return wrapped
    if isinstance(value, (tuple, list)):
        return value.__class__([_wrap(item, owners, source, index) for item in value])
    return value


def _device_tensor(value: Any) -> torch.Tensor | None:
    return value if isinstance(value, NPUTensor) else None


def _sync(wrapper: torch.Tensor, source: torch.Tensor | None) -> None:
    """Give a wrapper the sizes, strides and storage that its raw tensor got from ``resize_``, ``set_`` or ``out=``. ``source`` is
    the tensor that owns the storage from now on (``x.set_(source)``), else None."""
    inner = raw(wrapper)
    if inner is wrapper:
        return
    shown, held = (
        (one.shape, one.stride(), one.storage_offset(), torch.Tensor.untyped_storage(one).nbytes()) for one in (wrapper, inner)
    )
    if source is None and shown == held:
        return
    fresh = NPUTensor(inner)
    if source is not None:
        torch._functionalize_unsafe_set(fresh, source)
    elif shown[3] == held[3]:
        torch._functionalize_unsafe_set(fresh, wrapper)  # the same memory seen with other strides (t_, squeeze_ ...)
    # The meta kernel of set_ changes the C++ side alone; as torch.utils._python_dispatch does for the same purpose.
    before = torch._C._meta_in_tls_dispatch_include()
    with torch.utils._mode_utils.no_dispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            torch.ops.aten.set_.source_Tensor(wrapper, fresh)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten operator on the raw tensors of its arguments and wrap what it returns."""
    plan = plans.get(func) or plan_of(func)
    if plan.composite:
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    owners: dict[int, torch.Tensor] = {}
    foreign: list[torch.Tensor] = []
    raw_args = tuple([_unwrap(value, owners, foreign) for value in args])
    raw_kwargs = kwargs
    to_host = False
    if kwargs:
        raw_kwargs = {name: _unwrap(value, owners, foreign) for name, value in kwargs.items()}
        device = kwargs.get("device")
        to_host = device is not None and DEVICE(device).type == "cpu"
        if raw_kwargs.get("pin_memory"):
            raw_kwargs["pin_memory"] = False
    if foreign and not plan.cross_device and not mixed and len(foreign) < len(owners):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"npu:{current} and {foreign[0].device}! (when running {plan.name}). Compare on the CPU: x.cpu(); compute here: x.npu()"
        )
    index = _index(plan, owners, kwargs.get("device")) if count > 1 or "device" in kwargs else 0
    result = _execute(func, plan, raw_args, raw_kwargs)
    if plan.reshapes:
        for place in plan.written:
            target = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            if isinstance(target, torch.Tensor):
                _sync(target, _device_tensor(args[1]) if plan.name == "aten::set_.source_Tensor" else None)
    if to_host:
        return result
    for place in plan.on_host:
        owners[id(result[place])] = result[place]
    source = None if plan.view_of is None else _device_tensor(args[plan.view_of])
    return _wrap(result, owners, source, index)


def index_of(device: Any) -> int:
    """Return the index of a device; of none, or one without an index, that of the current one; RuntimeError for one that is not."""
    given = None if device is None or isinstance(device, int) else DEVICE(device)
    index = device if given is None else given.index if given.type == "npu" else None
    if index is not None and index >= count:
        said = f"torch.npu.device_count() is {count} ({COUNT} sets it on the simulated device)"
        raise RuntimeError(f"invalid device ordinal {index}: {said}")
    return current if index is None else int(index)


def placed(device: Any) -> int:
    """Return the index for a kernel that is given a device: PyTorch's C++ writes 0 for the current one."""
    return index_of(device) or (current if asked or count == 1 else UNSETTLED)


def _index(plan: Plan, owners: dict[int, torch.Tensor], device: Any) -> int:
    """Return the index of the device that an operator runs on; raises RuntimeError where its tensors are on several."""
    if device is not None:
        return index_of(device) or current
    every = [one for one in owners.values() if isinstance(one, NPUTensor)]
    found = [one for one in every if one._index != UNSETTLED]
    if not found:
        return UNSETTLED if every else current
    indices = sorted({one._index for one in found if one.dim()}) or [found[0]._index]
    for one in every:
        if one._index == UNSETTLED:
            one._index = indices[0]
    if len(indices) > 1 and not plan.cross_device:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"npu:{indices[0]} and npu:{indices[1]}! (when running {plan.name})"
        )
    return found[0]._index if plan.cross_device else indices[0]


def run(func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the kernel of an operator, with the faults and noise that are on."""
    kernel, interceptor = KERNELS.get(func, func), interceptors.get(func)
    return interceptor(plan, kernel, args, kwargs) if interceptor else kernel(*args, **kwargs)


def _execute(func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if runner is not None:
        with torch._C.DisableTorchFunction():
            return runner(func, plan, args, kwargs)
    if torch._C._len_torch_function_stack():
        # A TorchFunctionMode of the user's must see his calls, not those that the device makes to do its work.
        with torch._C.DisableTorchFunction():
            return run(func, plan, args, kwargs)
    return run(func, plan, args, kwargs)


# ---------------------------------------------------------------- files
def reduce(tensor: NPUTensor) -> Any:
    """Return what `pickle` needs to rebuild an npu tensor: the tuple of ``torch._utils._rebuild_tensor_v2``."""
    inner = tensor._raw
    hooks: OrderedDict[Any, Any] = OrderedDict()
    if getattr(tensor, "_is_param", False):
        return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, hooks)
    storage = tensor.untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=inner.dtype, _internal=True)
    place = (inner.storage_offset(), tuple(inner.size()), inner.stride())
    return torch._utils._rebuild_tensor_v2, (typed, *place, tensor.requires_grad, hooks)


def _tag(storage: Any) -> str | None:
    inner = getattr(storage, "_untyped_storage", storage)
    return f"npu:{inner.index}" if isinstance(inner, NPUStorage) else None


def _restore(storage: Any, location: str) -> Any:
    if location.split(":")[0] != "npu":
        return None
    index = DEVICE(location).index
    if (index or 0) >= count:
        raise RuntimeError(
            f"Attempting to deserialize object on {location} but torch.npu.device_count() is {count}. "
            "Use torch.load with map_location to map your storages to an existing device."
        )
    storage.__class__ = NPUStorage
    storage.index = current if index is None else index
    return storage


def register() -> None:
    """Teach `torch.load` the location ``npu``; asked before the built-in packages, whose devices need an allocator."""
    torch.serialization.register_package(5, _tag, _restore)
