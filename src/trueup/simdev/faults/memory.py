"""Faults of strides and buffers: right arithmetic on the wrong memory."""

from __future__ import annotations

import torch

from trueup.simdev.faults import Call, Wrong, effect


@effect("transposed-view-copy")
def _transposed_copy(call: Call) -> Wrong:
    x, healthy = call["self"], call.outputs[0]
    if x.is_contiguous() or not healthy.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return None
    order = sorted(range(x.dim()), key=lambda axis: -x.stride(axis))
    return x.permute(order).reshape(x.shape)  # the elements as they lie in memory


@effect("stale-buffer-reuse")
def _stale_buffer(call: Call) -> Wrong:
    fresh: torch.Tensor = call.outputs[0]
    if not fresh.is_floating_point() or fresh.numel() < 16:
        return None
    key = (tuple(fresh.shape), fresh.dtype)
    left, call.memory[key] = call.memory.get(key), fresh.clone()
    if left is None:
        return None
    tail = fresh.numel() * 3 // 4
    return torch.cat([fresh.flatten()[:tail], left.flatten()[tail:]]).reshape(fresh.shape)
