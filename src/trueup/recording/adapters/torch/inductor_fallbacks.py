"""Operators that torch.compile leaves to ATen's own kernels: import this before the first compiled call."""

from collections.abc import Iterable

import torch
from torch._inductor import config, decomposition, lowering


def leave_to_aten(operators: Iterable[str]) -> None:
    """Have Inductor call ATen's kernels of some operators (``gelu``) in place of code that it generates, in all their overloads.
    Their decompositions go, too, for code is generated of what they are made of."""
    config.force_disable_caches = True  # cached code was made without this list
    for packet in (getattr(torch.ops.aten, name) for name in operators):
        for operator in (getattr(packet, overload) for overload in packet.overloads()):
            decomposition.decompositions.pop(operator, None)
            lowering.make_fallback(operator, lowering.require_contiguous, warn=False)
    decomposition.fast_random_decomps.cache_clear()
