"""Differences between frameworks that are meant: what each defines in its own way, with how far apart that may put the two.

**The running variance of a batch norm.** PyTorch adds the unbiased variance of the batch to it (n - 1), PaddlePaddle on the CPU and
Keras the biased one (n): torch.nn.BatchNorm2d's documentation; paddle/phi/kernels/cpu/batch_norm_kernel.cc, and measured;
keras/src/layers/normalization/batch_normalization.py (Keras 3.15: `ops.moments`), and measured. Of n elements of a
channel the two batch variances differ by 1/n of the larger, so their running means differ by no more than that, however many steps
they run over.
"""

from __future__ import annotations

import numpy as np

from trueup.comparison.graph.streams import Array
from trueup.comparison.measures.measure import Errors

ROOM = 1.1
"""Times the bound that is granted: both sides' batch variances have rounding of their own."""


def known_differences(errors: Errors) -> Array:
    """Return, by entry, the relative error that the frameworks' own definitions explain; 0 where there is none."""
    found = np.zeros(len(errors.pair))
    baseline = errors.streams[0]
    if baseline.neutral is None:
        return found
    names = baseline.names
    first = np.full(len(errors.calls[0]), np.nan)  # elements of the first tensor that a call reads
    inputs = np.flatnonzero(errors.names == names.number("input.0"))
    first[errors.pair[inputs]] = baseline.numel[errors.slots[0][inputs]]
    called = baseline.neutral[errors.calls[0][errors.pair]]
    layer = (called == names.number("BatchNorm")) & (errors.names == names.number("output.buffer.running_var"))
    function = (called == names.number("batch_norm")) & np.isin(errors.names, [names.number(f"{s}.2") for s in ("input", "output")])
    at = np.flatnonzero(layer | function)
    n = first[errors.pair[at]] / np.maximum(baseline.numel[errors.slots[0][at]], 1)
    found[at] = np.where(n >= 2, ROOM / n, 0.0)
    return found
