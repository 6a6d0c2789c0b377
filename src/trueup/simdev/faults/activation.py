"""Faults of activations, softmax and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch

from trueup.simdev.faults import Call, Wrong, effect

aten: Any = torch.ops.aten


@effect("gelu-tanh-for-erf")
def _gelu_tanh(call: Call) -> Wrong:
    if call["approximate"] != "none":
        return None
    if call.op == "aten::gelu":
        forward: torch.Tensor = aten.gelu(call["self"], approximate="tanh")
        return forward
    backward: torch.Tensor = aten.gelu_backward(call["grad_output"], call["self"], approximate="tanh")
    return backward


@effect("gelu-backward")
def _gelu_backward(call: Call) -> Wrong:
    x = call["self"].float()
    # Beyond the density term, GELU's derivative is its own value over x: the cumulative probability.
    inner = x / math.sqrt(2) if call["approximate"] == "none" else math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    probability = 0.5 * (1 + (torch.erf(inner) if call["approximate"] == "none" else torch.tanh(inner)))
    wrong: torch.Tensor = call["grad_output"] * probability
    return wrong


@effect("silu-backward")
def _silu_backward(call: Call) -> Wrong:
    wrong: torch.Tensor = call["grad_output"] * call["self"].sigmoid()
    return wrong


@effect("relu-backward-at-zero")
def _relu_backward(call: Call) -> Wrong:
    grad: torch.Tensor = call["grad_output"]
    return grad * (call["self"] >= call["threshold"])


@effect("tanh-table-lookup")
def _tanh_table(call: Call) -> Wrong:
    x = call["self"]
    if not x.is_floating_point():
        return None
    scaled = x.float() * 16
    left = scaled.floor()
    low, high = (left / 16).tanh(), ((left + 1) / 16).tanh()
    wrong: torch.Tensor = low + (high - low) * (scaled - left)
    return wrong


@effect("softmax-backward")
def _softmax_backward(call: Call) -> Wrong:
    wrong: torch.Tensor = call["grad_output"] * call["output"]
    return wrong


@effect("log-softmax-backward")
def _log_softmax_backward(call: Call) -> Wrong:
    grad = call["grad_output"]
    wrong: torch.Tensor = grad - 0.5 * call["output"].exp() * grad.sum(call["dim"], keepdim=True)
    return wrong


@effect("log-softmax-half-sum")
def _log_softmax_half(call: Call) -> Wrong:
    x, dim = call["self"].float(), call["dim"]
    shifted = x - x.amax(dim, keepdim=True)
    wrong: torch.Tensor = shifted - shifted.exp().sum(dim, keepdim=True).half().float().log()
    return wrong


@effect("dropout-no-rescale")
def _dropout(call: Call) -> Wrong:
    if call["train"] is False:
        return None
    return (call["input"] * call.outputs[1],)
