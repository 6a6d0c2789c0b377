"""Strangers with the practices of larger trainings: a queue, averaged weights, accumulation, clipping, adapters, routing."""

from __future__ import annotations

import copy
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.densities import minimised
from strange.pictures import drawn, grey
from strange.sequences import next_word
from strange.stranger import AGAIN, ANEW, Steps, stranger
from zoo import images, text


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.Linear(8 * 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.conv(x))).flatten(1)).float()


class Queue(nn.Module):
    """Pictures told apart from the pictures of earlier steps, which a slower encoder wrote into a queue."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.asks, self.form = Encoder(), form
        self.answers = copy.deepcopy(self.asks).requires_grad_(False)
        self.register_buffer("queue", F.normalize(drawn(32, 16, seed=5), dim=-1))
        self.place = 0

    def unit(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).sqrt() if self.form == ANEW else F.normalize(x, dim=-1)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        asked = self.unit(self.asks(one))
        with torch.no_grad():
            answer = self.answers(other)
            answer = answer if self.form == "answers-not-normalised" else self.unit(answer)
        if self.form == AGAIN:
            near, far = torch.einsum("bd,bd->b", asked, answer)[:, None], torch.einsum("bd,kd->bk", asked, self.queue.clone())
        else:
            near, far = (asked * answer).sum(-1, keepdim=True), asked @ self.queue.clone().t()
        scores = torch.cat((near, far), -1).float() / (0.1 if self.form == "temperature-higher" else 0.07)
        if self.form != "queue-not-written":
            self.queue[self.place : self.place + len(answer)] = answer.detach()
            self.place = (self.place + len(answer)) % len(self.queue)
        return scores


@stranger(
    "queue", "Pictures told apart from a queue of earlier ones, as in MoCo",
    {
        "temperature-higher": Place("div", scope=""),
        "answers-not-normalised": Place("normalize|mul|sum|div|setitem|copy", scope=""),
        "queue-not-written": Place("setitem|copy", scope=""),
        "average-too-fast": Place("mul|add|lerp", scope="", phase="forward|optimizer"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def queue(form: str, device: str) -> Steps:
    model, source = Queue(form).to(device), cycle(batch.to(device) for batch in grey(16))
    inner = minimised(model, lambda: cost())
    keep = 0.9 if form == "average-too-fast" else 0.99

    def cost() -> Tensor:
        pictures = next(source)
        scores = model(pictures, pictures.flip(-1))
        if form == ANEW:
            return (scores.logsumexp(-1) - scores[:, 0]).mean()
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=device))

    def step() -> Tensor:
        loss = inner.step()
        with torch.no_grad():
            for slow, fast in zip(model.answers.parameters(), model.asks.parameters(), strict=True):
                if form == AGAIN:
                    slow.lerp_(fast, 1 - keep)
                else:
                    slow.mul_(keep).add_(fast, alpha=1 - keep)
        return loss

    return Steps(model, step)


@stranger(
    "siamese", "Textures told apart by triplets, two batches to an update, clipped",
    {
        "margin-doubled": Place("add|relu|clamp|sub", scope=""),
        "distance-squared": Place("norm|square|sum|pow", scope=""),
        "divisor-lost": Place("div|mul", scope="", phase="forward|backward"),
        "clip-lost": Place("mul|clip|norm|clamp|div|stack", scope="", phase="forward|backward|optimizer"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def siamese(form: str, device: str) -> Steps:
    model = nn.Sequential(Encoder(), nn.Tanh(), nn.Linear(16, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    source = cycle([batch.to(device) for batch in grey(16, 4)])

    def apart(one: Tensor, other: Tensor) -> Tensor:
        far = one - other + 1e-6
        return far.square().sum(-1) if form == "distance-squared" else far.norm(dim=-1)

    def cost() -> Tensor:
        pictures = next(source)
        anchor, near, far = (model(x).float() for x in (pictures, pictures.flip(-1), pictures.roll(1, 0)))
        margin = 2.0 if form == "margin-doubled" else 1.0
        if form == AGAIN:
            return F.triplet_margin_loss(anchor, near, far, margin)
        return F.relu(apart(anchor, near) - apart(anchor, far) + margin).mean()

    def clip() -> None:
        if form == ANEW:
            grads = [p.grad for p in model.parameters()]
            whole = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
            for grad in grads:
                grad.mul_((0.1 / (whole + 1e-6)).clamp(max=1.0))
        elif form != "clip-lost":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for _ in range(2):
            loss = cost() if form == "divisor-lost" else cost() / 2
            loss.backward()
            total = total + loss.detach()
        clip()
        optimizer.step()
        return total

    return Steps(model, step)


class Adapted(nn.Module):
    """A frozen, pruned layer and a trained one of low rank beside it."""

    def __init__(self, inward: int, outward: int, form: str) -> None:
        super().__init__()
        self.base, self.form = nn.Linear(inward, outward).requires_grad_(False), form
        self.register_buffer("mask", (torch.rand(outward, inward) > 0.3).float())
        self.narrow, self.wide = nn.Parameter(torch.randn(4, inward) / 4), nn.Parameter(torch.randn(outward, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = 8 / 2 if self.form == "scale-by-root-of-rank" else 8 / 4
        weight = self.base.weight if self.form == "mask-not-applied" else self.base.weight * self.mask
        if self.form == AGAIN:
            return F.linear(x, torch.addmm(weight, self.wide, self.narrow, alpha=scale), self.base.bias)
        if self.form == ANEW:
            return torch.einsum("ni,oi->no", x, weight) + self.base.bias + F.linear(F.linear(x, self.narrow) * scale, self.wide)
        narrow = F.linear(x, self.narrow)
        if self.form == "adapter-in-float8":
            narrow = narrow.to(torch.float8_e5m2).to(narrow.dtype)
        return F.linear(x, weight, self.base.bias) + scale * F.linear(narrow, self.wide)


@stranger(
    "adapters", "A frozen and pruned network with adapters of low rank, and its averaged copy",
    {
        "scale-by-root-of-rank": Place("mul", scope="0"),
        "mask-not-applied": Place("mul|linear|addmm|mm", scope="0"),
        "adapter-in-float8": Place("to|linear|copy|mul", scope="0"),
        "average-a-step-late": Place("lerp|mul|add|sub|clone|copy", scope="", phase="forward|optimizer"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def adapters(form: str, device: str) -> Steps:
    model = nn.Sequential(Adapted(48, 32, form), nn.GELU(), Adapted(32, 8, form)).to(device)
    mean = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    source = cycle([(batch.flatten(1)[:, :48].to(device), label.to(device)) for batch, label in images.textures(2, 16)])

    def cost() -> Tensor:
        pictures, labels = next(source)
        return F.cross_entropy(model(pictures).float(), labels)

    inner = minimised(model, cost)

    def step() -> Tensor:
        early = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss = inner.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in mean:
                    new = early[name] if form == "average-a-step-late" else p
                    mean[name] = mean[name] + 0.1 * (new - mean[name]) if form == AGAIN else torch.lerp(mean[name], new, 0.1)
        return loss

    return Steps(model, step)


class Capsules(nn.Module):
    """Vectors that vote for classes, routed by agreement in three rounds."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.conv, self.form = nn.Conv2d(3, 16, 5, 3), form
        self.votes = nn.Parameter(drawn(32, 8, 8, 8, seed=3))

    def squash(self, x: Tensor) -> Tensor:
        if self.form == ANEW:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x * length / (1 + length * length)
        square = (x * x).sum(-1, keepdim=True)
        if self.form == "squash-without-square":
            return square.sqrt() / (1 + square.sqrt()) * x / (square + 1e-12).sqrt()
        return square / (1 + square) * x / (square + 1e-12).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.squash(F.relu(self.conv(x)).float().reshape(len(x), 32, 8))
        if self.form == AGAIN:
            votes = (parts[:, :, None, None] @ self.votes[None])[:, :, :, 0].float()
        else:
            votes = torch.einsum("nid,iode->nioe", parts, self.votes).float()
        logits = torch.zeros(votes.shape[:3], device=x.device)
        rounds = 2 if self.form == "a-round-less" else 3
        for k in range(rounds):
            shares = logits.softmax(1 if self.form == "shares-over-parts" else -1)
            whole = self.squash((shares[..., None] * votes).sum(1))
            if k < rounds - 1:
                if self.form == ANEW:
                    logits = logits + torch.einsum("nioe,noe->nio", votes, whole).float()
                else:
                    logits = logits + (votes * whole[:, None]).sum(-1)
        return (whole * whole).sum(-1).add(1e-12).sqrt()


