"""Strangers that read by attention: a masked autoencoder, a detector that matches sets, a speaker that learns preferences."""

from __future__ import annotations

import copy
import itertools
import math
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.densities import minimised
from strange.pictures import drawn, grey
from strange.stranger import AGAIN, ANEW, Steps, stranger
from zoo import images, text

WIDTH, HEADS = 32, 4


class Reading(nn.Module):
    """Attention of four heads over the same words, or over others."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.ask, self.tell = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.form = nn.Linear(WIDTH, WIDTH), form

    def forward(self, x: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.ask(x)
        if self.form == ANEW:
            k, v = (F.linear(other, w, b) for w, b in zip(self.tell.weight.chunk(2), self.tell.bias.chunk(2), strict=True))
        else:
            k, v = self.tell(other).chunk(2, -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        scale = WIDTH**-0.5 if self.form == "scaled-by-whole-width" else (WIDTH // HEADS) ** -0.5
        if self.form == AGAIN:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
            scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
            read = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1).to(v.dtype), v)
        else:
            read = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return self.out(read.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Reading(form)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm1(x)
        x = x + self.attention(read, read)
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Masked(nn.Module):
    """A quarter of a picture's patches is read; the rest is guessed from where it stands."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.patch, self.form = nn.Conv2d(3, WIDTH, 4, 4), form
        self.places = nn.Parameter(0.1 * drawn(16, WIDTH, seed=81))
        self.encoder = nn.Sequential(Block(form), Block(form), nn.LayerNorm(WIDTH))
        self.blank, self.again = nn.Parameter(0.1 * drawn(WIDTH, seed=82)), nn.Parameter(0.1 * drawn(16, WIDTH, seed=83))
        self.decoder, self.paint = Block(form), nn.Linear(WIDTH, 48)

    def patches(self, pictures: Tensor) -> Tensor:
        if self.form == AGAIN:
            return F.linear(cut(pictures), self.patch.weight.flatten(1), self.patch.bias)
        return self.patch(pictures).flatten(2).transpose(1, 2)

    def forward(self, pictures: Tensor, order: Tensor) -> Tensor:
        """``order`` [pictures, 16] shuffles the patches; the first four are read."""
        back, x = order.argsort(1), self.patches(pictures)
        kept = order[:, :4, None].expand(-1, -1, WIDTH)
        if self.form == "places-of-the-unshuffled":
            x = x.gather(1, kept) + self.places[:4]
        elif self.form == ANEW:
            x = x.gather(1, kept) + self.places[order[:, :4]]
        else:
            x = (x + self.places).gather(1, kept)
        x = self.encoder(x).float()
        if self.form == ANEW:
            x = self.blank.expand(len(x), 16, -1).scatter(1, kept, x)
        else:
            x = torch.cat((x, self.blank.expand(len(x), 12, -1)), 1)
            back = order if self.form == "restored-by-the-shuffle" else back
            x = x.gather(1, back[..., None].expand(-1, -1, WIDTH))
        return self.paint(self.decoder(x + self.again)).float()


def cut(pictures: Tensor) -> Tensor:
    """Cut pictures [n, 3, 16, 16] into patches [n, 16, 48]."""
    return F.unfold(pictures, 4, stride=4).transpose(1, 2)


