"""Strangers that solve for something: a layer at its fixed point, forces of an energy, the motion between two pictures."""

from __future__ import annotations

from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.densities import minimised
from strange.pictures import drawn, grey
from strange.stranger import AGAIN, ANEW, Steps, stranger
from zoo import images


class Still(nn.Module):
    """A layer applied until nothing moves; its gradient is solved for in the same way (Bai et al. 2019)."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inlet, self.turn, self.norm, self.form = nn.Linear(48, 24), nn.Linear(24, 24), nn.LayerNorm(24), form
        with torch.no_grad():
            self.turn.weight.mul_(0.5)

    def once(self, state: Tensor, given: Tensor) -> Tensor:
        if self.form == AGAIN:
            moved = torch.addmm(given, state.to(given.dtype), self.turn.weight.t().to(given.dtype)) + self.turn.bias.to(given.dtype)
        else:
            moved = self.turn(state) + given
        return 0.5 * state + 0.4 * (torch.sigmoid(2 * moved) * 2 - 1 if self.form == ANEW else torch.tanh(moved)).float()

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(self.inlet(x)) if self.form != "inlet-not-levelled" else self.inlet(x)
        with torch.no_grad():
            state = torch.zeros(len(x), 24, device=x.device)
            for _ in range(12):
                state = self.once(state, given)
        if self.form == "state-from-before":
            state = 0.9 * state
        state = self.once(state, given)
        if self.form == "gradient-not-solved" or not state.requires_grad:
            return state
        before = state.detach().requires_grad_()
        after = self.once(before, given.detach())

        def solved(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(2 if self.form == "solved-in-two-rounds" else 8):
                found = torch.autograd.grad(after, before, found, retain_graph=True)[0] + gradient
            return found

        state.register_hook(solved)
        return state


@stranger(
    "equilibrium", "Textures told apart by a layer at its fixed point, as in a deep equilibrium model",
    {
        "inlet-not-levelled": Place("layer_norm|linear|norm", scope="(norm|inlet)?|0(.norm|.inlet)?"),
        "state-from-before": Place("mul", scope="0"),
        "gradient-not-solved": Place(phase="backward", scope=".*"),
        "solved-in-two-rounds": Place(phase="backward", scope=".*"),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def equilibrium(form: str, device: str) -> Steps:
    model = nn.Sequential(Still(form), nn.Linear(24, 8)).to(device)
    source = cycle([(batch.flatten(1)[:, :48].to(device), label.to(device)) for batch, label in images.textures(2, 16)])

    def cost() -> Tensor:
        pictures, labels = next(source)
        return F.cross_entropy(model(pictures).float(), labels)

    return minimised(model, cost)


class Energy(nn.Module):
    """The energy of atoms by their distances: waves of each, cut off smoothly, through a network for each pair."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.kinds, self.form = nn.Embedding(3, 8), form
        self.pair, self.own = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 8)), nn.Linear(8, 1)

    def forward(self, places: Tensor, kinds: Tensor) -> Tensor:
        count = places.shape[1]
        if self.form == ANEW:
            one, other = torch.triu_indices(count, count, 1, device=places.device)
            one, other = torch.cat((one, other)), torch.cat((other, one))
            far = (places[:, one] - places[:, other]).square().sum(-1).sqrt()
        else:
            apart = places[:, :, None] - places[:, None]
            eye = torch.eye(count, device=places.device)
            apart = apart + eye[..., None]
            far = apart.square().sum(-1).sqrt() if self.form == AGAIN else torch.linalg.vector_norm(apart, dim=-1)
        centres = torch.linspace(0.5, 3, 8, device=places.device)
        waves = torch.exp(-(2.0 if self.form == "waves-narrower" else 1.5) * (far[..., None] - centres).square())
        cut = 0.5 * (torch.cos(torch.pi * far / 3) + 1) * (far < 3)
        if self.form == "not-cut-off":
            cut = (far < 3).float()
        named = self.kinds(kinds)
        if self.form == ANEW:
            told = torch.cat((waves, named[:, other]), -1)
            each = self.pair(told).float() * cut[..., None]
            heard = torch.zeros(len(places), count, 8, device=places.device).index_add(1, one, each)
        else:
            told = torch.cat((waves, named[:, None].expand(-1, count, -1, -1)), -1)
            mask = 1 - torch.eye(count, device=places.device)
            heard = (self.pair(told).float() * (cut * mask)[..., None]).sum(2)
        if self.form == "mean-for-sum":
            heard = heard / count
        return self.own(named.float() + heard)[..., 0].float().sum(1)


