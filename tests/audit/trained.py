"""A training under autocast with products that stay in float32 and casts that destroy numbers; each an option.

It runs on every processor. An LSTM would not: under autocast oneDNN computes it in bfloat16, and has no such primitive where a
processor lacks AVX-512 (PyTorch 2.13: "could not create a primitive descriptor").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trueup


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.mixer = nn.Linear(32, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.conv = nn.Conv1d(32, 16, 3)
        self.head = nn.Linear(16, 5)
        self.scale, self.positions = 0.0, False
        self.extra: nn.Module | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.mixer(self.embedding(ids)))
        x = self.conv(self.layer(x).transpose(1, 2)).mean(-1)
        if self.extra is not None:
            x = self.extra(x)
        if self.scale:
            (x.float() * self.scale).half()
        if self.positions:
            (torch.arange(300) + ids.sum()).to(torch.bfloat16)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


def line(text: str) -> str:
    """Where a line of this file is, as reports say it."""
    number = next(n for n, one in enumerate(Path(__file__).read_text().splitlines(), 1) if text in one)
    return f"audit/trained.py:{number} in forward"


def train(path: Path, *, amp: bool, steps: int = 2, level: Any = None, net: Net | None = None, **options: Any) -> Path:
    torch.manual_seed(0)
    net = Net() if net is None else net
    for name, value in options.items():
        setattr(net, name, value)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trueup.capture(path, model=net, on_error="stop", **({} if level is None else {"level": level})):
        for _ in range(steps):
            ids = torch.randint(0, 50, (4, 12))
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                out = net(ids)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path
