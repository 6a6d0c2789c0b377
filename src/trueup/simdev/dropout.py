"""Dropout that draws the mask of the CPU path, though PyTorch sends it to another operator.

On the CPU, ``F.dropout`` is ``bernoulli_`` on a floating tensor, ``div_`` and ``mul``; on an accelerator it is the
single operator ``native_dropout``, whose CPU kernel draws into a boolean tensor. The mask has to come from the same
draw.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.simdev.plan import KERNELS


def native_dropout(input: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    """Return ``input * mask / (1 - p)`` and the boolean mask."""
    if train is False or input.numel() == 0 or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    noise = torch.empty_like(input).bernoulli_(1 - p)
    mask = noise.to(torch.bool)
    return input * noise.div_(1 - p), mask


def register() -> None:
    """Enter the kernel into the device's table."""
    aten: Any = torch.ops.aten
    KERNELS[aten.native_dropout.default] = native_dropout
