"""Faults of gathers and scatters."""

from __future__ import annotations

import torch

from trueup.simdev.faults import Call, Wrong, effect


@effect("embedding-backward-duplicates")
def _embedding(call: Call) -> Wrong:
    indices, grad = call["indices"].flatten(), call["grad_output"]
    wrong = torch.zeros_like(call.outputs[0])
    wrong[indices] = grad.reshape(-1, grad.size(-1))
    if call["padding_idx"] >= 0:
        wrong[call["padding_idx"]] = 0
    return wrong


@effect("index-put-accumulate-lost")
def _index_put(call: Call) -> Wrong:
    if not call["accumulate"]:
        return None
    # The operator, not the method, which takes no None: the backward of x[:, i] has one for each dimension that is not indexed.
    wrong: torch.Tensor = torch.ops.aten.index_put(call["self"], call["indices"], call["values"], False)
    return wrong


@effect("scatter-add-duplicates")
def _scatter_add(call: Call) -> Wrong:
    base, dim, index = call["self"], call["dim"], call["index"]
    source = call["src"][tuple(slice(size) for size in index.shape)]
    wrong: torch.Tensor = base.scatter(dim, index, base.gather(dim, index) + source)
    return wrong


@effect("masked-fill-last-column")
def _masked_fill(call: Call) -> Wrong:
    if call["self"].dim() == 0:
        return None
    wrong: torch.Tensor = call.outputs[0].clone()
    wrong[..., -1] = call["self"].expand_as(wrong)[..., -1]
    return wrong
