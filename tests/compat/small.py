"""A training small enough to be dumped a dozen times."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Small(nn.Module):
    """Two layers with what the tools name in their own ways: positions given as keywords, an operator, a call of no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 8), nn.Linear(8, 3), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(F.relu(self.first(x)))
        return F.softmax(self.second(hidden + 1.0), dim=-1)


def model(device: str = "cpu") -> Small:
    torch.manual_seed(3)
    return Small().to(device)


def step(net: nn.Module, device: str = "cpu", scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(4)
    net.zero_grad()
    loss = net((torch.randn(5, 6) * scale).to(device)).pow(2).sum()
    loss.backward()
    return loss.detach()


def work(folder: str) -> None:
    """Dump a step of data-parallel training, in each of several processes."""
    from trueup_compat import ptdbg_ascend as ptdbg

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(model())
    ptdbg.set_dump_path(folder)
    ptdbg.register_hook(net, ptdbg.acc_cmp_dump)
    ptdbg.set_dump_switch("ON")
    step(net, scale=float(os.environ.get("DUMP_SCALE", "1")) if dist.get_rank() else 1.0)
    ptdbg.set_dump_switch("OFF")
    dist.barrier()
    dist.destroy_process_group()
