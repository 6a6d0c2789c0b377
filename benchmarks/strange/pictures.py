"""Strangers that learn from pictures: diffusion, adversarial, variational, detection, a neural field."""

from __future__ import annotations

import math
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.stranger import AGAIN, Steps, stranger
from zoo import images

STEPS_OF_NOISE = 100


def grey(size: int, count: int = 2) -> list[Tensor]:
    """Return batches of eight grey crops, float32 [8, 1, size, size] in -1..1."""
    return [pictures.mean(1, keepdim=True) for pictures, _ in images.textures(count, size)]


def drawn(*shape: int, seed: int) -> Tensor:
    """Draw normal numbers on the CPU, the same for every device and form."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """Group norm, SiLU and a convolution, twice, with the time added between them."""

    def __init__(self, width: int, form: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.time = nn.Linear(16, width)
        self.form = form

    def active(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) if self.form == AGAIN else F.silu(x)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(self.active(self.norm1(x))) + self.time(time)[:, :, None, None]
        return x + self.conv2(self.active(self.norm2(h)))


class Denoiser(nn.Module):
    """A U-Net of two levels that gets the time as sines."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Conv2d(1, 16, 3, 1, 1), nn.Conv2d(32, 1, 3, 1, 1)
        self.fine, self.coarse, self.deep = (Residual(16, form) for _ in range(3))
        self.down, self.up = nn.Conv2d(16, 16, 3, 2, 1), nn.ConvTranspose2d(16, 16, 4, 2, 1)
        self.form = form

    def sines(self, time: Tensor) -> Tensor:
        longest = 100.0 if self.form == "time-embedding-period" else 10000.0
        rates = torch.exp(-math.log(longest) * torch.arange(8, device=time.device) / 8)
        angles = time[:, None].float() * rates
        return torch.cat((angles.sin(), angles.cos()), -1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        sines = self.sines(time)
        fine = self.fine(self.inlet(x), sines)
        deep = self.deep(self.coarse(self.down(fine), sines), sines)
        return self.outlet(torch.cat((fine, self.up(deep)), 1))


@stranger(
    "diffusion", "A U-Net learns the noise that a schedule mixed into pictures",
    {
        "schedule-not-cumulative": Place("cumprod|prod|getitem|index|sub|sqrt", scope=""),
        "time-embedding-period": Place("exp|mul", scope=""),
    },
)  # fmt: skip
def diffusion(form: str, device: str) -> Steps:
    model = Denoiser(form).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    source = cycle(batch.to(device) for batch in grey(16))
    times, noises = torch.randint(0, STEPS_OF_NOISE, (8,)).to(device), cycle(drawn(8, 1, 16, 16, seed=k).to(device) for k in (0, 1))
    betas = torch.linspace(1e-4, 0.05, STEPS_OF_NOISE).to(device)

    def step() -> Tensor:
        pictures, noise = next(source), next(noises)
        kept = 1 - betas if form == "schedule-not-cumulative" else torch.cumprod(1 - betas, 0)
        share = kept[times][:, None, None, None]
        optimizer.zero_grad()
        loss = F.mse_loss(model(share.sqrt() * pictures + (1 - share).sqrt() * noise, times), noise)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forger = nn.Sequential(
            nn.Linear(16, 16 * 16), nn.Unflatten(1, (16, 4, 4)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(16 * 16, 1),
        )  # fmt: skip


@stranger(
    "adversarial", "A forger of pictures and its judge, with an optimizer each",
    {
        "forgery-not-detached": Place(phase="backward", scope=r"forger.*"),
        "forgeries-softly-labelled": Place("full_like|binary_cross_entropy|softplus|zeros_like|mul|fill", scope=""),
    },
    held_out=True,
)  # fmt: skip
def adversarial(form: str, device: str) -> Steps:
    model = Adversaries().to(device)
    of_judge, of_forger = (
        torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999), foreach=False) for part in (model.judge, model.forger)
    )
    source, seeds = cycle(batch.to(device) for batch in grey(16)), cycle(drawn(8, 16, seed=k).to(device) for k in (0, 1))

    def cost(scores: Tensor, truth: float) -> Tensor:
        if form == AGAIN and truth in (0.0, 1.0):
            return F.softplus(scores if truth == 0.0 else -scores).mean()
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))

    def step() -> Tensor:
        forged = model.forger(next(seeds))
        of_forger.zero_grad()
        of_judge.zero_grad()
        seen = forged if form == "forgery-not-detached" else forged.detach()
        soft = 0.1 if form == "forgeries-softly-labelled" else 0.0
        loss = cost(model.judge(next(source)), 1.0) + cost(model.judge(seen), soft)
        loss.backward(retain_graph=form == "forgery-not-detached")
        of_judge.step()
        fooled = cost(model.judge(model.forger(next(seeds))), 1.0)
        fooled.backward()
        of_forger.step()
        return (loss + fooled).detach()

    return Steps(model, step)


