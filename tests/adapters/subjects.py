"""Small models in training, one for each thing that has broken observers before: `build("tied", "npu").step()`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo

WIDTH = 12


class InPlace(nn.Module):
    """In-place ReLU right after a hooked module, and after a residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        out = self.body(x)
        out += x
        return self.head(self.relu(out).mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Checkpointed(nn.Module):
    """Modules and a bare function re-run in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inlet, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])

    def tail(self, x: Tensor) -> Tensor:
        return torch.tanh(x).mul(2.0).exp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(self.tail, x, use_reentrant=self.reentrant)


class Keywords(nn.Module):
    """Keyword arguments in, a dict out, tensors inside lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor, extra: dict[str, list[Tensor]], module: str = "") -> dict[str, Tensor]:
        y = self.inner(x)
        return {"y": y, "z": y * extra["scale"][0]}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keywords = Keywords()

    def forward(self, x: Tensor) -> Tensor:
        out = self.keywords(x=x, extra={"scale": [x.detach()]}, module="a name of ours")
        return out["y"] + out["z"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).tanh())


class Cube(torch.autograd.Function):
    """A user's own function, with api calls in its forward and its backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        return x.pow(power)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * 3 * torch.square(x), None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.inner(x), 3)


class Sequences(nn.Module):
    """Recurrent and attention layers of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gru(self.lstm(x)[0])[0]
        return self.encoder(self.attention(x, x, x, need_weights=False)[0])


@dataclass
class Subject:
    """The same interface as the zoo's `Training`; ``micro`` batches are accumulated before each optimizer step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[], Tensor]
    micro: int = 1
    autocast: str | None = None

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        losses = []
        for _ in range(self.micro):
            with torch.autocast(self.autocast, torch.bfloat16) if self.autocast else contextlib.nullcontext():
                out = self.model(self.batch())
                loss = out.float().square().mean() / self.micro
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return torch.stack(losses)


def numbers(*shape: int) -> Callable[[str], Callable[[], Tensor]]:
    return lambda device: lambda: torch.randn(*shape).to(device)


def words(device: str) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 11, (2, 5)).to(device)


ROWS = numbers(3, 4, WIDTH)

SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[str], Callable[[], Tensor]], int, bool]] = {
    "in-place": (InPlace, numbers(2, 3, 6, 6), 1, False),
    "checkpoint": (lambda: Checkpointed(reentrant=False), ROWS, 2, False),
    "checkpoint-reentrant": (lambda: Checkpointed(reentrant=True), ROWS, 2, False),
    "autocast": (Block, ROWS, 1, True),
    "autocast-checkpoint": (lambda: Checkpointed(reentrant=False), ROWS, 1, True),
    "accumulation": (Block, ROWS, 3, False),
    "keywords": (Nested, ROWS, 1, False),
    "tied": (Tied, words, 2, False),
    "custom": (Custom, ROWS, 1, False),
    "sequences": (Sequences, ROWS, 1, False),
}
"""Name -> model, batches, micro-batches, autocast."""


def build(name: str, device: str) -> Subject | zoo.Training:
    """Seed everything and build a subject, or a model of the zoo."""
    if name in zoo.MODELS:
        return zoo.build(name, device)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model, batches, micro, autocast = SUBJECTS[name]
    made = model().to(device).train()
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2, foreach=False)
    return Subject(made, optimizer, batches(device), micro, device if autocast else None)
