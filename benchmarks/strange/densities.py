"""Strangers that learn a density or a motion: a flow, a mixture, an energy, a differential equation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.pictures import drawn
from strange.stranger import AGAIN, ANEW, Steps, stranger
from zoo import images


def patches(width: int, device: str) -> Iterator[Tensor]:
    """Yield batches of runs of pixels, float32 [64, width] in -1..1, again and again."""
    return cycle(batch.flatten(1)[:, : 8 * width].reshape(-1, width).to(device) for batch, _ in images.textures(2, 16))


def minimised(model: nn.Module, cost: Callable[[], Tensor], rate: float = 1e-3) -> Steps:
    """Train by Adam on a cost that fetches its own data."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate, foreach=False)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = cost()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Coupling(nn.Module):
    """Half of the numbers move as the other half says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.net, self.form = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 6)), form

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, -1)
        shift, scale = self.net(kept).float().chunk(2, -1)
        scale = (3.0 if self.form == "scale-bounded-wider" else 2.0) * torch.tanh(scale / 2)
        moved = torch.addcmul(shift, moved, scale.exp()) if self.form == ANEW else moved * scale.exp() + shift
        halves = (kept, moved) if self.form == "halves-not-swapped" else (moved, kept)
        return torch.cat(halves, -1), scale.sum(-1)


class Flow(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers, self.form = nn.ModuleList(Coupling(form) for _ in range(4)), form

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        grown = []
        for layer in self.layers:
            x, one = layer(x)
            grown.append(one)
        if self.form == ANEW:
            return x, torch.stack(grown).sum(0)
        return x, sum(grown[:-1] if self.form == "last-volume-lost" else grown, torch.zeros_like(grown[0]))


@stranger(
    "flow", "Runs of pixels moved onto a normal density by coupling layers",
    {
        "scale-bounded-wider": Place("mul|tanh", scope=r"layers\.0"),
        "halves-not-swapped": Place("cat", scope=r"layers\.0"),
        "last-volume-lost": Place("add|sum|sub", scope=""),
        "density-in-bfloat16": Place("bfloat16|to|square|pow|mul|sum|add", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def flow(form: str, device: str) -> Steps:
    model, source = Flow(form).to(device), patches(6, device)

    def cost() -> Tensor:
        code, grown = model(next(source))
        if form == AGAIN:
            density = D.Normal(torch.zeros_like(code), torch.ones_like(code), validate_args=False).log_prob(code).sum(-1)
        else:
            code = code.bfloat16() if form == "density-in-bfloat16" else code
            density = (-0.5 * code.square() - 0.5 * math.log(2 * math.pi)).sum(-1).float()
        return -(density + grown).mean()

    return minimised(model, cost)


class Guess(nn.Module):
    """Weights, means and deviations of three normal densities for the pixel after seven others."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.body, self.head, self.form = nn.Sequential(nn.Linear(7, 32), nn.ReLU()), nn.Linear(32, 9), form

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, mean, spread = self.head(self.body(x)).float().chunk(3, -1)
        if self.form == ANEW:
            return weights, mean, torch.log(1 + torch.exp(spread)) + 1e-2
        return weights, mean, F.softplus(spread) + 1e-2


