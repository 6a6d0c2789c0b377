"""Write the dumps of ``dumps.tar.xz`` with the real msprobe: run by its own environment, never by the test suite.

    .venv-msprobe/bin/python tests/readers/record_msprobe.py tests/readers/dumps.tar.xz

A language model of two blocks (embedding, causal attention, layer norm, GELU) trains for a step or two, the optimizer outside of
what is dumped, as msprobe's guide has it. The same run is dumped once for each combination of level, task and summary mode that the
reader's tests need, some a second time with a fault. Paths of this machine are replaced in what msprobe wrote, and nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

KINDS = {
    "statistics-L1": ("L1", "statistics", "statistics", 2, 1),
    "statistics-mix": ("mix", "statistics", "statistics", 1, 1),
    "statistics-L0": ("L0", "statistics", "statistics", 1, 1),
    "md5-L1": ("L1", "statistics", "md5", 1, 1),
    "xor-mix": ("mix", "statistics", "xor", 1, 1),
    "tensor-mix": ("mix", "tensor", "statistics", 1, 1),
    "tensor-md5-L0": ("L0", "tensor", "md5", 1, 1),
    "ranks-mix": ("mix", "statistics", "statistics", 2, 2),
    "recompute-mix": ("mix", "statistics", "statistics", 1, 1),
}
"""Name of a dump: level, task, summary mode, steps, ranks."""
FAULTY = ("statistics-mix", "md5-L1", "xor-mix", "tensor-mix")
"""Dumps that exist a second time, ``-fault``: GELU by tanh instead of exactly."""


def main() -> None:
    archive = Path(sys.argv[1])
    if len(sys.argv) > 2:
        record(archive, sys.argv[2])
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in [*KINDS, *(f"{name}-fault" for name in FAULTY)]:  # msprobe is a singleton: a process for each
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            world = KINDS[name.removesuffix("-fault")][-1]
            common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            running = [
                subprocess.Popen(
                    [sys.executable, __file__, scratch, name],
                    env={**common, "RANK": str(rank), "WORLD_SIZE": str(world)},
                    stdout=subprocess.DEVNULL,
                )
                for rank in range(world)
            ]
            if any(process.wait() for process in running):
                raise SystemExit(f"{name} failed")
        anonymise(Path(scratch))
        with tarfile.open(archive, "w:xz") as packed:
            packed.add(scratch, ".", filter=lambda e: e.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False))


def anonymise(folder: Path) -> None:
    """Replace the paths of this machine, which are in call stacks and in one field of dump.json."""
    places = {sys.prefix: "/env", str(Path(__file__).resolve().parent): "/home/user", str(folder): "/data"}
    for path in folder.rglob("*.json"):
        text = path.read_text()
        for place, other in places.items():
            text = text.replace(place, other)
        path.write_text(text)


def build(fault: bool = False, checkpointed: bool = False):
    """Return the model and a batch of token ids; also for a native capture of the same run."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            scores = q @ k.transpose(-1, -2) / 8**0.5
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return self.out(torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(8), Attention()
            self.act = nn.GELU(approximate="tanh" if fault else "none")
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            x = x + self.attn(self.norm(x))
            return self.fc(self.act(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.layers = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(8, 16)

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            return self.head(x)

    return Model(), torch.randint(0, 16, (2, 5))


def loss_of(model, ids):
    import torch

    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).reshape(-1, 16), ids[:, 1:].reshape(-1))


def record(output: Path, name: str) -> None:
    import torch
    from msprobe.pytorch import PrecisionDebugger, seed_all

    fault = name.endswith("-fault")
    kind = name.removesuffix("-fault")
    level, task, summary, steps, world = KINDS[kind]
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "task": task, "dump_path": str(folder), "rank": [], "step": [], "level": level, "async_dump": False,
        task: {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary},
    }  # fmt: skip
    settings = output / f"{name}-{os.environ['RANK']}.json"
    settings.write_text(json.dumps(config))
    seed_all(1234)
    torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group("gloo")

    model, ids = build(fault, checkpointed=kind == "recompute-mix")
    trained = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = (ids + int(os.environ["RANK"])) % 16
    debugger = PrecisionDebugger(str(settings))
    for _ in range(steps):
        debugger.start(model=model)
        loss = loss_of(trained, ids)
        loss.backward()
        if world > 1:
            torch.distributed.all_reduce(loss.detach())
        debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()
    settings.unlink()
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
