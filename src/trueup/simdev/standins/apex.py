"""``apex``: mixed precision (`amp`), optimizers, and layers that PyTorch has under another name. No kernels of apex."""

from __future__ import annotations

from typing import Any

import torch

FusedLayerNorm, FusedRMSNorm = torch.nn.LayerNorm, torch.nn.RMSNorm
convert_syncbn_model = torch.nn.SyncBatchNorm.convert_sync_batchnorm


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """PyTorch's, with the arguments of apex's that choose how buckets are sent."""

    def __init__(self, module: Any, message_size: int = 10_000_000, delay_allreduce: bool = False, **_: Any) -> None:  # noqa: ARG002
        super().__init__(module)
