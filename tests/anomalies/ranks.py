"""Trains under DDP in two gloo processes; rank 1 alone gets a batch that overflows. A job of `test_ranks.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trueup


def train(out: str, levels: tuple[str, ...] = ("api", "aten")) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3)).half()
    x = torch.randn(4, 8).half()
    if dist.get_rank() == 1:
        x[2] *= 20000
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    with trueup.capture(out, model=wrapped, level=levels):
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(x).float().square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()
