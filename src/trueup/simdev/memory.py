"""Bytes of the simulated device: what its living tensors hold, exactly. What a kernel needs while it runs is not seen.

Memory is counted when its first tensor is made, and given back when PyTorch frees it. Nothing is kept in reserve, so bytes
reserved are bytes allocated.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

_held: dict[int, tuple[Any, int]] = {}
"""By address of the C++ storage: a weak reference, which PyTorch keeps as long as the memory lives, and its bytes."""
allocated = peak = made = freed = 0
"""Bytes now and at most since the last reset; all bytes ever made and freed."""


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
