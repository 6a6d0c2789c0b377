"""Strangers that bring two things together: twins, masses, tags and words, points and shapes, a weight and its worse neighbour."""

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
from zoo import images, text


class Twin(nn.Module):
    """A small convolutional encoder and a projector with batch norm."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.see, self.form = nn.Conv2d(1, 6, 3, 2, 1), form
        self.project = nn.Sequential(nn.Linear(6 * 64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.relu(self.see(x)).flatten(1)).float()


@stranger(
    "twins", "Two views of a picture whose features agree one by one and are unlike among themselves, as in Barlow Twins",
    {
        "not-standardised": Place("div|sub|var|std|mean|mm|matmul|einsum|mul", scope=""),
        "diagonal-counted-twice": Place("mul|add|sum|fill|where|diag", scope=""),
        "weight-of-the-rest": Place("mul", scope=""),
        "batch-not-divided": Place("div|pow|square|sub|mul", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def twins(form: str, device: str) -> Steps:
    model, source = Twin(form).to(device), cycle(batch.to(device) for batch in grey(16))
    weight = 0.01 if form == "weight-of-the-rest" else 0.005

    def standard(x: Tensor) -> Tensor:
        if form == "not-standardised":
            return x
        if form == AGAIN:
            middle = x - x.mean(0, keepdim=True)
            return middle * (middle.square().mean(0, keepdim=True) + 1e-5).rsqrt()
        if form == ANEW:
            return F.batch_norm(x, None, None, training=True, eps=1e-5)
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()

    def cost() -> Tensor:
        picture = next(source)
        a, b = standard(model(picture)), standard(model(picture.flip(-1)))
        count = 1 if form == "batch-not-divided" else len(a)
        c = torch.einsum("ni,nj->ij", a, b) / count if form == AGAIN else a.t() @ b / count
        if form == ANEW:
            diagonal = torch.eye(len(c), dtype=torch.bool, device=device)
            on, off = c[diagonal], c[~diagonal]
            return (on - 1).pow(2).sum() + weight * off.pow(2).sum()
        on = (c.diagonal() - 1).square().sum()
        every = c.square().sum() - (0 if form == "diagonal-counted-twice" else c.diagonal().square().sum())
        return on + weight * every

    return minimised(model, cost)


@stranger(
    "transport", "Features of two batches moved onto each other at the least cost, by Sinkhorn's iteration",
    {
        "cost-not-squared": Place("cdist|sqrt|square|pow|sum|norm|div", scope=""),
        "blur-doubled": Place("div|mul", scope=""),
        "one-side-only": Place("sub|logsumexp|add|mul", scope=""),
        "masses-not-divided": Place("sub|logsumexp|add|log|mul", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def transport(form: str, device: str) -> Steps:
    model = nn.Sequential(nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 6)).to(device)
    pictures = [batch.flatten(1)[:, :48].to(device) for batch, _ in images.textures(4, 16)]
    source, target = cycle(pictures), drawn(16, 6, seed=31).to(device)

    def cost() -> Tensor:
        x = model(next(source)).float()
        if form == AGAIN:
            apart = x.square().sum(1)[:, None] + target.square().sum(1)[None] - 2 * x @ target.t()
        elif form == "cost-not-squared":
            apart = (x[:, None] - target[None]).norm(dim=-1)
        else:
            apart = (x[:, None] - target[None]).square().sum(-1)
        blur = 2.0 if form == "blur-doubled" else 1.0
        count = len(x)
        mine, its = (0.0, 0.0) if form == "masses-not-divided" else (-math.log(count), -math.log(16))
        if form == ANEW:
            kernel, u, v = (-apart / blur).exp(), torch.ones(count, device=device), torch.ones(16, device=device) / 16
            for _ in range(5):
                u = (1 / count) / (kernel @ v)
                v = (1 / 16) / (kernel.t() @ u)
            return (u[:, None] * kernel * v[None] * apart).sum()
        logs = -apart / blur
        f, g = torch.zeros(count, device=device), torch.zeros(16, device=device) - math.log(16)
        for _ in range(5):
            f = mine - torch.logsumexp(logs + g[None], 1)
            if form != "one-side-only":
                g = its - torch.logsumexp(logs + f[:, None], 0)
        return ((logs + f[:, None] + g[None]).exp() * apart).sum()

    return minimised(model, cost)


class Tagger(nn.Module):
    """Words to scores of four tags, and how likely one follows another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.near = nn.Embedding(len(text.vocabulary()), 16), nn.Conv1d(16, 16, 3, padding=1)
        self.out, self.follows = nn.Linear(16, 4), nn.Parameter(drawn(4, 4, seed=33) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.near(self.words(tokens).transpose(1, 2))).transpose(1, 2)).float()


