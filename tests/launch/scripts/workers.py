"""Start two training workers: `workers.py spawn|fork|none [prepare]`; with `none` they join no process group."""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, method: str, store: str) -> None:
    (torch.ones(3) * 7).sum()  # before its rank is known: part of no capture
    if method != "none":
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.full((3, 4), 1.0 + rank)).square().mean()
    loss.backward()
    optimizer.step()
    if method != "none":
        dist.destroy_process_group()


if __name__ == "__main__":
    method, *more = sys.argv[1:]
    if more == ["prepare"]:  # the parent computes, and its records reach the disk before there are workers
        torch.randn(5).sum()
        time.sleep(1.3)
    with tempfile.TemporaryDirectory() as folder:
        start = "spawn" if method == "none" else method
        mp.start_processes(
            work, (method, str(Path(folder) / "store")), nprocs=1 if method == "none" else 2, start_method=start
        )
