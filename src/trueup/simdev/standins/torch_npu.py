"""``torch_npu``: the device, formats of tensors, and the fused functions that PyTorch has a formula for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trueup.simdev import npu

__all__ = ["npu"]
__version__ = str(torch.__version__).partition("+")[0] + "+simulated"
ND = 2
"""The one format that the simulated device has."""


def npu_format_cast(input: Tensor, acl_format: int, **_: Any) -> Tensor:  # noqa: ARG001
    """Return the tensor: its numbers are the same in every format."""
    return input


npu_format_cast_ = npu_format_cast


def get_npu_format(input: Tensor) -> int:  # noqa: ARG001
    """Return 2, ND."""
    return ND


def npu_dtype_cast(input: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in another dtype."""
    return input.to(dtype)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return ``x / rms(x) * gamma`` over the dimensions of ``gamma``, and ``1 / rms(x)`` in float32."""
    wide = self.float()
    over = tuple(range(-gamma.dim(), 0))
    scale = (wide.square().mean(over, keepdim=True) + epsilon).rsqrt()
    return (wide * scale).to(self.dtype) * gamma, scale


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """Return ``silu(a) * b`` of the two halves."""
    a, b = self.chunk(2, dim)
    return F.silu(a) * b


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Return ``x * cos + rotated(x) * sin``, by halves or by neighbours (``interleave``)."""
    if rotary_mode == "interleave":
        turned = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    else:
        a, b = input.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
    return input * r1 + turned * r2


def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``."""
    return F.linear(input, weight, bias)


def npu_transpose(self: Tensor, perm: Any, require_contiguous: bool = True) -> Tensor:
    """Return the tensor with its dimensions in another order."""
    turned = self.permute(*perm)
    return turned.contiguous() if require_contiguous else turned


def npu_confusion_transpose(self: Tensor, perm: Any, shape: Any, transpose_first: bool) -> Tensor:
    """Return the tensor permuted and reshaped, in this order or the other."""
    return self.permute(*perm).reshape(shape) if transpose_first else self.reshape(shape).permute(*perm)


def fast_gelu(self: Tensor) -> Tensor:
    """Return ``x * sigmoid(1.702 x)``."""
    return self * torch.sigmoid(1.702 * self)


npu_silu, npu_mish = F.silu, F.mish


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, atten_mask: Tensor | None = None,
    scale: float = 1.0, keep_prob: float = 1.0, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return attention in the layout of the inputs (BSH, SBH, BSND, BNSD), the maximum and the sum of the softmax ``(B, N, S, 8)``,
    and the empty rest of the vendor's signature; raises NotImplementedError for options without a formula of PyTorch's."""
    set_ = sorted(name for name, given in options.items() if given not in (None, 0) and name not in ("pre_tockens", "next_tockens"))
    if set_ or keep_prob != 1.0 or input_layout not in ("BSH", "SBH", "BSND", "BNSD"):
        what = ", ".join(set_ or (["keep_prob"] if keep_prob != 1.0 else [f"input_layout={input_layout!r}"]))
        raise NotImplementedError(f"torch_npu.npu_fusion_attention with {what} is no function of the simulated device")
    q, k, v = (_heads(one, head_num if one is query else key_heads(one, query, head_num, input_layout), input_layout)
               for one in (query, key, value))  # fmt: skip
    repeat = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if atten_mask is not None:
        scores = scores.masked_fill(atten_mask.bool(), torch.finfo(torch.float32).min)
    most = scores.amax(-1, keepdim=True)
    powers = (scores - most).exp()
    total = powers.sum(-1, keepdim=True)
    out = (powers / total).to(q.dtype) @ v
    there = {"BNSD": lambda x: x, "BSND": lambda x: x.transpose(1, 2), "BSH": lambda x: x.transpose(1, 2).flatten(2),
             "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2)}[input_layout](out)  # fmt: skip
    return there, most.detach().expand(*most.shape[:-1], 8), total.detach().expand(*total.shape[:-1], 8), None, 0, 0, 0


def key_heads(one: Tensor, query: Tensor, heads: int, layout: str) -> int:
    """Return how many heads keys or values have, fewer than the queries in grouped attention."""
    return heads * one.size(-1) // query.size(-1) if layout in ("BSH", "SBH") else heads


def _heads(one: Tensor, heads: int, layout: str) -> Tensor:
    if layout == "BNSD":
        return one
    if layout == "BSND":
        return one.transpose(1, 2)
    split = one.unflatten(-1, (heads, -1))
    return split.transpose(1, 2) if layout == "BSH" else split.permute(1, 2, 0, 3)


def __getattr__(name: str) -> Any:
    if not name.startswith("npu_"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"torch_npu.{name} is no function of the simulated device")

    return missing
