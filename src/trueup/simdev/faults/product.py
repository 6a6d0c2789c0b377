"""Faults of matrix products, attention and convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trueup.simdev.attention import fused_attention
from trueup.simdev.faults import Call, Wrong, effect

aten: Any = torch.ops.aten


def _factors(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the two matrices of a product and what is added to it."""
    if call.op == "aten::addmm":
        return call["mat1"], call["mat2"], call["self"]
    if call.op == "aten::baddbmm":
        return call["batch1"], call["batch2"], call["self"]
    return call["self"], call["mat2"], None


def _finish(call: Call, product: Tensor, added: Tensor | None) -> Tensor:
    if added is None:
        return product
    total: Tensor = call["alpha"] * product
    return total + call["beta"] * added if call["beta"] else total


@effect("addmm-bf16-accumulation")
def _bf16_accumulation(call: Call) -> Wrong:
    a, b, added = _factors(call)
    k = a.size(-1)
    if k % 64 or not k or not a.is_floating_point():
        return None
    total = torch.zeros(a.size(0), b.size(1), dtype=torch.bfloat16)
    for start in range(0, k, 16):
        total += (a[:, start : start + 16] @ b[start : start + 16]).bfloat16()
    return _finish(call, total.to(a.dtype), added)


@effect("matmul-large-k")
def _large_k(call: Call) -> Wrong:
    a, b, added = _factors(call)
    if a.size(-1) <= 512:
        return None
    return _finish(call, a[..., :512] @ b[..., :512, :], added)


def _scale(call: Call) -> float:
    scale = call["scale"]
    return float(scale) if scale is not None else float(call["query"].size(-1)) ** -0.5


@effect("attention-scale")
def _attention_scale(call: Call) -> Wrong:
    wrong = fused_attention(
        call["query"], call["key"], call["value"], call["attn_bias"], call["dropout_p"], call["is_causal"],
        scale=_scale(call) * float(call["query"].size(-1)) ** -0.5,
    )  # fmt: skip
    return wrong[:2]


@effect("attention-backward-query-scale")
def _attention_backward(call: Call) -> Wrong:
    return (call.outputs[0] / _scale(call),)


@effect("conv-weight-grad-last-tile")
def _conv_weight_grad(call: Call) -> Wrong:
    grad, x = call["grad_output"], call["input"]
    if call.outputs[1] is None or x.size(0) < 2:
        return None
    settings = [call[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
    wrong = aten.convolution_backward(grad[:-1], x[:-1], call["weight"], None, *settings, [False, True, False])[1]
    return None, wrong


@effect("conv-padding-replicates-edge")
def _conv_padding(call: Call) -> Wrong:
    padding = list(call["padding"])
    if call["transposed"] or not any(padding):
        return None
    sides = [size for size in reversed(padding) for _ in range(2)]
    padded = F.pad(call["input"], sides, mode="replicate")
    wrong: Tensor = aten.convolution(
        padded, call["weight"], call["bias"], call["stride"], [0] * len(padding), call["dilation"], False,
        call["output_padding"], call["groups"],
    )  # fmt: skip
    return wrong


@effect("products-saturate-65504")
def _saturated_product(call: Call) -> Wrong:
    healthy: Tensor = call.outputs[0]
    return healthy.clamp(-65504, 65504) if healthy.dtype is torch.float16 else None
