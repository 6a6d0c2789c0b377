"""Train six steps; in step 2 an overflow, on rank 1 where there are ranks. Says which steps it finished."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.exp(self.up(x) * self.gain))


torch.manual_seed(0)
model = inner = Model()
rank = 0
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
bad = "healthy" not in sys.argv and rank == int("WORLD_SIZE" in os.environ)
for step in range(6):
    inner.gain = 1e4 if bad and step == 2 else 1.0
    loss = model(torch.randn(5, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} finished step {step}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
