"""Faults of LSTM and GRU cells."""

from __future__ import annotations

import torch

from trueup.simdev.faults import Call, Wrong, effect


@effect("lstm-backward-cell-gate")
def _lstm_cell_gate(call: Call) -> Wrong:
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


@effect("gru-backward-reset-gate")
def _gru_reset_gate(call: Call) -> Wrong:
    wrong: list[torch.Tensor | None] = []
    for gradient in call.outputs[:5]:
        if gradient is None or gradient is call.outputs[2]:
            wrong.append(None)
            continue
        parts = list(gradient.chunk(3, -1))
        wrong.append(torch.cat([torch.zeros_like(parts[0]), *parts[1:]], -1))
    return wrong
