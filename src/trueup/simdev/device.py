"""Makes PrivateUse1 the device ``npu``: its name, module, factories, autocast rules, file locations and statistics kernel.

``torch.autocast("npu")`` runs some functions in the low dtype, some in float32, some in the widest dtype of their inputs. The
lists are in `tables.toml`. Unlike CUDA's, casts of weights are not cached between calls: gradients of a weight used twice are
summed in float32.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch import buffers
from trueup.recording.adapters.torch.buffers import on_host
from trueup.recording.recorder import Statistics
from trueup.simdev import injection, kernels, npu, standins, tensor, tools
from trueup.simdev.tables import AUTOCAST
from trueup.simdev.tensor import COMPOSITE_ELSEWHERE, NPUTensor, dispatch, raw

FAULT_VARIABLE = "TRUEUP_SIMDEV_FAULT"
NOISE_VARIABLE = "TRUEUP_SIMDEV_NOISE"

_libraries: list[Any] = []
"""Held for the life of the process: a `torch.library.Library` takes its kernels back when it is collected."""


def install() -> None:
    """Make the device type ``npu`` known to PyTorch; see `trueup.simdev.install`."""
    if _libraries:
        return
    _claim()
    aten_library, any_library = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend([aten_library, any_library])
    _factories(aten_library, any_library)
    _autocast(aten_library, any_library)
    kernels.register(aten_library)
    tensor.register()
    buffers.KERNELS["npu"] = _measure
    _from_environment()


def _unpinned(tensor: Any, device: Any = None) -> Any:  # noqa: ARG001 - the signature of Tensor.pin_memory
    return tensor


ACCELERATOR: dict[str, Any] = {
    "synchronize": npu.synchronize, "empty_cache": npu.empty_cache, "empty_host_cache": npu.empty_cache,
    "memory_allocated": npu.memory_allocated, "max_memory_allocated": npu.max_memory_allocated,
    "memory_reserved": npu.memory_reserved, "max_memory_reserved": npu.max_memory_reserved, "memory_stats": npu.memory_stats,
    "reset_peak_memory_stats": npu.reset_peak_memory_stats, "get_memory_info": npu.mem_get_info,
    "reset_accumulated_memory_stats": npu.reset_accumulated_memory_stats,
    "current_stream": npu.current_stream, "set_stream": npu.set_stream, "Graph": npu.NPUGraph,
    "set_device_index": npu.set_device, "set_device_idx": npu.set_device, "current_device_index": npu.current_device,
    "current_device_idx": npu.current_device, "device_count": npu.device_count, "device_index": npu.device,
}  # fmt: skip
"""What a Python backend cannot answer: these functions of ``torch.accelerator`` ask for an allocator and streams in C++."""


def _refused(*_: Any, **__: Any) -> None:
    raise RuntimeError("torch.nn.DataParallel does not run on an NPU. Use torch.nn.parallel.DistributedDataParallel.")


def stand_in() -> None:
    """Let any script find the device: ``import torch_npu`` and ``import apex`` lead to it, where the vendor's packages are not
    installed; compiled and scripted code runs as the Python code that it was made of; DataParallel, which no NPU has, says so."""
    standins.install()
    torch.compile = functools.partial(torch.compile, disable=True)
    torch.jit._state.disable()
    torch.nn.DataParallel.__init__ = torch.nn.parallel.DataParallel.__init__ = _refused
    _spreading()
    if not hasattr(torch.utils, "dumper"):
        torch.utils.dumper = _dumper
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")


def _dumper(*arguments: Any, **named: Any) -> Any:
    """Stand for ``torch.utils.dumper`` of Ascend's PyTorch 1.5 and 1.8, which the distribution trueup-compat answers."""
    return importlib.import_module("trueup_compat.dumper").dumper(*arguments, **named)


