"""Faults of layer, batch and group norm, and of the root under RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.simdev.faults import Call, Wrong, effect

aten: Any = torch.ops.aten


@effect("layer-norm-epsilon")
def _layer_norm_epsilon(call: Call) -> Wrong:
    wrong: tuple[Tensor, ...] = aten.native_layer_norm(
        call["input"], call["normalized_shape"], call["weight"], call["bias"], max(call["eps"], 1e-3)
    )
    return wrong


@effect("layer-norm-backward")
def _layer_norm_backward(call: Call) -> Wrong:
    if call.outputs[0] is None:
        return None
    grad, weight = call["grad_out"].float(), call["weight"]
    if weight is not None:
        grad = grad * weight.float()
    axes = tuple(range(grad.dim() - len(call["normalized_shape"]), grad.dim()))
    return (call["rstd"] * (grad - grad.mean(axes, keepdim=True)),)


@effect("batch-norm-running-variance-biased")
def _running_variance(call: Call) -> Wrong:
    if not call["training"] or call["running_var"] is None:
        return None
    kept = call["running_var"] * (1 - call["momentum"])
    n = call["input"].numel() // call["input"].size(1)
    biased = kept + (call.outputs[4] - kept) * ((n - 1) / n)
    return None, None, None, None, biased


@effect("batch-norm-backward")
def _batch_norm_backward(call: Call) -> Wrong:
    if call.outputs[0] is None or not call["train"]:
        return None
    grad, rstd = call["grad_out"].float(), call["save_invstd"]
    axes = [axis for axis in range(grad.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(grad.dim())]
    scale = rstd if call["weight"] is None else rstd * call["weight"].float()
    return (scale.view(shape) * (grad - grad.mean(axes, keepdim=True)),)


@effect("group-norm-unbiased-variance")
def _group_norm(call: Call) -> Wrong:
    x, groups, eps = call["input"], call["group"], call["eps"]
    rows = x.float().reshape(call["N"], groups, -1)
    n = rows.size(-1)
    if n < 2:
        return None
    rstd = torch.rsqrt(rows.var(-1, unbiased=True) + eps)
    out = ((rows - rows.mean(-1, keepdim=True)) * rstd.unsqueeze(-1)).reshape(x.shape)
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    if call["weight"] is not None:
        out = out * call["weight"].view(shape)
    if call["bias"] is not None:
        out = out + call["bias"].view(shape)
    return out, None, rstd


@effect("rsqrt-newton-short")
def _rsqrt(call: Call) -> Wrong:
    x = call["self"]
    if not x.is_floating_point():
        return None
    # The start of a hardware rsqrt is good to about 3 %; a Newton step squares that, and float32 needs a second one.
    start = call.outputs[0].float() * 1.03
    return start * (1.5 - 0.5 * x.float() * start * start)
