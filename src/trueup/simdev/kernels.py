"""Operators that run on an accelerator and not on the CPU: attention, dropout, the cells of LSTM and GRU.

**Attention** is one operator forward and one backward. PyTorch reserves ``_scaled_dot_product_fused_attention_overrideable``
for private devices, and torch_npu fills it; but the choice of it is a C++ stub that Python cannot register, and without it
attention falls apart into some forty operators. So the composite is overridden on the autograd key. The kernel is the CPU's
flash attention, taken where the CPU would take it (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp), so a healthy device
gives the CPU's bits.

**Dropout** draws the mask of the CPU path. On the CPU, ``F.dropout`` is ``bernoulli_`` on a floating tensor, ``div_`` and
``mul``; on an accelerator it is the single operator ``native_dropout``, whose CPU kernel draws into a boolean tensor. The mask
has to come from the same draw.

**Cells** are one fused kernel each way, with a workspace between. PyTorch sends these operators only to accelerators and has no
CPU kernel for them; formulas and workspace layout are those of aten/src/ATen/native/cuda/RNN.cu.
"""

# ruff: noqa: ARG001 - the parameters are those of the operators

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.simdev.tensor import KERNELS, NPUTensor

aten: Any = torch.ops.aten


# ---------------------------------------------------------------- attention
def _fusable(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, grouped: bool) -> bool:
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    heads, key_heads = query.size(1), key.size(1)
    return (
        query.size(0) == key.size(0) == value.size(0)
        and key_heads == value.size(1)
        and (heads == key_heads or (grouped and heads % key_heads == 0))
        and query.size(-1) == key.size(-1) == value.size(-1)
        and key.size(2) == value.size(2)
        and min(query.size(2), key.size(2)) > 0
        and dropout_p == 0.0
        and all(each.stride(-1) == 1 for each in (query, key, value))
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
    )


def _only_math_allowed() -> bool:
    # torch.nn.attention.sdpa_kernel(SDPBackend.MATH) asks for the decomposition.
    return not torch._C._get_overrideable_sdp_enabled() or not torch._C._get_flash_sdp_enabled()


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run the fused operator where it applies, the mathematical decomposition elsewhere."""
    with torch._C.DisableTorchFunction():  # a TorchFunctionMode has seen the user's call; the rest is the device's
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # neither kernel converts it
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        npu = isinstance(query, NPUTensor)  # else: a functional or batched wrapper, which has to see the decomposition
        if npu and not _only_math_allowed() and _fusable(query, key, value, attn_mask, dropout_p, enable_gqa):
            fused: Tensor = aten._scaled_dot_product_fused_attention_overrideable(
                query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale
            )[0]
            return fused
        output: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return output


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the output, its log-sum-exp, and the empty bookkeeping tensors of the operator's signature."""
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale
    )
    cum_seq_q, cum_seq_k, seed, offset = (torch.empty(0, dtype=torch.int64) for _ in range(4))
    return output, logsumexp, cum_seq_q, cum_seq_k, query.size(2), key.size(2), seed, offset, query.new_empty(0)


def fused_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, grad_input_mask: list[bool],
    out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of query, key and value; the bias gets none (see `_fusable`)."""
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_bias, scale=scale
    )
    return (*grads, None)


# ---------------------------------------------------------------- dropout
def native_dropout(input: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    """Return ``input * mask / (1 - p)`` and the boolean mask."""
    if train is False or input.numel() == 0 or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    noise = torch.empty_like(input).bernoulli_(1 - p)
    mask = noise.to(torch.bool)
    return input * noise.div_(1 - p), mask


# ---------------------------------------------------------------- cells
def _plus(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return ``hy``, ``cy`` ``(N, H)`` and the workspace ``(N, 4H)``: the activated gates."""
    # Same order of additions as the CPU's cell: linear_ih (bias inside) + linear_hh (bias inside).
    i, f, g, o = (_plus(input_gates, input_bias) + _plus(hidden_gates, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = (f * cx) + (i * g)
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the gates ``(N, 4H)``, of ``cx`` ``(N, H)`` and of either bias ``(4H,)``."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    d = grad_hy * o * (1 - t * t)
    if grad_cy is not None:
        d = d + grad_cy
    gates = torch.cat([d * g * i * (1 - i), d * cx * f * (1 - f), d * i * (1 - g * g), grad_hy * t * o * (1 - o)], 1)
    return gates, d * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``hy`` ``(N, H)`` and the workspace ``(N, 5H)``: r, z, n, hx and the hidden part of n."""
    ir, iz, i_n = _plus(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _plus(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (hr + ir).sigmoid(), (hz + iz).sigmoid()
    n = (i_n + hn * r).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return gradients of input and hidden gates ``(N, 3H)``, of ``hx`` ``(N, H)`` and of both biases ``(3H,)``."""
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_z = grad_hy * (hx - n) * (1 - z) * z
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_r = grad_n * hn * (1 - r) * r
    to_input = torch.cat([grad_r, grad_z, grad_n], 1)
    to_hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    if not has_bias:
        return to_input, to_hidden, grad_hy * z, None, None
    return to_input, to_hidden, grad_hy * z, to_input.sum(0), to_hidden.sum(0)


# ---------------------------------------------------------------- CTC
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Take lengths as numbers, as PyTorch does with every tensor that is no subclass (aten/src/ATen/native/LossCTC.cpp)."""
    with torch._C.DisableTorchFunction():
        lengths = [one.tolist() for one in (input_lengths, target_lengths)]
        loss: Tensor = aten.ctc_loss.IntList(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        return loss


# ---------------------------------------------------------------- what the CPU refuses and the device takes
def _wide_labels(operator: Any) -> Any:
    """Return a loss that takes int32 labels, as the device does; the porting guide makes all labels int32."""
    at = 1 if "backward" not in operator.name() else 2

    def kernel(*args: Any, **kwargs: Any) -> Any:
        labels = args[at].long() if args[at].dtype is torch.int32 else args[at]
        return operator(*args[:at], labels, *args[at + 1 :], **kwargs)

    return kernel


def register(aten_library: Any) -> None:
    """Enter the composite, and the kernels into the device's table."""
    aten_library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")
    aten_library.impl("ctc_loss.Tensor", ctc_loss, "AutogradPrivateUse1")
    for name, kernel in {
        # Under inference_mode there is no autograd key and the composite itself reaches the device.
        "scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
        "_scaled_dot_product_fused_attention_overrideable": fused_attention,
        "_scaled_dot_product_fused_attention_overrideable_backward": fused_attention_backward,
        "native_dropout": native_dropout,
        "_thnn_fused_lstm_cell": lstm_cell, "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
        "_thnn_fused_gru_cell": gru_cell, "_thnn_fused_gru_cell_backward": gru_cell_backward,
    }.items():  # fmt: skip
        KERNELS[getattr(aten, name).default] = kernel
    # Zeros without memory, for a dispatch key above ours: a kernel reads address 0 (backward of ``sgn``, second one of a norm).
    KERNELS[aten._efficientzerotensor.default] = aten.zeros.default
    KERNELS[aten.record_stream.default] = lambda *_: None  # memory is not given back before its kernels have run
    for name in ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"):
        operator = getattr(aten, name).default
        KERNELS[operator] = _wide_labels(operator)
