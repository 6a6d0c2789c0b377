"""Faults of sums, maxima, pooling, interpolation and the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trueup.simdev.faults import Call, Wrong, effect

aten: Any = torch.ops.aten


@effect("sum-saturates-65504")
def _saturated_sum(call: Call) -> Wrong:
    healthy: Tensor = call.outputs[0]
    return healthy.clamp(-65504, 65504) if healthy.is_floating_point() else None


@effect("cumsum-block-restart")
def _cumsum(call: Call) -> Wrong:
    if call["self"].dim() == 0:
        return None
    blocks = call["self"].to(call.outputs[0].dtype).split(8, call["dim"])
    return torch.cat([block.cumsum(call["dim"]) for block in blocks], call["dim"])


@effect("argmax-ties")
def _argmax(call: Call) -> Wrong:
    x, dim = call["self"], call["dim"]
    if x.dim() == 0:
        return None
    if dim is None:
        return (x.numel() - 1 - x.flatten().flip(0).argmax()).reshape(call.outputs[0].shape)
    last = x.size(dim) - 1 - x.flip(dim).argmax(dim, keepdim=call["keepdim"])
    return last if call.op == "aten::argmax" else (None, last)


def _pair(value: Any, default: Any = None) -> tuple[int, int]:
    sizes = list(value) or list(default)
    return (sizes[0], sizes[-1])


@effect("max-pool-ties")
def _max_pool(call: Call) -> Wrong:
    x, indices = call["self"], call.outputs[1]
    (kh, kw), (ph, pw), (dh, dw) = (_pair(call[name]) for name in ("kernel_size", "padding", "dilation"))
    sh, sw = _pair(call["stride"], call["kernel_size"])
    (height, width), (rows, columns) = x.shape[-2:], indices.shape[-2:]
    bottom = (rows - 1) * sh + dh * (kh - 1) + 1 - height - ph
    right = (columns - 1) * sw + dw * (kw - 1) + 1 - width - pw
    planes = F.pad(x.reshape(-1, 1, height, width).float(), (pw, right, ph, bottom), value=float("-inf"))
    windows = F.unfold(planes, (kh, kw), (dh, dw), stride=(sh, sw))
    last = kh * kw - 1 - windows.flip(1).argmax(1)
    place = torch.arange(rows * columns)
    row = (place // columns) * sh - ph + (last // kw) * dh
    column = (place % columns) * sw - pw + (last % kw) * dw
    return None, (row * width + column).reshape(indices.shape)


@effect("avg-pool-count-include-pad")
def _avg_pool(call: Call) -> Wrong:
    if call["count_include_pad"] or call["divisor_override"] is not None:
        return None
    names = ("self", "kernel_size", "stride", "padding", "ceil_mode")
    wrong: Tensor = aten.avg_pool2d(*[call[name] for name in names], True)
    return wrong


@effect("upsample-align-corners")
def _upsample(call: Call) -> Wrong:
    if call["align_corners"]:
        return None
    x = call.arguments.get("self", call.arguments.get("input"))
    wrong: Tensor = aten.upsample_bilinear2d(x, list(call.outputs[0].shape[-2:]), True)
    return wrong


@effect("cross-entropy-ignore-index")
def _ignore_index(call: Call) -> Wrong:
    target = call["target"]
    counted = torch.where(target == call["ignore_index"], 0, target)
    kernel = aten.nll_loss_forward if call.op == "aten::nll_loss_forward" else aten.nll_loss2d_forward
    wrong: tuple[Tensor, ...] = kernel(call["self"], counted, call["weight"], call["reduction"], -100)
    return wrong