def _spreading() -> None:
    """Let DistributedDataParallel find unused weights: its C++ sends the map of used ones through pinned memory of the host, which
    no Python backend can give (PyTorch 2.13). Plain memory stands in, from the first such module on: the kernels that make memory
    and are asked about it are Python's from then on."""
    spread = torch.nn.parallel.DistributedDataParallel
    real = spread.__init__
    library = torch.library.Library("aten", "IMPL")
    kept: list[Any] = []

    def empty_strided(keys: Any, size: Any, stride: Any, *, pin_memory: Any = None, **options: Any) -> torch.Tensor:
        made: torch.Tensor = kept[0].call_boxed(keys, size, stride, **options)
        made._pinned = bool(pin_memory)
        return made

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:  # noqa: ARG001 - the operator's own parameters
        return getattr(tensor, "_pinned", False)

    @functools.wraps(real)
    def init(self: Any, module: Any, *args: Any, **options: Any) -> None:
        given = inspect.signature(real).bind(self, module, *args, **options).arguments
        asked = given.get("find_unused_parameters") or given.get("static_graph")
        if asked and not kept and any(isinstance(one, NPUTensor) for one in module.parameters()):
            kept.append(torch.library.get_kernel("aten::empty_strided", "CPU"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch says of each kernel that it takes the place of another
                library.impl("empty_strided", empty_strided, "CPU", with_keyset=True)
                library.impl("is_pinned", is_pinned, "CPU")
        real(self, module, *args, **options)

    spread.__init__ = init
    _libraries.append(library)


def _collectives() -> None:
    """Let process groups of the device be named ``hccl``: gloo does the work."""
    distributed = torch.distributed
    if distributed.is_available() and "hccl" not in distributed.Backend.backend_list:

        def group(store: Any, rank: int, size: int, timeout: Any) -> Any:
            return distributed.ProcessGroupGloo(store, rank, size, timeout)

        distributed.Backend.register_backend("hccl", group, devices=["npu", "cpu"])


def _claim() -> None:
    from torch.utils import backend_registration

    taken = torch._C._get_privateuse1_backend_name()
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if taken != "privateuseone":
        raise TrueupError(
            f"The simulated device cannot be installed: PyTorch's private device type is {taken!r} already. "
            "Run the simulation in a process that does not import that backend."
        )
    if setup is None:
        raise TrueupError(
            f"The simulated device needs a PyTorch with Python backends; this is {torch.__version__}. Install torch 2.13 or newer."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the API is experimental; the tests watch it for us
        setup("npu", backend_module=npu)
    _collectives()
    for name, function in ACCELERATOR.items():
        for module in (torch.accelerator, torch.accelerator.memory):
            if module is torch.accelerator or hasattr(module, name):
                setattr(module, name, function)
    for name in npu.SUBMODULES:
        sys.modules[f"torch.npu.{name}"] = sys.modules[f"torch_npu.npu.{name}"] = getattr(npu, name)
    torch.Event, torch.Stream, torch.Generator = npu.Event, npu.Stream, npu.Generator
    torch.Tensor.type, torch.set_default_tensor_type = npu.tensor_type, npu.set_default_tensor_type
    tools.install()
    _several()
    # Pinning asks a C++ hook that a Python backend cannot give; DataLoader(pin_memory=True) calls it for every batch.
    torch.Tensor.pin_memory = _unpinned
    torch.nn.Module._apply = _moving(torch.nn.Module._apply)
    torch.utils.swap_tensors = _swapping(torch.utils.swap_tensors)


def _moving(real: Callable[..., Any]) -> Callable[..., Any]:
    """Move a module as a device with memory of its own does, where PyTorch 2.13 swaps its tensors for others: attributes that a
    user gave them stay (``p.no_decay = True``), and one with a history (``weight_norm`` computes its weight again in each forward)
    lets go of what it was computed from, for no tensor is swapped that is held."""

    @functools.wraps(real)
    def apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name in [name for name, value in vars(self).items() if isinstance(value, torch.Tensor) and value.grad_fn is not None]:
            self.__dict__[name] = self.__dict__[name].detach()
        named = {name: vars(one) for name, one in (self._parameters | self._buffers).items() if one is not None}
        given = {name: {key: value for key, value in its.items() if key not in tensor.OWN} for name, its in named.items()}
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if any(isinstance(one, NPUTensor) for one in self._parameters.values()):  # to the CPU PyTorch would make new weights
            torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            made = real(self, *args, **kwargs)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
            _replace(self, args[0])
            made = self
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        for name, attributes in given.items():
            vars((self._parameters | self._buffers)[name]).update(attributes)
        return made

    return apply


def _swapping(real: Callable[..., None]) -> Callable[..., None]:
    """Let a swap that fails change nothing: PyTorch 2.13 has exchanged classes and attributes by then."""

    @functools.wraps(real)
    def swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
        before = [(one, one.__class__, dict(vars(one))) for one in (t1, t2)]
        try:
            real(t1, t2)
        except RuntimeError:
            for one, kind, attributes in before:
                one.__class__ = kind
                one.__dict__ = attributes
            raise

    return swap


def _replace(module: torch.nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Move a module's own tensors where PyTorch cannot swap them (a profiler that records shapes refers to each tensor it saw): new
    weights take the old ones' place in every module, optimizer and list that holds them."""
    for weight in [one for one in module._parameters.values() if one is not None]:
        with torch.no_grad():
            moved = torch.nn.Parameter(move(weight), weight.requires_grad)
            moved.grad = None if weight.grad is None else move(weight.grad)
        for holder in gc.get_referrers(weight):
            if isinstance(holder, list):
                holder[:] = [moved if one is weight else one for one in holder]
            elif isinstance(holder, dict):
                for key in [key for key, value in holder.items() if value is weight]:
                    holder[key] = moved
                if weight in holder:  # the state of an optimizer
                    holder[moved] = holder.pop(weight)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else move(buffer)


FACTORIES = (
    "tensor as_tensor empty empty_like empty_strided zeros zeros_like ones ones_like full full_like rand rand_like randn "
    "randn_like randint randperm arange linspace logspace eye"
)
"""Functions of PyTorch that make a tensor on a device that they are given."""


def _several() -> None:
    """Count the devices. PyTorch's C++ writes index 0 for the current one, so with several, functions that are given a device
    make it the current one while they run."""
    asked = os.environ.get(tensor.COUNT) or os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not asked.isdecimal() or int(asked) < 1:
        raise TrueupError(
            f"The number of simulated devices is none.\n  where:    {tensor.COUNT}\n  expected: 1 or more\n  got:      {asked}\n"
            "  next:     leave it out for one"
        )
    tensor.count = int(asked)
    if tensor.count == 1:
        return

    def named(values: Iterable[Any]) -> int | None:
        for value in values:
            if isinstance(value, tensor.DEVICE) or (isinstance(value, str) and value.startswith("npu:")):
                one = tensor.DEVICE(value)
                return one.index if one.type == "npu" else None
        return None

    def placing(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            index, before = named((*args, *kwargs.values())), (tensor.current, tensor.asked)
            tensor.current, tensor.asked = before[0] if index is None else index, True
            try:
                return real(*args, **kwargs)
            finally:
                tensor.current, tensor.asked = before

        return call

    from torch.utils._device import _device_constructors

    _device_constructors()  # a default device goes by the functions themselves, and keeps them from the first call on
    torch.Tensor.to = placing(torch.Tensor.to)
    for name in FACTORIES.split():
        setattr(torch, name, placing(getattr(torch, name)))


def _factories(aten_library: Any, any_library: Any) -> None:
    def empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> NPUTensor:
        layout = memory_format or torch.contiguous_format
        return NPUTensor(torch.empty(size, dtype=dtype, memory_format=layout, device=tensor.home), tensor.placed(device))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> NPUTensor:
        return NPUTensor(torch.empty_strided(size, stride, dtype=dtype, device=tensor.home), tensor.placed(device))

    def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatch(operator, args, kwargs)

    # torch.tensor(..., device="npu") converts with the Python key switched off, and a boxed Python fallback fails there
    # (func != nullptr, PyTorch 2.13); a kernel of its own does not.
    aten_library.impl("_to_copy", partial(run, torch.ops.aten._to_copy.default), "PrivateUse1")
    for name in COMPOSITE_ELSEWHERE:
        aten_library.impl(name, partial(run, getattr(torch.ops.aten, name).default), "PrivateUse1")
    aten_library.impl("empty.memory_format", empty, "PrivateUse1")
    aten_library.impl("empty_strided", empty_strided, "PrivateUse1")
    any_library.fallback(run, "PrivateUse1")  # factories with a kernel per backend (tril_indices ...), given no npu tensor


def _from_environment() -> None:
    for variable, switch_on in ((FAULT_VARIABLE, injection.inject), (NOISE_VARIABLE, injection.noise)):
        for name in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
            switch_on(name)


# ---------------------------------------------------------------- autocast
def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _floating(value):
        return value if value.dtype is dtype or value.device.type != "npu" else value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, dtype) for item in value])
    return value


def _widest(values: Any) -> torch.dtype:
    dtype = torch.get_autocast_dtype("npu")
    for value in values:
        if isinstance(value, (list, tuple)):
            dtype = torch.promote_types(dtype, _widest(value))
        elif _floating(value):
            dtype = torch.promote_types(dtype, value.dtype)
    return dtype


def _rule(operator: Any, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast_and_call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys), torch._C.DisableTorchFunction():
            dtype = choose(args)
            cast = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return operator(*[_cast(value, dtype) for value in args], **cast)

    return cast_and_call


def _autocast(aten_library: Any, any_library: Any) -> None:
    """Register the lists on the ``AutocastPrivateUse1`` key; every other operator falls through."""
    any_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    choices: dict[str, Callable[[Any], torch.dtype]] = {
        "lower": lambda _: torch.get_autocast_dtype("npu"), "float32": lambda _: torch.float32, "promote": _widest,
    }  # fmt: skip
    for dtype, choose in choices.items():
        for name in AUTOCAST[dtype]:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if operator is not None:  # an older PyTorch may lack it
                aten_library.impl(name, _rule(operator, choose), "AutocastPrivateUse1")


def _measure(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure in one pass over the memory behind a tensor, past every fault and noise, as a vendor's own kernel would."""
    return on_host(raw(tensor), detail)
