"""Scaled dot-product attention as one operator forward and one backward, as an accelerator runs it.

PyTorch reserves ``_scaled_dot_product_fused_attention_overrideable`` for private devices, and torch_npu fills it; but
the choice of it is a C++ stub that Python cannot register, and without it attention falls apart into some forty
operators. So the composite is overridden on the autograd key. The kernel is the CPU's flash attention, taken where the
CPU would take it (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp), so a healthy device gives the CPU's bits.
"""

# ruff: noqa: ARG001 - the parameters are those of the operators

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.simdev.plan import KERNELS
from trueup.simdev.tensor import NPUTensor

aten: Any = torch.ops.aten


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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the fused operator where it applies, the mathematical decomposition elsewhere."""
    with torch._C.DisableTorchFunction():  # a TorchFunctionMode has seen the user's call; the rest is the device's
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # neither kernel converts it
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    npu = isinstance(query, NPUTensor)  # else: a functional or batched wrapper, which has to see the decomposition
    if not npu or _only_math_allowed() or not _fusable(query, key, value, attn_mask, dropout_p, enable_gqa):
        output: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return output
    fused: Tensor = aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale
    )[0]
    return fused


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return the output, its log-sum-exp, and the empty bookkeeping tensors of the operator's signature."""
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale
    )
    cum_seq_q, cum_seq_k, seed, offset = (torch.empty(0, dtype=torch.int64) for _ in range(4))
    return output, logsumexp, cum_seq_q, cum_seq_k, query.size(2), key.size(2), seed, offset, query.new_empty(0)


def fused_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    grad_input_mask: list[bool],
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key and value; the bias gets none (see `_fusable`)."""
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_bias, scale=scale
    )
    return (*grads, None)


def register(aten_library: Any) -> None:
    """Enter the composite and its two kernels."""
    aten_library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")
    # Under inference_mode there is no autograd key and the composite itself reaches the device.
    KERNELS[aten.scaled_dot_product_attention.default] = torch.nn.functional.scaled_dot_product_attention
    KERNELS[aten._scaled_dot_product_fused_attention_overrideable.default] = fused_attention
    KERNELS[aten._scaled_dot_product_fused_attention_overrideable_backward.default] = fused_attention_backward
