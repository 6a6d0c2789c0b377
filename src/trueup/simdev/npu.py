"""The module that stands at ``torch.npu``: device queries, random state, memory figures, mixed precision and switches.

There are as many devices as `tensor.COUNT` says, or one. Memory is the host's, its figures are of the device's tensors (`tensor`).
The generator is the CPU's default generator, so that a seeded run draws the same numbers on both devices.
"""

# ruff: noqa: ARG001 - the parameters are those of torch_npu

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from trueup.simdev import tensor
from trueup.simdev.tools import (
    Event,
    NPUGraph,
    Stream,
    current_stream,
    default_stream,
    finalize_dump,
    graph,
    init_dump,
    is_current_stream_capturing,
    iteration_end,
    iteration_start,
    prof_finalize,
    prof_init,
    prof_start,
    prof_stop,
    profileConfig,
    set_aoe,
    set_compile_mode,
    set_dump,
    set_option,
    set_stream,
    stream,
)  # fmt: skip  # fmt: skip
from trueup.simdev.tools import (
    npu_profile as profile,
)

__all__ = [
    "Event", "NPUGraph", "Stream", "current_stream", "default_stream", "finalize_dump", "graph", "init_dump",
    "is_current_stream_capturing", "iteration_end", "iteration_start", "prof_finalize", "prof_init", "prof_start", "prof_stop",
    "profile", "profileConfig", "set_aoe", "set_compile_mode", "set_dump", "set_option", "set_stream", "stream",
]  # fmt: skip

@dataclass
class _Precision:
    allow_hf32: bool = False
    """Whether the device may round inputs to HF32 before it multiplies; the noise ``hf32-matmul`` sets it while on."""


@dataclass
class _Config:
    allow_internal_format: bool = False
    """Whether tensors may have a format of the device's own; the numbers of the simulated one are the same in every format."""


config = _Config()
matmul = _Precision()
conv = _Precision()


synchronous = True
"""A kernel has ended when its call returns: streams and events are there for scripts, and order nothing."""


def is_available() -> bool:
    """Return True: the device is simulated, so it is always there."""
    return True


is_initialized = is_bf16_supported = is_available


def init() -> None:
    """Do nothing; scripts written for torch_npu call it, and PyTorch `_lazy_init` before it reads device state."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Return how many devices there are."""
    return tensor.count


def current_device() -> int:
    """Return the index of the current device."""
    return tensor.current


def set_device(device: Any) -> None:
    """Make a device the current one; raises RuntimeError where there is none of that index."""
    index = tensor.index_of(device)
    if index < 0:
        raise RuntimeError(f"invalid device ordinal {index}")
    tensor.current = index


class device:
    """Context manager that selects a device; None or a negative index: none."""

    def __init__(self, device: Any) -> None:
        self.idx = tensor.index_of(device)
        self._before = tensor.current

    def __enter__(self) -> None:
        self._before = tensor.current
        if self.idx >= 0:
            set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        tensor.current = self._before


def get_device_name(device: Any = None) -> str:
    """Return the name of the device."""
    return "Trueup simulated NPU"


def synchronize(device: Any = None) -> None:
    """Return at once: kernels run synchronously."""


def enable_graph_mode() -> None:
    """Run each operator as before: CANN 5 gathered them until `launch_graph`, which changes no number."""


launch_graph = disable_graph_mode = enable_graph_mode


def manual_seed(seed: int) -> None:
    """Seed the device's generator, which is the CPU's default generator."""
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> int:
    """Seed the generator with a number that the system draws, and return it."""
    return int(torch.default_generator.seed())


seed_all = seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the generator as a ByteTensor on the CPU."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set the state of the generator."""
    torch.default_generator.set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices."""
    return [get_rng_state()]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    """Set the states of all devices."""
    set_rng_state(states[0])


def initial_seed() -> int:
    """Return the seed that the generator was given last."""
    return int(torch.default_generator.initial_seed())


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that ``torch.autocast("npu")`` accepts."""
    return [torch.float16, torch.bfloat16]


def empty_cache() -> None:
    """Do nothing: memory goes back to the allocator of the CPU when a tensor dies."""


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of the tensors that live on the device."""
    return tensor.allocated


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that lived at once."""
    return tensor.peak


memory_reserved = memory_cached = memory_allocated  # nothing is kept in reserve
max_memory_reserved = max_memory_cached = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count the most from now on."""
    tensor.reset_peak()


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Count made and freed bytes from now on."""
    tensor.made = tensor.freed = 0


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the memory figures under the names that PyTorch's allocators use."""
    return tensor.figures()


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return the memory figures as a text."""
    return "\n".join(f"{name:28}{value:>16}" for name, value in tensor.figures().items())


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes: the host's."""
    return tensor.host()