@stranger(
    "masked-autoencoder", "The patches of a picture that were left out, guessed from a quarter of them",
    {
        "scaled-by-whole-width": Place("attention|mul|matmul", scope=r"encoder\.0\.attention"),
        "restored-by-the-shuffle": Place("gather|getitem", scope=""),
        "places-of-the-unshuffled": Place("add|gather|getitem|slice", scope=""),
        "deviation-unbiased": Place("var|std|div|sqrt|add", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def masked_autoencoder(form: str, device: str) -> Steps:
    model, source = Masked(form).to(device), cycle([batch.to(device) for batch, _ in images.textures(2, 16)])
    chance = torch.Generator().manual_seed(6)

    def cost() -> Tensor:
        pictures, order = next(source), torch.rand(8, 16, generator=chance).argsort(1).to(device)
        wanted = cut(pictures)
        mean, spread = wanted.mean(-1, keepdim=True), wanted.var(-1, keepdim=True, unbiased=form == "deviation-unbiased")
        if form == AGAIN:
            spread = wanted.square().mean(-1, keepdim=True) - mean.square()
        wanted, far = (wanted - mean) / (spread + 1e-3).sqrt(), model(pictures, order)
        if form == ANEW:
            left = order[:, 4:, None].expand(-1, -1, 48)
            return F.mse_loss(far.gather(1, left), wanted.gather(1, left))
        hidden = (order.argsort(1) >= 4).float()
        return ((far - wanted).square().mean(-1) * hidden).sum() / hidden.sum()

    return minimised(model, cost)


def corners(boxes: Tensor, form: str) -> Tensor:
    """Turn centre and size into corners."""
    centre, size = boxes.split(2, -1)
    half = size if form == "size-not-halved" else size / 2
    return torch.cat((centre - half, centre + half), -1)


def overlap(one: Tensor, other: Tensor, form: str) -> Tensor:
    """Generalised overlap of pairs of boxes by corners (Rezatofighi et al. 2019)."""
    if form == AGAIN:
        x1, y1, x2, y2 = one.unbind(-1)
        u1, v1, u2, v2 = other.unbind(-1)
        shared = F.relu(torch.minimum(x2, u2) - torch.maximum(x1, u1)) * F.relu(torch.minimum(y2, v2) - torch.maximum(y1, v1))
        both = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - shared
        around = (torch.maximum(x2, u2) - torch.minimum(x1, u1)) * (torch.maximum(y2, v2) - torch.minimum(y1, v1))
        return shared / both + both / around - 1
    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    both = (one[..., 2:] - one[..., :2]).prod(-1) + (other[..., 2:] - other[..., :2]).prod(-1) - shared
    if form == "hull-left-out":
        return shared / both
    low, high = torch.minimum(one[..., :2], other[..., :2]), torch.maximum(one[..., 2:], other[..., 2:])
    around = (high - low).prod(-1)
    return shared / both - (around - both) / around


class Matching(nn.Module):
    """Six questions about a picture, each answered by a class and a box, as in DETR."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, WIDTH, 3, 2, 1))
        self.places, self.queries = nn.Parameter(0.3 * drawn(16, WIDTH, seed=84)), nn.Parameter(drawn(6, WIDTH, seed=85))
        self.inner, self.across, self.norm1, self.norm2 = Reading(form), Reading(form), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.kind, self.box = nn.Linear(WIDTH, 3), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.see(pictures).flatten(2).transpose(1, 2) + self.places
        asked = self.queries.expand(len(pictures), -1, -1)
        asked = self.norm1(asked + self.inner(asked, asked))
        asked = self.norm2(asked + self.across(asked, seen))
        return self.kind(asked).float(), self.box(asked).float().sigmoid()


@stranger(
    "set-detection", "Boxes on textures, matched to what was asked by the cheapest assignment, as in DETR",
    {
        "hull-left-out": Place("div|sub|neg|rsub", scope=""),
        "size-not-halved": Place("div|mul|split|sub", scope=""),
        "weight-of-nothing-lost": Place("cross_entropy|nll_loss", scope=""),
        "divided-by-the-questions": Place("div|sum|mean", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def set_detection(form: str, device: str) -> Steps:
    model, source = Matching(form).to(device), cycle([batch.to(device) for batch in grey(16)])
    chance = torch.Generator().manual_seed(8)
    truth = torch.rand(8, 2, 4, generator=chance) * 0.3 + torch.tensor([0.3, 0.3, 0.1, 0.1])
    truth, kinds = truth.to(device), torch.randint(2, (8, 2), generator=chance).to(device)
    weight = torch.tensor([1.0, 1.0, 1.0 if form == "weight-of-nothing-lost" else 0.1], device=device)

    def matched(costs: Tensor) -> tuple[list[int], list[int]]:
        if form == ANEW:
            best = min(itertools.permutations(range(6), 2), key=lambda pair: float(costs[pair[0], 0] + costs[pair[1], 1]))
            return zip(*sorted((query, k) for k, query in enumerate(best)), strict=True)
        from scipy.optimize import linear_sum_assignment  # here, for it takes half a second, in each worker that collects the tests

        queries, targets = linear_sum_assignment(costs.numpy())
        return queries.tolist(), targets.tolist()

    def cost() -> Tensor:
        scores, boxes = model(next(source))
        with torch.no_grad():
            near = (boxes[:, :, None] - truth[:, None]).abs().sum(-1)
            costs = (5 * near - scores.softmax(-1).gather(2, kinds[:, None].expand(-1, 6, -1))).cpu()
        rows, queries, targets = [], [], []
        for row in range(8):
            query, target = matched(costs[row])
            rows, queries, targets = rows + [row] * 2, queries + list(query), targets + list(target)
        wanted = torch.full((8, 6), 2, device=device)
        wanted[rows, queries] = kinds[rows, targets]
        found, true = boxes[rows, queries], truth[rows, targets]
        if form == ANEW:
            each = weight[wanted]
            named = -(each * scores.log_softmax(-1).gather(2, wanted[..., None])[..., 0]).sum() / each.sum()
        else:
            named = F.cross_entropy(scores.transpose(1, 2), wanted, weight)
        over = overlap(corners(found, form), corners(true, form), form)
        count = 48 if form == "divided-by-the-questions" else 16
        return named + 5 * (found - true).abs().sum() / count + 2 * (1 - over).sum() / count

    return minimised(model, cost)


class Turned(nn.Module):
    """Causal attention whose queries and keys are turned by their places."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inlet, self.out, self.form = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False), form

    def turned(self, x: Tensor) -> Tensor:
        half = WIDTH // HEADS // 2
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * 100.0 ** -(torch.arange(half, device=x.device) / half)
        a, b = x.float().chunk(2, -1)
        if self.form == AGAIN:
            spun = torch.view_as_complex(torch.stack((a, b), -1)) * torch.polar(torch.ones_like(angles), angles)
            return torch.view_as_real(spun).transpose(-1, -2).flatten(-2).to(x.dtype)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inlet(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.out(read.transpose(1, 2).flatten(2))


class Swish(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 48, bias=False) for _ in range(2))
        self.down, self.form = nn.Linear(48, WIDTH, bias=False), form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == ANEW:
            gate, up = F.linear(x, torch.cat((self.gate.weight, self.up.weight))).chunk(2, -1)
            return self.down(gate * torch.sigmoid(gate) * up)
        gate = self.gate(x)
        return self.down((F.gelu(gate) if self.form == "gated-by-gelu" else F.silu(gate)) * self.up(x))


class Speaker(nn.Module):
    """Words, and the chances of the next one by the same table of words."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.words, self.form = nn.Embedding(len(text.vocabulary()), WIDTH), form
        layers = ((nn.RMSNorm(WIDTH), Turned(form), nn.RMSNorm(WIDTH), Swish(form)) for _ in range(2))
        self.layers = nn.ModuleList(map(nn.ModuleList, layers))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for before, attention, between, swish in self.layers:
            x = x + attention(before(x))
            x = x + swish(between(x))
        return self.norm(x) @ self.words.weight.t() / math.sqrt(WIDTH)


@stranger(
    "preference", "Sentences of the text preferred to shuffled ones, against a frozen copy, as in DPO",
    {
        "gated-by-gelu": Place("gelu|silu", scope=r"(Speaker\.)?layers\.0\.3"),  # the frozen copy goes first
        "padding-counted": Place("ne|and|mul", scope=""),
        "logs-averaged": Place("div|mean|sum", scope=""),
        "reference-left-out": Place("sub|mul", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def preference(form: str, device: str) -> Steps:
    model = Speaker(form).to(device)
    frozen = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        frozen.words.weight.mul_(0.9)
    source, chance = cycle(text.batches(2, 6)), torch.Generator().manual_seed(9)

    def logs(speaker: nn.Module, tokens: Tensor) -> Tensor:
        """Return the log chance of each sentence after its first three words."""
        scores, wanted = speaker(tokens)[:, :-1].float(), tokens[:, 1:]
        if form == AGAIN:
            each = -F.cross_entropy(scores.transpose(1, 2), wanted, reduction="none")
        elif form == ANEW:
            each = scores.gather(2, wanted[..., None])[..., 0] - scores.logsumexp(-1)
        else:
            each = scores.log_softmax(-1).gather(2, wanted[..., None])[..., 0]
        counted = wanted != (-1 if form == "padding-counted" else text.PAD)
        counted = counted & (torch.arange(wanted.shape[1], device=device) >= 2)
        total = (each * counted).sum(-1)
        return total / counted.sum(-1) if form == "logs-averaged" else total

    def cost() -> Tensor:
        rows = [text.ids(sentence)[: 7 + k] for k, sentence in enumerate(next(source))]
        better = text.padded(rows, text.PAD).to(device)
        mixed = [[*row[:3], *(row[3 + k] for k in torch.randperm(len(row) - 3, generator=chance).tolist())] for row in rows]
        worse = text.padded(mixed, text.PAD).to(device)
        if form == AGAIN:
            both = torch.cat((better, worse))
            with torch.no_grad():
                base = logs(frozen, both)
            good, bad = (logs(model, both) - base).chunk(2)
            return F.softplus(-0.1 * (good - bad)).mean()
        with torch.no_grad():
            old = logs(frozen, better) - logs(frozen, worse)
        new = logs(model, better) - logs(model, worse)
        return -F.logsigmoid(0.1 * (new if form == "reference-left-out" else new - old)).mean()

    return minimised(model, cost)