class Bottleneck(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, 16, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(256, 16)
        )
        self.decoder = nn.Sequential(
            nn.Linear(8, 256), nn.GELU(), nn.Unflatten(1, (16, 4, 4)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.GELU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
        )  # fmt: skip
        self.form = form

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logs = self.encoder(x).float().chunk(2, 1)
        spread = logs.exp() if self.form == "variance-for-deviation" else (0.5 * logs).exp()
        return self.decoder(mean + spread * noise), mean, logs


@stranger(
    "variational", "Pictures through a bottleneck of random codes",
    {
        "variance-for-deviation": Place("exp|mul", scope=""),
        "divergence-averaged-over-codes": Place("mean|sum", scope=""),
    },
)  # fmt: skip
def variational(form: str, device: str) -> Steps:
    model = Bottleneck(form).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=False)
    source, noises = cycle(batch.to(device) for batch in grey(16)), cycle(drawn(8, 8, seed=k).to(device) for k in (0, 1))

    def divergence(mean: Tensor, logs: Tensor) -> Tensor:
        if form == AGAIN:
            own = torch.distributions.Normal(mean, (0.5 * logs).exp())
            return torch.distributions.kl_divergence(own, torch.distributions.Normal(torch.zeros_like(mean), 1.0)).sum(1).mean()
        each = -0.5 * (1 + logs - mean.square() - logs.exp())
        return each.mean() if form == "divergence-averaged-over-codes" else each.sum(1).mean()

    def step() -> Tensor:
        pictures = next(source)
        optimizer.zero_grad()
        seen, mean, logs = model(pictures, next(noises))
        loss = F.mse_loss(seen.float(), pictures, reduction="sum") / len(pictures) + divergence(mean, logs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


GRID, SIZES = 4, (6.0, 12.0)


def scenes(count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return pictures [4, 3, 32, 32] with one bright disc each, its box as centre and size [4, 3], and its class [4]."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    found = []
    for pictures, _ in images.textures(count, 32):
        centre = torch.randint(8, 24, (4, 2), generator=generator).float()
        radius = torch.randint(3, 7, (4,), generator=generator).float()
        inside = (rows - centre[:, :1, None]).square() + (columns - centre[:, 1:, None]).square() < radius[:, None, None].square()
        lit = torch.where(inside[:, None], torch.tensor([1.0, -0.5, 0.2])[:, None, None], pictures[:4])
        found.append((lit, torch.cat((centre, 2 * radius[:, None]), 1), (radius > 5).long()))
    return found


class Detector(nn.Module):
    """Scores and box offsets for two sizes of box in each cell of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.MaxPool2d(2),
        )  # fmt: skip
        self.scores, self.boxes = nn.Conv2d(16, 2 * len(SIZES), 1), nn.Conv2d(16, 3 * len(SIZES), 1)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(pictures)
        scores, boxes = (head(x).permute(0, 2, 3, 1) for head in (self.scores, self.boxes))
        return scores.reshape(len(x), -1, 2).float(), boxes.reshape(len(x), -1, 3).float()


def anchors() -> Tensor:
    """Return the centre and size of every box of the grid, float32 [anchors, 3]."""
    places = (torch.arange(GRID) + 0.5) * 32 / GRID
    rows, columns, sizes = torch.meshgrid(places, places, torch.tensor(SIZES), indexing="ij")
    return torch.stack((rows, columns, sizes), -1).reshape(-1, 3)


@stranger(
    "detection", "Discs on textures found by anchors, with focal and smooth losses",
    {
        "focal-weights-swapped": Place("where|mul|rsub|sub|add", scope=""),
        "offsets-not-divided-by-size": Place("div|sub|cat", scope=""),
    },
    held_out=True,
)  # fmt: skip
def detection(form: str, device: str) -> Steps:
    model, boxes_of_grid = Detector().to(device), anchors().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False)
    source = cycle([tuple(each.to(device) for each in scene) for scene in scenes(2)])

    def focal(scores: Tensor, truth: Tensor) -> Tensor:
        heavy = 0.75 if form == "focal-weights-swapped" else 0.25
        weight = torch.where(truth > 0, heavy, 1 - heavy)
        if form == AGAIN:
            right = torch.where(truth > 0, scores, -scores)
            return -(weight * torch.sigmoid(-right).square() * F.logsigmoid(right)).sum()
        chance = torch.sigmoid(scores)
        missed = torch.where(truth > 0, 1 - chance, chance)
        return (weight * missed.square() * F.binary_cross_entropy_with_logits(scores, truth, reduction="none")).sum()

    def step() -> Tensor:
        pictures, boxes, kinds = next(source)
        far = (boxes_of_grid[None, :, :2] - boxes[:, None, :2]).abs().amax(-1)
        hit = (far < 6) & ((boxes_of_grid[None, :, 2] - boxes[:, None, 2]).abs() < 4)
        truth = F.one_hot(kinds, 2)[:, None].float() * hit[..., None]
        scale = torch.ones_like(boxes_of_grid) if form == "offsets-not-divided-by-size" else boxes_of_grid[:, 2:]
        wanted = (boxes[:, None] - boxes_of_grid) / scale
        optimizer.zero_grad()
        scores, offsets = model(pictures)
        count = hit.sum().clamp(min=1)
        off = (F.smooth_l1_loss(offsets, wanted, reduction="none") * hit[..., None]).sum()
        loss = (focal(scores, truth) + off) / count
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Sines(nn.Module):
    """A picture as a function of its coordinates, in layers of sines."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 if k == 0 else 32, 32) for k in range(4))
        self.colour, self.form = nn.Linear(32, 3), form
        for k, layer in enumerate(self.layers):
            bound = 0.5 if k == 0 else math.sqrt(6 / 32) / 30
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, places: Tensor) -> Tensor:
        x = places
        for k, layer in enumerate(self.layers):
            rate = 1.0 if k and self.form == "frequency-in-first-layer-only" else 30.0
            summed = x @ layer.weight.t() + layer.bias if self.form == AGAIN else layer(x)
            x = torch.sin(rate * summed)
        return self.colour(x)


@stranger(
    "neural-field", "A picture as sines of its coordinates",
    {
        "frequency-in-first-layer-only": Place("mul|sin", scope=""),
        "coordinates-not-centred": Place("linear|addmm", scope=r"layers\.0", given=True),
    },
)  # fmt: skip
def neural_field(form: str, device: str) -> Steps:
    model = Sines(form).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    picture = images.textures(1, 16)[0][0][0].permute(1, 2, 0).reshape(-1, 3).to(device)
    along = torch.linspace(0, 1, 16) if form == "coordinates-not-centred" else torch.linspace(-1, 1, 16)
    places = torch.stack(torch.meshgrid(along, along, indexing="ij"), -1).reshape(-1, 2).to(device)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(places).float(), picture)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)
