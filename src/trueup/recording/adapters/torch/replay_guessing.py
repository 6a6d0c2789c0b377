"""How a call was made, as far as a capture of less detail than ``tensor`` tells: what PyTorch's names mean there."""

from __future__ import annotations

from typing import Any

import torch

from trueup.recording.execution import guessing
from trueup.recording.execution.recorded import RecordedCall


def assumed(call: RecordedCall) -> dict[str, Any]:
    """Return how a call was made as far as its slots and values tell; see `trueup.recording.execution.guessing.assumed`."""
    return guessing.assumed(call, _named)


def _named(text: str) -> dict[str, str] | None:
    name = text.removeprefix("torch.")
    if name == text:
        return None
    kinds = ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format"))
    return next(({key: name} for kind, key in kinds if isinstance(getattr(torch, name, None), kind)), None)