@stranger(
    "mixture-density", "A pixel guessed as a mixture of normal densities",
    {
        "weights-not-normalised": Place("log_softmax|add|sub", scope=""),
        "deviation-as-variance": Place("sqrt|div|log", scope=""),
        "weights-over-batch": Place("log_softmax", scope=""),
        "mixture-in-bfloat16": Place("bfloat16|to|logsumexp", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def mixture_density(form: str, device: str) -> Steps:
    model, source = Guess(form).to(device), patches(8, device)

    def cost() -> Tensor:
        x = next(source)
        truth = x[:, 7:]
        weights, mean, spread = model(x[:, :7])
        if form == AGAIN:
            parts = D.Normal(mean, spread, validate_args=False)
            mixed = D.MixtureSameFamily(D.Categorical(logits=weights, validate_args=False), parts, validate_args=False)
            return -mixed.log_prob(truth[:, 0]).mean()
        if form != "weights-not-normalised":
            weights = F.log_softmax(weights, 0 if form == "weights-over-batch" else -1)
        spread = spread.sqrt() if form == "deviation-as-variance" else spread
        each = weights - 0.5 * ((truth - mean) / spread).square() - spread.log() - 0.5 * math.log(2 * math.pi)
        if form == ANEW:
            top = each.amax(-1, keepdim=True).detach()
            return -(top[:, 0] + (each - top).exp().sum(-1).log()).mean()
        each = each.bfloat16() if form == "mixture-in-bfloat16" else each
        return -each.logsumexp(-1).float().mean()

    return minimised(model, cost)


class Energy(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers, self.form = nn.ModuleList((nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 1))), form

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
            x = x * torch.sigmoid(x) if self.form == AGAIN else F.silu(x)
        return self.layers[2](x)[:, 0].float()


@stranger(
    "energy", "Runs of pixels made likelier than samples that walk downhill in noise",
    {
        "noise-twice-as-loud": Place("mul|add", scope=""),
        "walk-uphill": Place("add|sub|mul|neg", scope=""),
        "walk-not-bounded": Place("clamp|add|sub", scope=""),
        "samples-not-kept": Place(scope="", step=1),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def energy(form: str, device: str) -> Steps:
    model, source = Energy(form).to(device), patches(16, device)
    noises = cycle(drawn(64, 16, seed=k).to(device) for k in range(8))
    kept = drawn(64, 16, seed=9).to(device)
    loud = 0.1 if form == "noise-twice-as-loud" else 0.05

    def walked(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.detach().requires_grad_()
            if form == ANEW:
                (slope,) = torch.autograd.grad(model(x), x, torch.ones(len(x), device=x.device))
                x = torch.minimum(torch.maximum(x - 0.5 * slope + loud * next(noises), -torch.ones_like(x)), torch.ones_like(x))
                continue
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            x = x + 0.5 * slope if form == "walk-uphill" else x - 0.5 * slope
            x = x + loud * next(noises)
            x = x if form == "walk-not-bounded" else x.clamp(-1, 1)
        return x.detach()

    def cost() -> Tensor:
        sample = walked(kept)
        if form != "samples-not-kept":
            kept.copy_(sample)
        real, made = model(next(source)), model(sample)
        return real.mean() - made.mean() + 0.1 * (real.square() + made.square()).mean()

    return minimised(model, cost)


class Motion(nn.Module):
    """A velocity field, integrated by four steps of Runge and Kutta."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inlet, self.outlet, self.form = nn.Linear(3, 24), nn.Linear(24, 2), form

    def speed(self, x: Tensor, time: float) -> Tensor:
        time = 0.0 if self.form == "time-stands-still" else time
        if self.form == AGAIN:
            moment = torch.full((len(x), 1), time, device=x.device)
            return self.outlet(torch.tanh(self.inlet(torch.hstack((x, moment))))).float()
        moment = x.new_zeros(len(x), 1) + time
        return self.outlet(torch.tanh(self.inlet(torch.cat((x, moment), -1)))).float()

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for k in range(4):
            t = h * k
            one = self.speed(x, t)
            two = self.speed(torch.add(x, one, alpha=h / 2) if self.form == ANEW else x + h / 2 * one, t + h / 2)
            three = self.speed(x + (h if self.form == "third-slope-too-far" else h / 2) * two, t + h / 2)
            four = self.speed(x + h * three, t + h)
            if self.form == AGAIN:
                shares = torch.tensor([1.0, 2.0, 2.0, 1.0], device=x.device) * (h / 6)
                x = x + torch.einsum("k,kbd->bd", shares, torch.stack((one, two, three, four))).float()
            elif self.form == "last-slope-lost":
                x = x + h / 6 * (one + 2 * two + 2 * three)
            else:
                x = x + h / 6 * (one + 2 * two + (3 if self.form == "third-slope-thrice" else 2) * three + four)
        return x


@stranger(
    "motion", "Points on a spiral moved by a velocity field, integrated by fixed steps",
    {
        "third-slope-too-far": Place("add|mul", scope=""),
        "third-slope-thrice": Place("add|mul", scope=""),
        "last-slope-lost": Place("add|mul", scope=""),
        "time-stands-still": Place("add|cat|new_zeros|zeros", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def motion(form: str, device: str) -> Steps:
    model, angle = Motion(form).to(device), torch.linspace(0, 6, 65, device=device)
    points = torch.stack((angle.cos(), angle.sin()), -1) * (1 + angle[:, None] / 4)

    def cost() -> Tensor:
        return F.mse_loss(model(points[:-1]), points[1:])

    return minimised(model, cost, 1e-2)