def _unknown(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"torch.npu.{name}: the simulated device has no such figure")

    return refuse


memory_snapshot, utilization, temperature, power_draw, clock_rate = map(
    _unknown, ("memory_snapshot", "utilization", "temperature", "power_draw", "clock_rate")
)


@dataclass(frozen=True)
class _Properties:
    name: str
    total_memory: int


def get_device_properties(device: Any = None) -> _Properties:
    """Return the name and the memory; like torch_npu it has no ``major`` and ``minor``."""
    return _Properties(get_device_name(), mem_get_info()[1])


def get_device_capability(device: Any = None) -> None:
    """Return None, as torch_npu does: the number is NVIDIA's."""


@contextmanager
def device_of(tensor: Any) -> Iterator[None]:
    """Select the device of a tensor."""
    with device(tensor.device if tensor.is_npu else None):
        yield


StreamContext = stream


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Accept a limit and keep none: memory is the host's."""


def ipc_collect() -> None:
    """Do nothing: no memory is shared between processes."""


def can_device_access_peer(device: Any, peer: Any) -> bool:
    """Return True: all devices share the host's memory."""
    return True


class _Generators(type(torch.Generator)):  # type: ignore[misc]  # torch 2.13 gives it one of its own
    """As ``torch.Generator``, a class of all generators: one of the CPU is of none that we can derive."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GENERATOR)


class Generator(torch.Generator, metaclass=_Generators):
    """A generator of the device, whose numbers the CPU draws."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        """Make one of the device, or of the CPU."""
        npu = torch.device(device).type == "npu"
        made: torch.Generator = _GENERATOR.__new__(Generator if npu else _GENERATOR)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()
        self._device = torch.device("npu", tensor.index_of(device))

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return self._device


_GENERATOR = torch.Generator


class _Typed(type):
    """``torch.npu.FloatTensor``: makes tensors, and is the class of those with its dtype."""

    dtype: torch.dtype

    def __call__(cls, *given: Any) -> torch.Tensor:
        if len(given) == 1 and not isinstance(given[0], int):
            return torch.tensor(given[0], dtype=cls.dtype).to("npu")
        return torch.empty(given, dtype=cls.dtype).to("npu")

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_npu and instance.dtype is cls.dtype


for _name, _dtype in {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Byte": torch.uint8,
    "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64, "Bool": torch.bool,
}.items():  # fmt: skip
    globals()[f"{_name}Tensor"] = _Typed(f"{_name}Tensor", (), {"dtype": _dtype, "__module__": "torch.npu"})


def typed(kind: Any) -> torch.dtype | None:
    """Return the dtype of ``torch.npu.FloatTensor`` and the like, or of its name as a text; None for anything else."""
    if isinstance(kind, str) and kind.startswith("torch.npu."):
        kind = globals().get(kind.removeprefix("torch.npu."))
    return kind.dtype if isinstance(kind, _Typed) else None


def tensor_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **options: Any) -> Any:
    """``Tensor.type``, which takes the classes of this device, too."""
    found = typed(dtype)
    if found is None:
        return _TYPE(self, dtype, non_blocking, **options) if dtype is not None else _TYPE(self)
    return self.to("npu", found, non_blocking)


def set_default_tensor_type(kind: Any) -> None:
    """``torch.set_default_tensor_type``, which takes the classes of this device, too: what has no device is made there."""
    found = typed(kind)
    if found is None:
        _DEFAULT(kind)
    else:
        torch.set_default_dtype(found)
        torch.set_default_device("npu")


_TYPE, _DEFAULT = torch.Tensor.type, torch.set_default_tensor_type


class autocast(torch.amp.autocast):
    """``torch.npu.amp.autocast``."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True) -> None:
        super().__init__("npu", dtype, enabled, cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.npu.amp.GradScaler``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("dynamic", None)  # torch_npu's own argument
        super().__init__("npu", *args, **kwargs)


amp = ModuleType("torch.npu.amp", "Mixed precision of the device.")
amp.autocast, amp.GradScaler = autocast, GradScaler  # type: ignore[attr-defined]
amp.custom_fwd = partial(torch.amp.custom_fwd, device_type="npu")  # type: ignore[attr-defined]
amp.custom_bwd = partial(torch.amp.custom_bwd, device_type="npu")  # type: ignore[attr-defined]
utils = ModuleType("torch.npu.utils", "Queries of the device that scripts for overflow make.")
utils.is_support_inf_nan = is_available  # type: ignore[attr-defined]


def is_support_inf_nan() -> bool:
    """Return True: an overflow gives Inf, as in the default mode of newer products."""
    return True


SUBMODULES = ("amp", "utils")
"""What ``import torch.npu.amp`` and ``import torch_npu.npu.amp`` find."""
