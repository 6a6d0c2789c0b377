"""Train two steps under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.full((3, 4), 1.0 + dist.get_rank())
for _ in range(2):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
