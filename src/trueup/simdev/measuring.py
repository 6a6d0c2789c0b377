"""The simulated device's own statistics kernel, as a vendor would register one with the PyTorch adapter."""

from __future__ import annotations

import torch

from trueup.recording.adapters.torch.host import on_host
from trueup.recording.adapters.torch.statistics import KERNELS
from trueup.recording.recorder import Statistics
from trueup.simdev.tensor import raw


def register() -> None:
    """Measure npu tensors in one pass over the memory behind them, past every fault and noise."""
    KERNELS["npu"] = _measure


def _measure(tensor: torch.Tensor, detail: str) -> Statistics:
    return on_host(raw(tensor), detail)