@stranger(
    "capsules", "Textures told apart by capsules routed by agreement",
    {
        "squash-without-square": Place("sqrt|div|add|mul", scope=""),
        "shares-over-parts": Place("softmax", scope=""),
        "a-round-less": Place("softmax|mul|sum|add", scope=""),
        "absence-weighs-full": Place("mul", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def capsules(form: str, device: str) -> Steps:
    model = Capsules(form).to(device)
    source = cycle([(batch.to(device), label.to(device)) for batch, label in images.textures(2, 16)])

    def cost() -> Tensor:
        pictures, labels = next(source)
        lengths, truth = model(pictures), F.one_hot(labels, 8).float()
        share = 1.0 if form == "absence-weighs-full" else 0.5
        present, absent = F.relu(0.9 - lengths).square(), F.relu(lengths - 0.1).square()
        if form == AGAIN:
            return torch.where(truth > 0, present, share * absent).sum(-1).mean()
        return (truth * present + share * (1 - truth) * absent).sum(-1).mean()

    return minimised(model, cost)


class Grouped(nn.Module):
    """Four heads of queries over two of keys, turned by their place, with a bias that grows with the distance."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 32)
        self.form = form

    def turned(self, x: Tensor) -> Tensor:
        base = 1000.0 if self.form == "places-turn-faster" else 10000.0
        rates = base ** (-torch.arange(0, 8, 2, device=x.device) / 8)
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * rates
        x = x.float()
        if self.form == ANEW:
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()), -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (part(x).view(batch, tokens, -1, 8).transpose(1, 2) for part in (self.query, self.key, self.value))
        query, key, value = self.turned(query), self.turned(key), value.float()
        places = torch.arange(tokens, device=x.device)
        slopes = 2.0 ** -torch.arange(1, 5, device=x.device).float()
        bias = -slopes[:, None, None] * (places[:, None] - places).abs()
        ahead = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(2 if self.form == "mask-admits-next" else 1)
        bias = bias.masked_fill(ahead, float("-inf"))
        if self.form == AGAIN:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype)[None], enable_gqa=True)
            return self.out(mixed.transpose(1, 2).flatten(2))
        if self.form == "groups-interleaved":
            key, value = key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)
        else:
            key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = (query @ key.transpose(2, 3)).float() * 8**-0.5 + bias
        if self.form == ANEW:
            grown = (scores - scores.amax(-1, keepdim=True)).exp()
            shares = grown / grown.sum(-1, keepdim=True)
        else:
            shares = (scores.to(torch.float16) if self.form == "softmax-in-float16" else scores).softmax(-1).float()
        return self.out((shares @ value).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        words = len(text.vocabulary())
        self.words, self.norm, self.attention = nn.Embedding(words, 32), nn.LayerNorm(32), Grouped(form)
        self.head = nn.Linear(32, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(x + self.attention(self.norm(x)))


@stranger(
    "grouped-attention", "Grouped queries with turned places and a bias by distance",
    {
        "places-turn-faster": Place("pow|mul", scope="attention"),
        "mask-admits-next": Place("triu|masked_fill", scope="attention"),
        "groups-interleaved": Place("repeat", scope="attention"),
        "softmax-in-float16": Place("to|half|softmax", scope="attention"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def grouped_attention(form: str, device: str) -> Steps:
    return next_word(Reader(form).to(device), device)
