"""``apex.fp16_utils`` and ``apex.multi_tensor_apply``: what scripts use of them, in PyTorch's own operators and without kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = [
    "BN_convert_float", "clip_grad_norm", "convert_network", "master_params_to_model_params", "model_grads_to_master_grads",
    "network_to_half", "prep_param_lists", "to_python_float", "tofp16",
]  # fmt: skip

clip_grad_norm = torch.nn.utils.clip_grad_norm_


class multi_tensor_applier:
    """Says that apex's kernels are not there, as apex does where it was installed without them."""

    available = False


class tofp16(torch.nn.Module):
    """A layer that returns its input, a tensor of any shape, as float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return it as float16."""
        return input.half()


def BN_convert_float(module: torch.nn.Module) -> torch.nn.Module:
    """Make the batch normalisations with weights of a model float32 again."""
    for one in module.modules():
        if isinstance(one, torch.nn.modules.batchnorm._BatchNorm) and one.affine:
            one.float()
    return module


def convert_network(network: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Make a model's floating-point weights one dtype, but for batch normalisations with weights."""
    for one in network.modules():
        if not (isinstance(one, torch.nn.modules.batchnorm._BatchNorm) and one.affine):
            for value in (*one._parameters.values(), *one._buffers.values()):
                if value is not None and value.is_floating_point():
                    value.data = value.data.to(dtype)
    return network


def network_to_half(network: torch.nn.Module) -> torch.nn.Module:
    """Return a model that takes any dtype and computes in float16, batch normalisations in float32."""
    return torch.nn.Sequential(tofp16(), BN_convert_float(network.half()))


def prep_param_lists(model: torch.nn.Module, flat_master: bool = False) -> tuple[list[Any], list[Any]]:
    """Return a model's weights that are trained, and float32 copies of them for the optimizer; not ``flat_master``."""
    if flat_master:
        raise NotImplementedError("prep_param_lists(flat_master=True): the simulated device has no flat weights")
    params = [one for one in model.parameters() if one.requires_grad]
    return params, [one.detach().clone().float().requires_grad_() for one in params]


def model_grads_to_master_grads(model_params: Iterable[Any], master_params: Iterable[Any], flat_master: bool = False) -> None:  # noqa: ARG001
    """Copy the gradients of a model's weights to their float32 copies."""
    for model, master in zip(model_params, master_params, strict=True):
        master.grad = None if model.grad is None else model.grad.detach().to(master.dtype)


def master_params_to_model_params(model_params: Iterable[Any], master_params: Iterable[Any], flat_master: bool = False) -> None:  # noqa: ARG001
    """Copy the float32 copies to a model's weights."""
    for model, master in zip(model_params, master_params, strict=True):
        model.data.copy_(master.data)


def to_python_float(t: torch.Tensor) -> float:
    """Return the number of a tensor of one element."""
    return float(t.reshape(-1)[0].item())
