"""One pass over a tensor, on the device where it lives.

Each kernel returns the packed float64 vector of `kernels` and, where the bytes are at hand, their digest. A device with a
kernel of its own registers it here; any other gets `on_device`, whose result stays there until the next flush. Digests are of the
bytes (xxh3), which only host memory offers cheaply: on other devices they are taken for the details ``digest`` and ``tensor``,
which bring the bytes over anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trueup.recording.adapters.torch.device_statistics import Pending, begin, bring
from trueup.recording.adapters.torch.host import on_host
from trueup.recording.recorder import Statistics

Kernel = Callable[[torch.Tensor, str], Statistics]


def on_device(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure a tensor on its own device; nothing is waited for unless the bytes are asked for, or the device cannot add."""
    if detail == "stats":
        pending = begin(tensor)
        if pending is not None:
            return Statistics(values=pending)
    return on_host(tensor.detach().cpu(), detail)


KERNELS: dict[str, Kernel] = {"cpu": on_host}


def measure(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure a tensor with the kernel of its device."""
    return KERNELS.get(tensor.device.type, on_device)(tensor, detail)


def resolve(batch: list[Statistics]) -> None:
    """Bring what is still on a device to the host: one transfer per device. For the writer's thread, which alone waits for it."""
    waiting = list({id(stats): stats for stats in batch if isinstance(stats.values, Pending)}.values())
    for stats, values in zip(waiting, bring([stats.values for stats in waiting]), strict=True):
        stats.values = values
