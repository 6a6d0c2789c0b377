"""``torch.autocast("npu")``: which functions run in the low dtype, in float32, in the widest dtype of their inputs.

The lists are those of the CUDA backend (aten/src/ATen/autocast_mode.h, PyTorch 2.13), which torch_npu follows. Unlike
CUDA's, casts of weights are not cached between calls: gradients of a weight used twice are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LOWER = (
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "scaled_dot_product_attention",
)  # fmt: skip

FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "rms_norm", "norm.Scalar", "nuclear_norm", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist",
    "renorm", "logsumexp", "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "sum", "sum.dim_IntList",
)  # fmt: skip

PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "tensordot",
    "scatter_add", "vdot", "cat", "stack",
)  # fmt: skip


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _floating(value):
        return value if value.dtype is dtype or value.device.type != "npu" else value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, dtype) for item in value])
    return value


def _widest(values: Any) -> torch.dtype:
    dtype = torch.get_autocast_dtype("npu")
    for value in values:
        if isinstance(value, (list, tuple)):
            dtype = torch.promote_types(dtype, _widest(value))
        elif _floating(value):
            dtype = torch.promote_types(dtype, value.dtype)
    return dtype


def _rule(operator: Any, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast_and_call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys), torch._C.DisableTorchFunction():
            dtype = choose(args)
            cast = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return operator(*[_cast(value, dtype) for value in args], **cast)

    return cast_and_call


def register(aten_library: Any, any_library: Any) -> None:
    """Register the lists on the ``AutocastPrivateUse1`` key; every other operator falls through."""
    any_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    rules: tuple[tuple[tuple[str, ...], Callable[[Any], torch.dtype]], ...] = (
        (LOWER, lambda _: torch.get_autocast_dtype("npu")),
        (FLOAT32, lambda _: torch.float32),
        (PROMOTE, _widest),
    )
    for names, choose in rules:
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if operator is not None:  # an older PyTorch may lack it
                aten_library.impl(name, _rule(operator, choose), "AutocastPrivateUse1")
