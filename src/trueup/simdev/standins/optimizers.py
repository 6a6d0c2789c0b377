"""``NpuFused...`` of torch_npu and apex, and apex's ``Fused...``: PyTorch's optimizers, which compute the same formulas."""

from __future__ import annotations

from typing import Any

import torch


def _of(kind: Any, name: str) -> Any:
    return type(name, (kind,), {"__doc__": f"torch.optim.{kind.__name__} under the vendor's name.", "__module__": __name__})


NpuFusedSGD, NpuFusedAdam, NpuFusedAdamW, NpuFusedAdadelta, NpuFusedRMSprop = (
    _of(getattr(torch.optim, name), f"NpuFused{name}") for name in ("SGD", "Adam", "AdamW", "Adadelta", "RMSprop")
)
FusedSGD, FusedAdagrad = _of(torch.optim.SGD, "FusedSGD"), _of(torch.optim.Adagrad, "FusedAdagrad")


def FusedAdam(params: Any, *args: Any, adam_w_mode: bool = True, set_grad_none: bool = True, **options: Any) -> Any:  # noqa: ARG001
    """Return AdamW, or Adam without ``adam_w_mode``: apex's class is either."""
    options.pop("bias_correction", None)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    names = ("lr", "bias_correction", "betas", "eps")
    given = {name: value for name, value in zip(names, args, strict=False) if name != "bias_correction"}
    return kind(params, **{"weight_decay": 0.0, **given, **options})


class _Missing:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: PyTorch has no such optimizer, so neither has the simulated device")


NpuFusedLamb, NpuFusedLAMB, NpuFusedBertAdam, NpuFusedAdamP, NpuFusedRMSpropTF, FusedLAMB, FusedNovoGrad = (
    type(name, (_Missing,), {})
    for name in (
        "NpuFusedLamb", "NpuFusedLAMB", "NpuFusedBertAdam", "NpuFusedAdamP", "NpuFusedRMSpropTF", "FusedLAMB", "FusedNovoGrad",
    )
)  # fmt: skip
