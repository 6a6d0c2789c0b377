"""LSTM and GRU cells as a device runs them: one fused kernel each way, with a workspace between.

PyTorch sends these operators only to accelerators and has no CPU kernel for them; formulas and workspace layout are
those of aten/src/ATen/native/cuda/RNN.cu.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.simdev.plan import KERNELS

aten: Any = torch.ops.aten


def lstm_gates(
    input_gates: Tensor, hidden_gates: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> Tensor:
    """Return the four gates before their activations, ``(N, 4H)`` in the order i, f, g, o."""
    # Same order of additions as the CPU's cell: linear_ih (bias inside) + linear_hh (bias inside).
    if input_bias is not None:
        input_gates = input_gates + input_bias
    if hidden_bias is not None:
        hidden_gates = hidden_gates + hidden_bias
    return input_gates + hidden_gates


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``hy``, ``cy`` ``(N, H)`` and the workspace ``(N, 4H)``: the activated gates."""
    i, f, g, o = lstm_gates(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1)
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
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``hy`` ``(N, H)`` and the workspace ``(N, 5H)``: r, z, n, hx and the hidden part of n."""
    if input_bias is not None:
        input_gates = input_gates + input_bias
    if hidden_bias is not None:
        hidden_gates = hidden_gates + hidden_bias
    ir, iz, i_n = input_gates.chunk(3, 1)
    hr, hz, hn = hidden_gates.chunk(3, 1)
    r = (hr + ir).sigmoid()
    z = (hz + iz).sigmoid()
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


def register() -> None:
    """Enter the cells into the device's kernel table."""
    KERNELS[aten._thnn_fused_lstm_cell.default] = lstm_cell
    KERNELS[aten._thnn_fused_lstm_cell_backward_impl.default] = lstm_cell_backward
    KERNELS[aten._thnn_fused_gru_cell.default] = gru_cell
    KERNELS[aten._thnn_fused_gru_cell_backward.default] = gru_cell_backward
