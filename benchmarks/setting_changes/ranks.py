"""The PyTorch model on two ranks, under DistributedDataParallel and gloo, as torchrun starts them."""

from __future__ import annotations

import contextlib
import os
import traceback
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import trueup
from setting_changes.network import Network, data, load, loss, optimizer, step
from setting_changes.options import Options

WORLD = 2


def train(options: Options) -> None:
    """Train for two epochs, on a half of the data."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision(options.precision)
    model = Network(options)
    if options.checkpoint:
        load(model, options.checkpoint)
    if options.half:
        model.to(torch.bfloat16)
    parallel = DistributedDataParallel(model)
    parallel.train(options.trains)
    every = data(options)
    sampler = torch.utils.data.DistributedSampler(every, seed=options.order, drop_last=options.drop_last)
    batches = torch.utils.data.DataLoader(every, options.batch // 2, sampler=sampler, drop_last=options.drop_last)
    updates = optimizer(model, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(updates, 0.9)
    if options.draws:
        torch.rand(options.draws)
    for tokens, labels in batches:
        pieces = list(zip(tokens.chunk(options.micro), labels.chunk(options.micro), strict=True))
        for at, (some, their) in enumerate(pieces):
            waits = parallel.no_sync() if at + 1 < len(pieces) else contextlib.nullcontext()
            with waits, torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
                lost = loss(parallel(some), their, options)
                if options.divides and options.micro > 1:
                    lost = lost / options.micro
                (lost if options.scale == 1 else lost * options.scale).backward()
        step(model, updates, schedule, options)


def record(options: Options, into: Path) -> None:
    """Train both ranks under capture, each in a process."""
    store = into.with_name(f"{into.name}.store")
    store.unlink(missing_ok=True)
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            try:
                _rank(options, into, rank, store)
                os._exit(0)
            except BaseException:  # noqa: BLE001 - the parent says that it failed
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]  # all are waited for
    if any(ended):
        raise RuntimeError("a rank failed")


def _rank(options: Options, into: Path, rank: int, store: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    with trueup.capture(into, on_error="stop"):
        distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD)
        train(options)
    distributed.destroy_process_group()
