"""The module that stands at ``torch.npu``: device queries, random state, memory numbers and precision switches.

There is one device; its memory is the process's memory and its generator is the CPU's default generator, so that a
seeded run draws the same numbers on both devices.
"""

# ruff: noqa: ARG001 - the parameters are those of torch_npu

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _Precision:
    allow_hf32: bool = False
    """Whether the device may round inputs to HF32 before it multiplies; the noise ``hf32-matmul`` sets it while on."""


matmul = _Precision()
conv = _Precision()


def is_available() -> bool:
    """Return True: the device is simulated, so it is always there."""
    return True


def is_initialized() -> bool:
    """Return True: there is nothing to initialise."""
    return True


def init() -> None:
    """Do nothing; scripts written for torch_npu call it."""


def _lazy_init() -> None:
    """Do nothing; PyTorch calls it before it reads device state."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Return 1."""
    return 1


def current_device() -> int:
    """Return 0."""
    return 0


def _index(device: Any) -> int:
    if device is None:
        return 0
    if isinstance(device, int):
        return device
    parsed = torch.device(device)
    return parsed.index or 0


def set_device(device: Any) -> None:
    """Accept the only device, index 0.

    Raises:
        RuntimeError: another index.
    """
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


def manual_seed_all(seed: int) -> None:
    """Seed every device."""
    manual_seed(seed)


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


def is_bf16_supported() -> bool:
    """Return True."""
    return True


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


def memory_reserved(device: Any = None) -> int:
    """Return the same as `memory_allocated`: nothing is kept in reserve."""
    return memory_allocated()


def max_memory_reserved(device: Any = None) -> int:
    """Return the same as `max_memory_allocated`."""
    return max_memory_allocated()


def reset_peak_memory_stats(device: Any = None) -> None:
    """Do nothing: the peak of a process cannot be reset."""


@contextmanager
def stream(stream: Any = None) -> Iterator[None]:
    """Enter a stream; there is one, and it is synchronous."""
    yield
