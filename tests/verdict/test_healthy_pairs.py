"""Pairs that people port and that are right: none is blamed. Beside each a twin with a fault in the same place, which is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trueup

Capture = Callable[[str, str], Path]  # what is computed, by name, and the level


class ByHand(nn.Module):  # type: ignore[misc]
    """A batch norm without running statistics, and one of the library beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        apart = x - x.mean((0, 2, 3), keepdim=True)
        normed = apart / (apart.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
        return normed * self.weight[:, None, None] + self.bias[:, None, None]


def pictures(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a convolution with a bias before a batch norm, of which the bias is lost."""
    norm = nn.BatchNorm2d(8, track_running_stats=False) if kind == "library" else ByHand(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return model, lambda model: F.cross_entropy(model(torch.rand(6, 3, 8, 8)), torch.randint(0, 5, (6,)))


def half(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a model under autocast, or with the casts that it makes written by hand around a layer norm in float32."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 10))
    dtype = torch.float16 if kind == "float16" else torch.bfloat16

    def loss(model: nn.Module) -> Tensor:
        x, y = torch.randn(12, 16), torch.randint(0, 10, (12,))
        if kind in ("float16", "bfloat16"):
            with torch.autocast("cpu", dtype):
                return F.cross_entropy(model(x), y)
        first, last = model[0], model[3]
        hidden = F.linear(x.to(dtype), first.weight.to(dtype), first.bias.to(dtype)).tanh().float()
        hidden = model[2](hidden) if kind == "by hand" else F.layer_norm(hidden, (32,), model[2].weight, eps=0.2)
        return F.cross_entropy(F.linear(hidden.to(dtype), last.weight.to(dtype), last.bias.to(dtype)).float(), y)

    return model, loss


class Product(nn.Linear):  # type: ignore[misc]
    """A linear layer by `einsum`, or with its weights cast by hand."""

    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "einsum":
            return torch.einsum("btd,od->bto", x, self.weight) + self.bias
        return F.linear(x.half(), self.weight.half(), self.bias.half()).float()


def scaled(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    product = Product(16, 16)
    product.kind = kind
    model = nn.Sequential(nn.Linear(8, 16), product, nn.Tanh(), nn.Linear(16, 5))

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = model(torch.randn(4, 6, 8)).mean(1)
        return F.cross_entropy(out.float(), torch.randint(0, 5, (4,)))

    return model, loss


class Attention(nn.Module):  # type: ignore[misc]
    """An attention whose three products are linear layers, or written by hand."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.query, self.key, self.value = kind, *(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        layers = self.query, self.key, self.value
        by_hand = self.kind.startswith("einsum")
        q, k, v = (torch.einsum("btd,od->bto", x, of.weight) + of.bias if by_hand else of(x) for of in layers)
        return (q @ k.mT / 4).softmax(-1) @ v


def attending(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a model whose keys have a bias, of which the gradient is rounding alone."""
    dtype = torch.bfloat16 if kind.endswith("bfloat16") else torch.float32
    model = nn.Sequential(nn.Linear(8, 16), Attention(kind), nn.Linear(16, 5)).to(dtype)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(4, 6, 8).to(dtype)).float().mean(1), torch.randint(0, 5, (4,)))

    return model, loss


class Quantised(nn.Module):  # type: ignore[misc]
    """The nearest of some vectors; the gradient goes past them, or is lost."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.book = kind, nn.Embedding(16, 8)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        q = self.book((z[:, None] - self.book.weight).square().sum(-1).argmin(-1))
        loss = F.mse_loss(q, z.detach()) + F.mse_loss(z, q.detach()) / 4
        return (q if self.kind == "lost" else z + (q - z).detach()), loss


def quantised(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = nn.ModuleList([nn.Linear(10, 8), Quantised(kind), nn.Linear(8, 10)])

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(20, 10)
        q, loss = model[1](model[0](x))
        return F.mse_loss(model[2](q), x) + loss

    return model, loss


def integrated(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a model between the steps of an integration, of which the terms are added in one order or another."""
    model, h = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), 0.1

    def loss(model: nn.Module) -> Tensor:
        y = torch.randn(7, 6)
        for _ in range(2):
            first = model(y)
            second = model(y + h / 2 * first)
            third = model(y + h / 2 * second)
            last = model(y + h * third)
            if kind == "in order":
                y = y + h / 6 * (first + 2 * second + 2 * third + last)
            else:
                y = y + h / 6 * (first + last) + h / 3 * (second + third)
        return y.square().mean()

    return model, loss


def copied(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a model whose result is taken apart and put together again many times, or is not: 2**40 ways lead back."""

    def loss(model: nn.Module) -> Tensor:
        made = model(torch.randn(4, 6))
        for _ in range(40 if kind == "often" else 0):
            made = torch.cat((made[:2], made[2:]))
        return made.square().mean()

    return nn.Sequential(nn.Linear(6, 6)), loss


MODELS = {
    "pictures": pictures, "half": half, "scaled": scaled, "attending": attending, "quantised": quantised, "integrated": integrated,
    "copied": copied,
}  # fmt: skip


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Return what trains ``model/kind`` for three steps, each once; ``model/kind/fault`` does something to it before a step."""
    folder = tmp_path_factory.mktemp("healthy")

    def train(name: str, level: str) -> Path:
        into = folder / f"{name.replace('/', '-')}-{level}"
        if into.exists():
            return into
        of, kind, *fault = name.split("/")
        torch.manual_seed(0)
        model, loss = MODELS[of](kind)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=of == "scaled")
        with trueup.capture(into, model=model, level=level):
            for step in range(3):
                torch.manual_seed(step)
                optimizer.zero_grad()
                scaler.scale(loss(model)).backward()
                scaler.unscale_(optimizer)
                with torch.no_grad() if fault else nullcontext():
                    if fault == ["unseen"]:
                        model[1].weight.grad.numpy()[:] *= 1.5
                    if fault == ["scaled"]:
                        model[1].value.weight.grad.mul_(1.5)
                    if fault == ["moved"]:
                        model[-1].bias.data.numpy()[:] += 2e-3
                scaler.step(optimizer)
                scaler.update()
        return into

    return train


@pytest.mark.parametrize(("baseline", "candidate", "level", "verdict"), [
    ("pictures/library", "pictures/hand", "module", "aligned"),
    ("pictures/library", "pictures/hand/moved", "module", "deviates"),
    ("half/bfloat16", "half/by hand", "all", "aligned"),
    ("half/bfloat16", "half/with another epsilon", "all", "deviates"),
    ("half/bfloat16", "half/float16", "all", "aligned"),
    ("half/float16", "half/bfloat16", "all", "deviates"),
    ("scaled/einsum", "scaled/hand", "all", "aligned"),
    ("scaled/einsum", "scaled/hand", "module", "aligned"),
    ("scaled/einsum", "scaled/hand/unseen", "all", "deviates"),
    ("attending/linear bfloat16", "attending/einsum bfloat16", "api", "aligned"),
    ("attending/linear bfloat16", "attending/einsum bfloat16/scaled", "api", "deviates"),
    ("attending/linear", "attending/einsum", "all", "aligned"),
    ("quantised/past", "quantised/lost", "all", "inconclusive"),
    ("copied/never", "copied/often", "all", "aligned"),
    ("integrated/in order", "integrated/grouped", "all", "aligned"),
    ("attending/linear", "attending/einsum/scaled", "all", "deviates"),
])  # fmt: skip
def test_what_is_right_is_not_blamed_and_what_is_wrong_is(
    captured: Capture, baseline: str, candidate: str, level: str, verdict: str
) -> None:
    """A bias before a batch norm has a gradient of rounding alone, of which Adam makes a step; a finer dtype is no fault, and a
    coarser one is; a function that returns nothing wrote what its operators returned."""
    result = trueup.compare(captured(baseline, level), captured(candidate, level))
    assert result.verdict == verdict, result.sentence
    assert verdict != "inconclusive" or "look at what that module returns" in result.sentence
