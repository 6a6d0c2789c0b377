"""Watched trainings of two gloo processes, rank 1 of which overflows in step 2; a job of `test_watching_ranks.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import trueup

STEPS, BAD_STEP = 3, 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.exp(self.up(x)))


def batch(bad: bool) -> Tensor:
    return torch.randn(5, 4) * (1e4 if bad else 1.0)


def accumulated(inner: Model, out: Path) -> list[dict[str, object]]:
    """Accumulate over three micro-batches, the first two without communication; the second one overflows on rank 1."""
    model = DistributedDataParallel(inner)

    def step(bad: bool) -> None:
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                model(batch(bad and micro == 1)).square().mean().backward()

    return watched(model, step, out)


def sharded(inner: Model, out: Path) -> list[dict[str, object]]:
    mesh = init_device_mesh("cpu", (2,))
    for layer in (inner.up, inner.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(inner, mesh=mesh)
    return plain(inner, out)


def tensor_parallel(inner: Model, out: Path) -> list[dict[str, object]]:
    mesh = init_device_mesh("cpu", (2,))
    return plain(parallelize_module(inner, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}), out)


def plain(model: Model, out: Path) -> list[dict[str, object]]:
    def step(bad: bool) -> None:
        model(batch(bad)).square().mean().backward()

    return watched(model, step, out)


def watched(model: nn.Module, step: Callable[[bool], None], out: Path) -> list[dict[str, object]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with trueup.watch(model, out) as watch:
        for k in range(STEPS):
            optimizer.zero_grad()
            step(k == BAD_STEP and dist.get_rank() == 1)
            optimizer.step()
    assert watch._session.failure.text is None, watch._session.failure.text
    return [{"step": hit.step, "kind": hit.kind, "name": hit.name, "tensors": hit.tensors} for hit in watch.hits]


def train(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for how in (accumulated, sharded, tensor_parallel):
        torch.manual_seed(0)
        found[how.__name__] = how(Model(), Path(out) / how.__name__)
        dist.barrier()
    Path(out, f"hits-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
