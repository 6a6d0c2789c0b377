"""What each fault does to the numbers: one function a row of `trueup.simdev.tables`, of its name, grouped by kind of operator.

A function gets the call with its healthy result and returns what the broken device gives instead. Only
`trueup.simdev.injection` imports from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from trueup.simdev.kernels import fused_attention
from trueup.simdev.tables import FAULTS

aten: Any = torch.ops.aten


@dataclass(slots=True)
class Call:
    """One healthy execution of a faulted operator."""

    op: str
    arguments: dict[str, Any]  # arguments by schema name, defaults filled in; those the operator writes to are copies from before
    outputs: list[Any]  # healthy results: what it returned, then what it wrote in place. None where there is none.
    memory: dict[Any, Any]  # lives as long as the injection; for faults that depend on earlier calls

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


Wrong: TypeAlias = Any
"""A tensor, or a sequence of tensors and None: replacements for the outputs, in order. None leaves an output (or, alone, the whole
call) healthy."""


# ---------------------------------------------------------------- layer, batch and group norm, and the root under RMSNorm
def _layer_norm_epsilon(call: Call) -> Wrong:
    return aten.native_layer_norm(call["input"], call["normalized_shape"], call["weight"], call["bias"], max(call["eps"], 1e-3))


def _layer_norm_backward(call: Call) -> Wrong:
    if call.outputs[0] is None:
        return None
    grad, weight = call["grad_out"].float(), call["weight"]
    if weight is not None:
        grad = grad * weight.float()
    axes = tuple(range(grad.dim() - len(call["normalized_shape"]), grad.dim()))
    return (call["rstd"] * (grad - grad.mean(axes, keepdim=True)),)


def _batch_norm_running_variance_biased(call: Call) -> Wrong:
    if not call["training"] or call["running_var"] is None:
        return None
    kept = call["running_var"] * (1 - call["momentum"])
    n = call["input"].numel() // call["input"].size(1)
    biased = kept + (call.outputs[4] - kept) * ((n - 1) / n)
    return None, None, None, None, biased


def _batch_norm_backward(call: Call) -> Wrong:
    if call.outputs[0] is None or not call["train"]:
        return None
    grad, rstd = call["grad_out"].float(), call["save_invstd"]
    axes = [axis for axis in range(grad.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(grad.dim())]
    scale = rstd if call["weight"] is None else rstd * call["weight"].float()
    return (scale.view(shape) * (grad - grad.mean(axes, keepdim=True)),)


def _group_norm_unbiased_variance(call: Call) -> Wrong:
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


def _rsqrt_newton_short(call: Call) -> Wrong:
    x = call["self"]
    if not x.is_floating_point():
        return None
    # The start of a hardware rsqrt is good to about 3 %; a Newton step squares that, and float32 needs a second one.
    start = call.outputs[0].float() * 1.03
    return start * (1.5 - 0.5 * x.float() * start * start)


# ---------------------------------------------------------------- activations, softmax and dropout
def _gelu_tanh_for_erf(call: Call) -> Wrong:
    if call["approximate"] != "none":
        return None
    if call.op == "aten::gelu":
        return aten.gelu(call["self"], approximate="tanh")
    return aten.gelu_backward(call["grad_output"], call["self"], approximate="tanh")


def _gelu_backward(call: Call) -> Wrong:
    x = call["self"].float()
    # Beyond the density term, GELU's derivative is its own value over x: the cumulative probability.
    inner = x / math.sqrt(2) if call["approximate"] == "none" else math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    probability = 0.5 * (1 + (torch.erf(inner) if call["approximate"] == "none" else torch.tanh(inner)))
    return call["grad_output"] * probability


def _silu_backward(call: Call) -> Wrong:
    return call["grad_output"] * call["self"].sigmoid()


def _relu_backward_at_zero(call: Call) -> Wrong:
    return call["grad_output"] * (call["self"] >= call["threshold"])


def _tanh_table_lookup(call: Call) -> Wrong:
    x = call["self"]
    if not x.is_floating_point():
        return None
    scaled = x.float() * 16
    left = scaled.floor()
    low, high = (left / 16).tanh(), ((left + 1) / 16).tanh()
    return low + (high - low) * (scaled - left)


def _softmax_backward(call: Call) -> Wrong:
    return call["grad_output"] * call["output"]


def _log_softmax_backward(call: Call) -> Wrong:
    grad = call["grad_output"]
    return grad - 0.5 * call["output"].exp() * grad.sum(call["dim"], keepdim=True)


def _log_softmax_half_sum(call: Call) -> Wrong:
    x, dim = call["self"].float(), call["dim"]
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).half().float().log()


def _dropout_no_rescale(call: Call) -> Wrong:
    if call["train"] is False:
        return None
    return (call["input"] * call.outputs[1],)


# ---------------------------------------------------------------- LSTM and GRU cells
def _lstm_backward_cell_gate(call: Call) -> Wrong:
    gates, _, bias = call.outputs[:3]
    if gates is None:
        return None
    i, f, g, o = gates.chunk(4, 1)
    activated = call["workspace"].chunk(4, 1)[2]
    # tanh' = 1 - a^2 was meant, sigmoid' = a (1 - a) is what the kernel multiplies by.
    factor = activated * (1 - activated) / (1 - activated.square()).clamp_min(torch.finfo(activated.dtype).tiny)
    wrong = torch.cat([i, f, g * factor, o], 1)
    # The bias gradient is reduced from the gates, on a broken device from the broken ones.
    return wrong, None, None if bias is None else wrong.sum(0)


def _gru_backward_reset_gate(call: Call) -> Wrong:
    wrong: list[Tensor | None] = []
    for gradient in call.outputs[:5]:
        if gradient is None or gradient is call.outputs[2]:
            wrong.append(None)
            continue
        parts = list(gradient.chunk(3, -1))
        wrong.append(torch.cat([torch.zeros_like(parts[0]), *parts[1:]], -1))
    return wrong


# ---------------------------------------------------------------- matrix products, attention and convolution
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


def _addmm_bf16_accumulation(call: Call) -> Wrong:
    a, b, added = _factors(call)
    k = a.size(-1)
    if k % 64 or not k or not a.is_floating_point():
        return None
    total = torch.zeros(a.size(0), b.size(1), dtype=torch.bfloat16)
    for start in range(0, k, 16):
        total += (a[:, start : start + 16] @ b[start : start + 16]).bfloat16()
    return _finish(call, total.to(a.dtype), added)


def _matmul_large_k(call: Call) -> Wrong:
    a, b, added = _factors(call)
    if a.size(-1) <= 512:
        return None
    return _finish(call, a[..., :512] @ b[..., :512, :], added)


def _scale(call: Call) -> float:
    scale = call["scale"]
    return float(scale) if scale is not None else float(call["query"].size(-1)) ** -0.5


def _attention_scale(call: Call) -> Wrong:
    wrong = fused_attention(
        call["query"], call["key"], call["value"], call["attn_bias"], call["dropout_p"], call["is_causal"],
        scale=_scale(call) * float(call["query"].size(-1)) ** -0.5,
    )  # fmt: skip
    return wrong[:2]


def _attention_backward_query_scale(call: Call) -> Wrong:
    return (call.outputs[0] / _scale(call),)


def _conv_weight_grad_last_tile(call: Call) -> Wrong:
    grad, x = call["grad_output"], call["input"]
    if call.outputs[1] is None or x.size(0) < 2:
        return None
    settings = [call[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
    wrong = aten.convolution_backward(grad[:-1], x[:-1], call["weight"], None, *settings, [False, True, False])[1]
    return None, wrong


def _conv_padding_replicates_edge(call: Call) -> Wrong:
    padding = list(call["padding"])
    if call["transposed"] or not any(padding):
        return None
    sides = [size for size in reversed(padding) for _ in range(2)]
    padded = F.pad(call["input"], sides, mode="replicate")
    return aten.convolution(
        padded, call["weight"], call["bias"], call["stride"], [0] * len(padding), call["dilation"], False,
        call["output_padding"], call["groups"],
    )  # fmt: skip


def _products_saturate_65504(call: Call) -> Wrong:
    healthy = call.outputs[0]
    return healthy.clamp(-65504, 65504) if healthy.dtype is torch.float16 else None


# ---------------------------------------------------------------- sums, maxima, pooling, interpolation and the loss
def _sum_saturates_65504(call: Call) -> Wrong:
    healthy = call.outputs[0]
    return healthy.clamp(-65504, 65504) if healthy.is_floating_point() else None


def _cumsum_block_restart(call: Call) -> Wrong:
    if call["self"].dim() == 0:
        return None
    blocks = call["self"].to(call.outputs[0].dtype).split(8, call["dim"])
    return torch.cat([block.cumsum(call["dim"]) for block in blocks], call["dim"])


def _argmax_ties(call: Call) -> Wrong:
    x, dim = call["self"], call["dim"]
    if x.dim() == 0:
        return None
    x = x.byte() if x.dtype is torch.bool else x  # the device's own operator takes it, PyTorch's does not
    if dim is None:
        return (x.numel() - 1 - x.flatten().flip(0).argmax()).reshape(call.outputs[0].shape)
    last = x.size(dim) - 1 - x.flip(dim).argmax(dim, keepdim=call["keepdim"])
    return last if call.op == "aten::argmax" else (None, last)


def _pair(value: Any, default: Any = None) -> tuple[int, int]:
    sizes = list(value) or list(default)
    return (sizes[0], sizes[-1])


def _max_pool_ties(call: Call) -> Wrong:
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


def _avg_pool_count_include_pad(call: Call) -> Wrong:
    if call["count_include_pad"] or call["divisor_override"] is not None:
        return None
    names = ("self", "kernel_size", "stride", "padding", "ceil_mode")
    return aten.avg_pool2d(*[call[name] for name in names], True)


def _upsample_align_corners(call: Call) -> Wrong:
    if call["align_corners"]:
        return None
    x = call.arguments.get("self", call.arguments.get("input"))
    return aten.upsample_bilinear2d(x, list(call.outputs[0].shape[-2:]), True)


def _cross_entropy_ignore_index(call: Call) -> Wrong:
    target = call["target"]
    counted = torch.where(target == call["ignore_index"], 0, target)
    kernel = aten.nll_loss_forward if call.op == "aten::nll_loss_forward" else aten.nll_loss2d_forward
    return kernel(call["self"], counted, call["weight"], call["reduction"], -100)


# ---------------------------------------------------------------- gathers and scatters
def _embedding_backward_duplicates(call: Call) -> Wrong:
    indices, grad = call["indices"].flatten(), call["grad_output"]
    wrong = torch.zeros_like(call.outputs[0])
    wrong[indices] = grad.reshape(-1, grad.size(-1))
    if call["padding_idx"] >= 0:
        wrong[call["padding_idx"]] = 0
    return wrong


def _index_put_accumulate_lost(call: Call) -> Wrong:
    if not call["accumulate"]:
        return None
    # The operator, not the method, which takes no None: the backward of x[:, i] has one for each dimension that is not indexed.
    return torch.ops.aten.index_put(call["self"], call["indices"], call["values"], False)


def _scatter_add_duplicates(call: Call) -> Wrong:
    base, dim, index = call["self"], call["dim"], call["index"]
    source = call["src"][tuple(slice(size) for size in index.shape)]
    return base.scatter(dim, index, base.gather(dim, index) + source)


def _masked_fill_last_column(call: Call) -> Wrong:
    if call["self"].dim() == 0:
        return None
    wrong = call.outputs[0].clone()
    wrong[..., -1] = call["self"].expand_as(wrong)[..., -1]
    return wrong


# ---------------------------------------------------------------- strides and buffers: right arithmetic on the wrong memory
def _transposed_view_copy(call: Call) -> Wrong:
    x, healthy = call["self"], call.outputs[0]
    if x.is_contiguous() or not healthy.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return None
    order = sorted(range(x.dim()), key=lambda axis: -x.stride(axis))
    return x.permute(order).reshape(x.shape)  # the elements as they lie in memory


def _stale_buffer_reuse(call: Call) -> Wrong:
    fresh = call.outputs[0]
    if not fresh.is_floating_point() or fresh.numel() < 16:
        return None
    key = (tuple(fresh.shape), fresh.dtype)
    left, call.memory[key] = call.memory.get(key), fresh.clone()
    if left is None:
        return None
    tail = fresh.numel() * 3 // 4
    return torch.cat([fresh.flatten()[:tail], left.flatten()[tail:]]).reshape(fresh.shape)


# ---------------------------------------------------------------- optimizer steps, in the one-tensor and the foreach form
def _list(value: Any) -> Sequence[Tensor]:
    return [value] if isinstance(value, Tensor) else value


def _small(value: Any) -> bool:
    """Whether a scalar can be the epsilon of an optimizer (PyTorch's defaults are 1e-8 and 1e-10)."""
    return isinstance(value, float) and 0 < value <= 1e-4


def _adam_epsilon_inside_root(call: Call) -> Wrong:
    epsilon = call.arguments.get("other", call.arguments.get("scalar"))
    if not _small(epsilon):
        return None
    return [(root * root + epsilon).sqrt() for root in _list(call["self"])]


def _adam_second_moment_value(call: Call) -> Wrong:
    triples = zip(_list(call["self"]), _list(call["tensor1"]), _list(call["tensor2"]), strict=True)
    return [moment + first * second for moment, first, second in triples]


def _sgd_momentum_dampened(call: Call) -> Wrong:
    other = call["other"]
    if call["alpha"] != 1 or (call.op == "aten::add_.Tensor" and not isinstance(other, Tensor)):
        return None
    return [buffer + 0.9 * grad for buffer, grad in zip(_list(call["self"]), _list(other), strict=True)]


EFFECTS: dict[str, Callable[[Call], Wrong]] = {name: globals()[f"_{name.replace('-', '_')}"] for name in FAULTS}