@stranger(
    "forces", "The energy of atoms and their forces, its slope, learned together",
    {
        "waves-narrower": Place("mul|exp", scope=""),
        "not-cut-off": Place("mul|add|cos|to|float", scope=""),
        "mean-for-sum": Place("div|add", scope=""),
        "force-points-uphill": Place("neg|sub|mse_loss|mul", scope="", phase="forward|backward"),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def forces(form: str, device: str) -> Steps:
    model = Energy(form).to(device)
    grid = torch.stack(torch.meshgrid(*[torch.arange(2.0)] * 3, indexing="ij"), -1).view(-1, 3)[:6] * 1.3
    places, kinds = (grid + 0.2 * drawn(4, 6, 3, seed=101)).to(device), torch.tensor([0, 1, 2, 0, 1, 2]).expand(4, 6).to(device)
    pulled, deep = drawn(4, 6, 3, seed=102).to(device), drawn(4, seed=103).to(device)

    def cost() -> Tensor:
        at = places.clone().requires_grad_()
        energy = model(at, kinds)
        if form == AGAIN:
            slope = torch.autograd.grad(energy, at, torch.ones_like(energy), create_graph=True)[0]
        else:
            slope = torch.autograd.grad(energy.sum(), at, create_graph=True)[0]
        far = slope - pulled if form == "force-points-uphill" else pulled + slope if form == AGAIN else -slope - pulled
        return F.mse_loss(energy, deep) + 5 * (far.square().mean() if form != ANEW else F.mse_loss(-slope, pulled))

    return minimised(model, cost)


class Moved(nn.Module):
    """How far each place of a picture has moved, by how alike the surroundings are in the next one."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.see, self.form = nn.Conv2d(1, 8, 3, padding=1), form
        self.guess = nn.Sequential(nn.Conv2d(9, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.see(first), self.see(second)
        if self.form == AGAIN:
            around = F.unfold(b, 3, padding=1).unflatten(1, (8, 9)).unflatten(3, b.shape[2:])
            alike = torch.einsum("bchw,bcnhw->bnhw", a, around) / 8
        else:
            wide = F.pad(b, (1, 1, 1, 1))
            shifts = [wide[:, :, i : i + a.shape[2], j : j + a.shape[3]] for i in range(3) for j in range(3)]
            alike = torch.stack([(a * shift).mean(1) for shift in shifts], 1)
        return self.guess(F.leaky_relu(alike, 0.1)).float()


@stranger(
    "optical-flow", "The motion between two pictures, by what is left when one is moved onto the other",
    {
        "axes-swapped": Place("getitem|stack|flip|unbind|add", scope=""),
        "corners-not-aligned": Place("grid_sample|grid_sampler|upsample", scope=""),
        "smoothness-squared": Place("square|abs|pow|mean", scope=""),
        "edge-repeated": Place("grid_sample|grid_sampler", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def optical_flow(form: str, device: str) -> Steps:
    model, source = Moved(form).to(device), cycle([batch.to(device) for batch in grey(16)])
    line = torch.linspace(-1, 1, 16, device=device)
    base = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)

    def brought(picture: Tensor, motion: Tensor) -> Tensor:
        moved = motion.permute(0, 2, 3, 1) * 2 / 15
        grid = base + (moved.flip(-1) if form == "axes-swapped" else moved)
        if form == ANEW:
            at = (grid + 1) * 7.5
            low = at.floor()
            x, y = (at - low).unbind(-1)
            found: Tensor = torch.zeros_like(picture[:, 0])
            for dy in (0, 1):
                for dx in (0, 1):
                    column, row = (low[..., 0] + dx).long(), (low[..., 1] + dy).long()
                    there = ((column >= 0) & (column < 16) & (row >= 0) & (row < 16)).float()
                    rows = torch.arange(len(picture), device=device)[:, None, None]
                    value = picture[rows, 0, row.clamp(0, 15), column.clamp(0, 15)]
                    found = found + value * there * (x if dx else 1 - x) * (y if dy else 1 - y)
            return found[:, None]
        padding = "border" if form == "edge-repeated" else "zeros"
        return F.grid_sample(picture, grid, padding_mode=padding, align_corners=form != "corners-not-aligned")

    def cost() -> Tensor:
        first = next(source)
        second = first.roll((1, 1), (2, 3))
        motion = model(first, second)
        left = ((brought(second, motion) - first).square() + 1e-6).sqrt().mean()
        steps = motion.diff(dim=3), motion.diff(dim=2)
        if form == AGAIN:
            steps = motion[..., 1:] - motion[..., :-1], motion[..., 1:, :] - motion[..., :-1, :]
        rough = sum((each.square() if form == "smoothness-squared" else each.abs()).mean() for each in steps)
        return left + 0.1 * rough

    return minimised(model, cost)
