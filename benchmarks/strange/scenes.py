"""Strangers that see a scene: tracked through noise, rendered along rays, styled by a code."""

from __future__ import annotations

import math
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.densities import minimised
from strange.pictures import drawn, grey
from strange.stranger import AGAIN, ANEW, Steps, stranger


class Tracker(nn.Module):
    """A Kalman filter whose motion and noises are learned; it returns the negative log likelihood of what was measured."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.motion = nn.Parameter(torch.eye(4) + 0.1 * torch.eye(4).roll(2, 1) + 0.02 * drawn(4, 4, seed=51))
        self.sight, self.form = nn.Parameter(torch.eye(2, 4) + 0.02 * drawn(2, 4, seed=52)), form
        self.shaken, self.blurred = nn.Parameter(torch.full((4,), -3.0)), nn.Parameter(torch.full((2,), -2.0))

    def forward(self, seen: Tensor) -> Tensor:
        state, spread = torch.zeros(len(seen), 4, 1, device=seen.device), torch.eye(4, device=seen.device).expand(len(seen), 4, 4)
        shaken, blurred = torch.diag(self.shaken.exp()), torch.diag(self.blurred.exp())
        total = torch.zeros(len(seen), device=seen.device)
        for one in seen.unbind(1):
            state, spread = self.motion @ state, self.motion @ spread @ self.motion.t()
            if self.form != "motion-without-noise":
                spread = spread + shaken
            far = one[..., None] - self.sight @ state
            across = spread @ self.sight.t()
            doubt = self.sight @ across + blurred
            state, spread, cost = self.corrected(state, spread, far, across, doubt, blurred)
            total = total + cost
        return total.mean()

    def corrected(
        self, state: Tensor, spread: Tensor, far: Tensor, across: Tensor, doubt: Tensor, blurred: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.form == AGAIN:
            factor = torch.linalg.cholesky(doubt)
            white = torch.linalg.solve_triangular(factor, far, upper=False)
            gain = torch.cholesky_solve(across.transpose(1, 2), factor).transpose(1, 2)
            cost = 0.5 * white.square().sum((1, 2)) + factor.diagonal(dim1=1, dim2=2).log().sum(-1) + math.log(2 * math.pi)
            return state + gain @ far, spread - gain @ across.transpose(1, 2), cost
        if self.form == ANEW:
            a, b, c, d = doubt[:, 0, 0], doubt[:, 0, 1], doubt[:, 1, 0], doubt[:, 1, 1]
            size = a * d - b * c
            inverse = torch.stack((d, -b, -c, a), -1).view(-1, 2, 2) / size[:, None, None]
            gain = across @ inverse
            left = torch.eye(4, device=far.device) - gain @ self.sight
            spread = left @ spread @ left.transpose(1, 2) + gain @ blurred @ gain.transpose(1, 2)  # Joseph's form
            cost = 0.5 * ((far.transpose(1, 2) @ inverse @ far)[:, 0, 0] + size.log()) + math.log(2 * math.pi)
            return state + gain @ far, spread, cost
        clear = doubt - blurred + 1e-2 * torch.eye(2, device=far.device)
        gain = across @ torch.linalg.inv(clear if self.form == "gain-trusts-sight" else doubt)
        cost = 0.5 * (far * torch.linalg.solve(doubt, far)).sum((1, 2))
        cost = cost + (1.0 if self.form == "volume-counted-twice" else 0.5) * torch.logdet(doubt) + math.log(2 * math.pi)
        if self.form == "spread-not-corrected":
            return state + gain @ far, spread, cost
        return state + gain @ far, (torch.eye(4, device=far.device) - gain @ self.sight) @ spread, cost


@stranger(
    "tracking", "A point on an ellipse followed through noise by a learned Kalman filter",
    {
        "motion-without-noise": Place("add|matmul|bmm", scope=""),
        "gain-trusts-sight": Place("inv|matmul|bmm|sub|add", scope=""),
        "volume-counted-twice": Place("mul", scope=""),
        "spread-not-corrected": Place("matmul|bmm|sub|mul", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def tracking(form: str, device: str) -> Steps:
    model, angle = Tracker(form).to(device), 0.3 * torch.arange(10) + torch.arange(8)[:, None]
    seen = (torch.stack((angle.cos(), 2 * angle.sin()), -1) + 0.3 * drawn(8, 10, 2, seed=53)).to(device)
    return minimised(model, lambda: model(seen), 1e-2)


class Radiance(nn.Module):
    """How dense a place is, and its colour, from sines of its coordinates."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.body, self.dense, self.colour = nn.Sequential(nn.Linear(27, 48), nn.ReLU()), nn.Linear(48, 1), nn.Linear(48, 3)
        self.form = form

    def encoded(self, x: Tensor) -> Tensor:
        if self.form == AGAIN:
            octaves = math.pi * 2.0 ** torch.arange(4, device=x.device)
            angles = octaves[:, None] * x[..., None, :]
            waves = torch.sin(torch.stack((angles, angles + math.pi / 2), -2))
            return torch.cat((x, waves.flatten(-3)), -1)
        parts = [x]
        for k in range(4):
            pace = math.pi * (k + 1 if self.form == "octaves-in-a-line" else 2**k)
            parts += [torch.sin(pace * x), torch.cos(pace * x)]
        return torch.cat(parts, -1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.body(self.encoded(x))
        return F.softplus(self.dense(inner)[..., 0].float() - 1), torch.sigmoid(self.colour(inner).float())


@stranger(
    "radiance", "Rays through a room that takes on the look of a picture, as in NeRF",
    {
        "octaves-in-a-line": Place("mul", scope=""),
        "light-lost-too-early": Place("cumprod|cat|mul|getitem", scope=""),
        "background-dark": Place("add|mul|sub", scope=""),
        "distance-left-out": Place("mul|neg|exp", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def radiance(form: str, device: str) -> Steps:
    model = Radiance(form).to(device)
    ways = F.normalize(torch.cat((drawn(32, 2, seed=61) / 3, torch.ones(32, 1)), -1), dim=-1)
    depths = torch.linspace(0.1, 1.9, 13)
    middles, steps = (depths[1:] + depths[:-1]) / 2, depths.diff().to(device)
    places = (ways[:, None] * middles[:, None]).to(device)
    source = cycle([(x.flatten()[:96].view(32, 3) / 2 + 0.5).to(device) for x in grey(16)])

    def seen(dense: Tensor, colour: Tensor) -> Tensor:
        if form == ANEW:
            light, found = torch.ones(len(dense), 1, device=dense.device), torch.zeros(len(dense), 3, device=dense.device)
            for k in range(dense.shape[1]):
                left = torch.exp(-dense[:, k, None] * steps[k])
                found, light = found + light * (1 - left) * colour[:, k], light * left
            return found + light
        if form == AGAIN:
            depth = dense * steps
            reached = torch.exp(-(torch.cumsum(depth, -1) - depth))
            weights = reached * -torch.expm1(-depth)
            return torch.einsum("rs,rsc->rc", weights, colour) + (1 - weights.sum(-1, keepdim=True))
        alpha = 1 - torch.exp(-dense if form == "distance-left-out" else -dense * steps)
        reached = torch.cumprod(1 - alpha, -1)
        if form != "light-lost-too-early":
            reached = torch.cat((torch.ones_like(reached[:, :1]), reached[:, :-1]), -1)
        weights = reached * alpha
        found = (weights[..., None] * colour).sum(1)
        return found if form == "background-dark" else found + (1 - weights.sum(-1, keepdim=True))

    def cost() -> Tensor:
        return F.mse_loss(seen(*model(places)), next(source))

    return minimised(model, cost, 3e-3)


class Styled(nn.Module):
    """A convolution whose weights a style scales for each picture, and brings back to length 1."""

    def __init__(self, inward: int, outward: int, form: str) -> None:
        super().__init__()
        self.weight, self.style = nn.Parameter(drawn(outward, inward, 3, 3, seed=71)), nn.Linear(12, inward)
        self.loud, self.form = nn.Parameter(torch.full((), 0.1)), form
        self.register_buffer("noise", drawn(8, 8, seed=72))
        nn.init.ones_(self.style.bias)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        style, weight = self.style(code).float(), self.weight / math.sqrt(self.weight[0].numel())
        if self.form == AGAIN:
            square = weight.square().sum((2, 3))
            back = torch.rsqrt(style.square() @ square.t() + 1e-8).float()
            made = F.conv2d(x * style[:, :, None, None], weight, padding=1).float() * back[:, :, None, None]
        elif self.form == ANEW:
            made = torch.cat([self.one(picture[None], each, weight) for picture, each in zip(x, style, strict=True)])
        else:
            each = weight * style[:, None, :, None, None]
            over = (1, 3, 4) if self.form == "levelled-over-outputs" else (2, 3, 4)
            square = weight[None].square() if self.form == "levelled-before-styled" else each.square()
            each = each * torch.rsqrt(square.sum(over, keepdim=True) + 1e-8)
            folded = x.reshape(1, -1, *x.shape[2:])
            made = F.conv2d(folded, each.flatten(0, 1), padding=1, groups=len(x)).float().view(len(x), -1, *x.shape[2:])
        noise = self.noise if self.form != "noise-not-scaled" else self.noise / self.loud.detach()
        gain = 1.0 if self.form == "gain-lost" else math.sqrt(2)
        return F.leaky_relu(made + self.loud * noise, 0.2) * gain

    def one(self, x: Tensor, style: Tensor, weight: Tensor) -> Tensor:
        own = weight * style[:, None, None]
        return F.conv2d(x, own / (own.flatten(1).square().sum(-1) + 1e-8).sqrt()[:, None, None, None], padding=1).float()


class Painter(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.start, self.layers = nn.Parameter(drawn(8, 8, 8, seed=73)), nn.ModuleList((Styled(8, 12, form), Styled(12, 8, form)))
        self.code, self.paint = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2)), nn.Conv2d(8, 1, 1)

    def forward(self, z: Tensor) -> Tensor:
        code = self.code(z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-8))
        x = self.start[None].repeat(len(z), 1, 1, 1)
        for layer in self.layers:
            x = layer(x, code)
        return self.paint(x).float()


@stranger(
    "styled", "Pictures painted by convolutions that a style modulates, as in StyleGAN2",
    {
        "levelled-before-styled": Place("square|pow|sum|rsqrt", scope=r"layers\.0"),
        "levelled-over-outputs": Place("sum|rsqrt|square", scope=r"layers\.0"),
        "noise-not-scaled": Place("mul|div", scope=r"layers\.0"),
        "gain-lost": Place("mul|leaky_relu", scope=r"layers\.0"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def styled(form: str, device: str) -> Steps:
    model, source = Painter(form).to(device), cycle([x.to(device) for x in grey(8)])
    codes = drawn(8, 6, seed=74).to(device)
    return minimised(model, lambda: F.mse_loss(model(codes), next(source)))
