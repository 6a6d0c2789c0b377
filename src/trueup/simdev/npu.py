"""The module that stands at ``torch.npu``: device queries, random state, memory numbers and precision switches.

There is one device; its memory is the process's memory and its generator is the CPU's default generator, so that a
seeded run draws the same numbers on both devices.
"""

# ruff: noqa: ARG001, ARG002 - the parameters are those of torch_npu

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class _Precision:
    allow_hf32: bool = False
    """Whether the device may round inputs to HF32 before it multiplies; the noise ``hf32-matmul`` sets it while on."""


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
    """Return 1."""
    return 1


def current_device() -> int:
    """Return 0."""
    return 0


def _index(device: Any) -> int:
    if device is None or isinstance(device, int):
        return device or 0
    return torch.device(device).index or 0


def set_device(device: Any) -> None:
    """Accept the only device, index 0; raises RuntimeError for another."""
    if _index(device) != 0:
        raise RuntimeError(f"invalid device ordinal {_index(device)}: torch.npu.device_count() is 1")


class device:
    """Context manager that selects a device; there is only one."""

    def __init__(self, index: Any) -> None:
        self.index = index

    def __enter__(self) -> None:
        set_device(self.index)

    def __exit__(self, *exc: object) -> None:
        return None


def get_device_name(device: Any = None) -> str:
    """Return the name of the device."""
    return "Trueup simulated NPU"


def synchronize(device: Any = None) -> None:
    """Return at once: kernels run synchronously."""


def manual_seed(seed: int) -> None:
    """Seed the device's generator, which is the CPU's default generator."""
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


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
    """Return the resident bytes of the process: the device's memory is the host's."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - a kernel file, read on every call
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return max_memory_allocated()


def max_memory_allocated(device: Any = None) -> int:
    """Return the peak resident bytes of the process."""
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * 1024


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated  # nothing is kept in reserve


def reset_peak_memory_stats(device: Any = None) -> None:
    """Do nothing: the peak of a process cannot be reset."""


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the memory figures under the names that PyTorch's allocators use."""
    figures = {"current": memory_allocated(), "peak": max_memory_allocated()}
    return {f"{kind}_bytes.all.{which}": value for kind in ("allocated", "reserved") for which, value in figures.items()}


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return the memory figures as a text."""
    return "\n".join(f"{name:28}{value:>16}" for name, value in memory_stats().items())


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes: the host's."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


@dataclass(frozen=True)
class _Properties:
    name: str
    total_memory: int


def get_device_properties(device: Any = None) -> _Properties:
    """Return the name and the memory; like torch_npu it has no ``major`` and ``minor``."""
    return _Properties(get_device_name(), mem_get_info()[1])


def get_device_capability(device: Any = None) -> None:
    """Return None, as torch_npu does: the number is NVIDIA's."""


class Stream:
    """A queue of work; there is one, and it is synchronous."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        set_device(device)
        self.priority, self.npu_stream = priority, 0

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return torch.device("npu", 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash("npu")

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: what was queued is done."""

    wait_event = wait_stream

    def query(self) -> bool:
        """Return True: nothing is under way."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one if none is given."""
        event = event or Event()
        event.record()
        return event


class Event:
    """A point in time of the stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed, self._seconds = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: it has happened."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until another event; raises RuntimeError without ``enable_timing``."""
        if not (self._timed and end._timed):
            raise RuntimeError("both events must be created with enable_timing=True")
        return (end._seconds - self._seconds) * 1000


_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    """Return the stream."""
    set_device(device)
    return _STREAM


default_stream = current_stream


def set_stream(stream: Any) -> None:
    """Accept a stream: all are the one."""


@contextmanager
def stream(stream: Any = None) -> Iterator[None]:
    """Enter a stream; there is one, and it is synchronous."""
    yield


StreamContext = stream


@contextmanager
def device_of(tensor: Any) -> Iterator[None]:
    """Select the device of a tensor; there is only one."""
    yield


def set_compile_mode(jit_compile: bool = False) -> None:
    """Accept a compile mode: nothing is compiled."""


def set_option(options: dict[str, Any]) -> None:
    """Accept options of the compiler: nothing is compiled."""


def _typed(dtype: torch.dtype) -> Any:
    def build(*given: Any) -> torch.Tensor:
        sizes = given and all(isinstance(one, int) for one in given)
        made = torch.empty(given, dtype=dtype) if sizes or not given else torch.tensor(given[0], dtype=dtype)
        return made.to("npu")

    return build


FloatTensor, HalfTensor, BFloat16Tensor = _typed(torch.float32), _typed(torch.float16), _typed(torch.bfloat16)
IntTensor, LongTensor, BoolTensor = _typed(torch.int32), _typed(torch.int64), _typed(torch.bool)


def _autocast(enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True) -> torch.amp.autocast:
    return torch.amp.autocast("npu", dtype, enabled, cache_enabled)


amp = SimpleNamespace(
    autocast=_autocast, GradScaler=partial(torch.amp.GradScaler, "npu"),
    custom_fwd=partial(torch.amp.custom_fwd, device_type="npu"), custom_bwd=partial(torch.amp.custom_bwd, device_type="npu"),
)  # fmt: skip
"""``torch.npu.amp``."""