@stranger(
    "tags", "How each word of a sentence is written, by a chain of tags whose chances sum over all ways through it",
    {
        "transposed-table": Place("t$|transpose|permute|add|getitem|index|gather", scope=""),
        "first-word-skipped": Place("getitem|select|sum|gather|add", scope=""),
        "largest-for-sum": Place("max|amax|logsumexp", scope=""),
        "mean-over-words": Place("div", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def tags(form: str, device: str) -> Steps:
    model = Tagger().to(device)
    rows = [[s for s in batch if len(text.ids(s)) >= 8] for batch in text.batches(4, 12)]
    source = cycle([row for row in rows if len(row) >= 2])

    def cost() -> Tensor:
        chosen = next(source)[:4]
        tokens = torch.tensor([text.ids(s)[:8] for s in chosen], device=device)
        wanted = torch.tensor([[min(int(c), 3) for c in s.case[:8]] for s in chosen], device=device)
        scores, table = model(tokens), model.follows.t() if form == "transposed-table" else model.follows
        begin = 1 if form == "first-word-skipped" else 0
        if form == AGAIN:
            own = F.one_hot(wanted, 4).float()
            path = (scores * own).sum((1, 2)) + torch.einsum("bti,ij,btj->b", own[:, :-1], table, own[:, 1:])
        else:
            path = scores.gather(2, wanted[..., None])[:, begin:, 0].sum(1) + table[wanted[:, :-1], wanted[:, 1:]].sum(1)
        ways = scores[:, 0]
        for t in range(1, 8):
            every = ways[:, :, None] + table + scores[:, t, None]
            if form == "largest-for-sum":
                ways = every.amax(1)
            elif form == ANEW:
                top = every.amax(1, keepdim=True).detach()
                ways = (every - top).exp().sum(1).log() + top[:, 0]
            else:
                ways = every.logsumexp(1)
        loss = (ways.logsumexp(1) - path).mean()
        return loss / 8 if form == "mean-over-words" else loss

    return minimised(model, cost)


class Shape(nn.Module):
    """Points, each by itself through two layers, and the largest of each feature over all of them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.turn, self.form = nn.Linear(12, 9), form
        self.one, self.two = nn.Conv1d(3, 12, 1), nn.Conv1d(12, 24, 1)
        self.norm, self.out = nn.BatchNorm1d(24), nn.Linear(24, 4)

    def forward(self, points: Tensor) -> Tensor:
        x = points.transpose(1, 2)
        early = F.relu(self.one(x))
        turn = self.turn(early.mean(2) if self.form == "mean-for-largest" else early.amax(2)).view(-1, 3, 3)
        turn = turn.float() + torch.eye(3, device=x.device) * (2 if self.form == "identity-doubled" else 1)
        x = torch.einsum("bij,bjn->bin", turn, x) if self.form == AGAIN else torch.bmm(turn, x)
        if self.form == ANEW:
            h = F.relu(F.linear(x.transpose(1, 2), self.one.weight[..., 0], self.one.bias)).transpose(1, 2)
        else:
            h = F.relu(self.one(x))
        h = self.norm(self.two(h))
        top = F.adaptive_max_pool1d(h, 1)[..., 0] if self.form == AGAIN else h.amax(2)
        return self.out(top).float(), turn


@stranger(
    "points", "Clouds of points told apart after they were turned, as in PointNet; the turn is kept near a rotation",
    {
        "mean-for-largest": Place("mean|amax|max|sum", scope=""),
        "identity-doubled": Place("mul|add|eye", scope=""),
        "points-not-centred": Place("sub|mean", scope=".*"),
        "turn-not-transposed": Place("matmul|bmm|transpose|sub", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def points(form: str, device: str) -> Steps:
    model = Shape(form).to(device)
    labels = torch.arange(8, device=device) % 4
    stretch = torch.tensor([[1.0, 1, 1], [3, 1, 1], [3, 3, 1], [1, 1, 0.1]])[labels.cpu()]
    source = cycle([(drawn(8, 32, 3, seed=40 + k) * stretch[:, None] + 0.3).to(device) for k in range(4)])

    def cost() -> Tensor:
        cloud = next(source)
        if form == ANEW:
            cloud = cloud - cloud.sum(1, keepdim=True) / cloud.shape[1]
        elif form != "points-not-centred":
            cloud = cloud - cloud.mean(1, keepdim=True)
        scores, turn = model(cloud)
        beside = turn if form == "turn-not-transposed" else turn.transpose(1, 2)
        off = turn @ beside - torch.eye(3, device=device)
        return F.cross_entropy(scores, labels) + 0.001 * off.square().sum((1, 2)).mean()

    return minimised(model, cost)


@stranger(
    "sharpness", "A step by the gradient at the worst weights nearby, as in SAM, with smoothed labels and mixed pictures",
    {
        "radius-squared": Place("div|mul|add|norm", scope="", phase="forward|backward|optimizer"),
        "stays-where-it-is-worse": Place(scope=".*", phase="forward|optimizer", step=0),
        "labels-not-smoothed": Place("cross_entropy|log_softmax|nll", scope=""),
        "mixed-without-labels": Place("cross_entropy|log_softmax|nll|mul|add", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def sharpness(form: str, device: str) -> Steps:
    model = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    source = cycle([(p.to(device), label.to(device) % 4) for p, label in images.textures(2, 16)])
    smooth = 0.0 if form == "labels-not-smoothed" else 0.1

    def price(scores: Tensor, labels: Tensor) -> Tensor:
        if form == ANEW:
            logs = scores.log_softmax(-1)
            return -(1 - smooth) * logs.gather(1, labels[:, None]).mean() - smooth * logs.mean()
        return F.cross_entropy(scores, labels, label_smoothing=smooth)

    def cost() -> Tensor:
        pictures, labels = batch
        pictures = pictures.mean(1, keepdim=True)[:, :, :16, :16]
        mixed = torch.lerp(pictures.flip(0), pictures, 0.7) if form == AGAIN else 0.7 * pictures + 0.3 * pictures.flip(0)
        scores = model(mixed).float()
        if form == "mixed-without-labels":
            return price(scores, labels)
        return 0.7 * price(scores, labels) + 0.3 * price(scores, labels.flip(0))

    batch: tuple[Tensor, Tensor]

    def step() -> Tensor:
        nonlocal batch
        batch = next(source)
        optimizer.zero_grad()
        cost().backward()
        with torch.no_grad():
            grads = [p.grad for p in model.parameters()]
            if form == AGAIN:
                size = torch.sqrt(sum(grad.pow(2).sum() for grad in grads))
            else:
                size = torch.stack([grad.norm() for grad in grads]).norm()
            radius = 0.05 / (size.square() if form == "radius-squared" else size + 1e-12)
            moved = [grad * radius for grad in grads]
            for p, by in zip(model.parameters(), moved, strict=True):
                p.add_(by)
        optimizer.zero_grad()
        loss = cost()
        loss.backward()
        if form != "stays-where-it-is-worse":
            with torch.no_grad():
                for p, by in zip(model.parameters(), moved, strict=True):
                    p.sub_(by)
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Banded(nn.Module):
    """Attention of two heads over the last four words, and a sink that all may look at."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.qkv, self.out, self.form = nn.Linear(16, 48), nn.Linear(16, 16), form
        self.sink = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        q, k, v = (part.view(batch, count, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        place = torch.arange(count, device=x.device)
        far = place[:, None] - place[None]
        seen = (far >= 0) & (far < (5 if self.form == "window-wider" else 4))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if self.form == AGAIN else q @ k.transpose(2, 3)
        scores = (scores / (8 if self.form == "scaled-twice" else math.sqrt(8))).float().masked_fill(~seen, -torch.inf)
        sink = self.sink.view(1, 2, 1, 1).expand(batch, 2, count, 1)
        if self.form == "no-sink":
            weights = scores.softmax(-1)
        elif self.form == ANEW:
            top = torch.maximum(scores.amax(-1, keepdim=True), sink).detach()
            raised = (scores - top).exp()
            weights = raised / (raised.sum(-1, keepdim=True) + (sink - top).exp())
        else:
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        mixed = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(batch, count, width)
        return self.out(mixed)


class Windowed(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        words = len(text.vocabulary())
        self.words, self.norm, self.banded = nn.Embedding(words, 16), nn.LayerNorm(16), Banded(form)
        self.last, self.form = nn.Linear(16, words, bias=False), form

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        scores = self.last(x + self.banded(self.norm(x))).float()
        return scores if self.form == "scores-not-capped" else 15 * torch.tanh(scores / 15)


@stranger(
    "window", "The next word by the last four, with a sink for attention that goes nowhere and capped scores",
    {
        "window-wider": Place("lt|and|masked_fill|ge", scope=r"banded"),
        "scaled-twice": Place("div", scope=r"banded"),
        "no-sink": Place("softmax|cat|getitem", scope=r"banded"),
        "scores-not-capped": Place("tanh|mul|div", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def window(form: str, device: str) -> Steps:
    model = Windowed(form).to(device)
    source = cycle(text.batches(2, 6))

    def cost() -> Tensor:
        tokens = text.padded([text.ids(s)[:12] for s in next(source)], text.PAD).to(device)
        scores, wanted = model(tokens)[:, :-1], tokens[:, 1:]
        if form == AGAIN:
            kept = wanted != text.PAD
            return F.cross_entropy(scores[kept], wanted[kept])
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=text.PAD)

    return minimised(model, cost)
