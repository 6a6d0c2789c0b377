"""``torch_npu.profiler``: PyTorch's profiler; what chooses counters of the hardware is accepted and not used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerAction, schedule, tensorboard_trace_handler

__all__ = ["AiCMetrics", "ProfilerAction", "ProfilerActivity", "ProfilerLevel", "profile", "schedule", "tensorboard_trace_handler"]


class ProfilerActivity:
    """What is profiled: on the simulated device both are the host's time."""

    CPU = NPU = torch.profiler.ProfilerActivity.CPU


class _Switches:
    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


ProfilerLevel = AiCMetrics = ExportType = _Switches()


def _ExperimentalConfig(**_: Any) -> None:
    return None


class profile(torch.profiler.profile):
    """``torch_npu.profiler.profile``."""

    def __init__(self, *, activities: Iterable[Any] | None = None, experimental_config: Any = None, **options: Any) -> None:  # noqa: ARG002
        super().__init__(activities=None if activities is None else list(dict.fromkeys(activities)), **options)
