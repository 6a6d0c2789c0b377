"""Strangers that measure otherwise: how wide a guess is, how sure, how far in a curved space, by curves, by written notes."""

from __future__ import annotations

from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.densities import minimised
from strange.pictures import drawn, grey
from strange.stranger import AGAIN, ANEW, PLAIN, Steps, stranger
from zoo import images, text


@stranger(
    "quantiles", "The next pixels of a run guessed between two quantiles, after the run was brought to mean 0 and deviation 1",
    {
        "deviation-unbiased": Place("std|var|sqrt|div", scope=""),
        "slope-turned": Place("maximum|mul|where|sub|abs|relu|max", scope=""),
        "not-brought-back": Place("mul|add", scope=""),
        "last-for-mean": Place("getitem|select|mean|sub", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def quantiles(form: str, device: str) -> Steps:
    model = nn.Sequential(nn.Linear(24, 32), nn.SiLU(), nn.Linear(32, 3 * 8)).to(device)
    source = cycle(batch[:, 0].reshape(-1, 32).to(device) for batch in grey(16))
    wanted = torch.tensor([0.1, 0.5, 0.9], device=device)

    def cost() -> Tensor:
        runs = next(source)[:32] + 0.01 * drawn(32, 32, seed=41).to(device)
        seen, coming = runs[:, :24], runs[:, 24:]
        middle = seen[:, -1:] if form == "last-for-mean" else seen.mean(1, keepdim=True)
        if form == AGAIN:
            width = (seen.square().mean(1, keepdim=True) - middle.square() + 1e-5).sqrt()
        elif form == ANEW:
            width = ((seen - middle).square().sum(1, keepdim=True) / seen.shape[1] + 1e-5) ** 0.5
        else:
            width = (seen.var(1, keepdim=True, unbiased=form == "deviation-unbiased") + 1e-5).sqrt()
        guess = model((seen - middle) / width).float().view(32, 3, 8)
        if form != "not-brought-back":
            guess = guess * width[:, None] + middle[:, None]
        apart, level = coming[:, None] - guess, wanted[None, :, None]
        if form == AGAIN:
            return torch.where(apart >= 0, level * apart, (level - 1) * apart).mean()
        if form == ANEW:
            return (level * F.relu(apart) + (1 - level) * F.relu(-apart)).mean()
        if form == "slope-turned":
            level = 1 - level
        return torch.maximum(level * apart, (level - 1) * apart).mean()

    return minimised(model, cost)


@stranger(
    "evidence", "Textures told apart with a measure of what is not known, by a Dirichlet density over the classes",
    {
        "one-not-added": Place("add|softplus|sum|div|log", scope=""),
        "log-for-digamma": Place("log|digamma|sub", scope=""),
        "prior-not-removed": Place("mul|add|sub|where|lgamma", scope=""),
        "divergence-unweighted": Place("mul|add", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def evidence(form: str, device: str) -> Steps:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 4)).to(device)
    source = cycle((x.to(device), y.to(device) % 4) for x, y in images.textures(2, 16))

    def cost() -> Tensor:
        x, y = next(source)
        scores = model(x).float()
        found = torch.logaddexp(scores, torch.zeros_like(scores)) if form == AGAIN else F.softplus(scores)
        alpha = found if form == "one-not-added" else found + 1
        if form == "one-not-added":
            alpha = alpha + 0.5
        target = F.one_hot(y, 4).to(alpha.dtype)
        whole = alpha.sum(1, keepdim=True)
        log = torch.log if form == "log-for-digamma" else torch.digamma
        if form == ANEW:
            fit = (log(whole).squeeze(1) - log(alpha).gather(1, y[:, None]).squeeze(1)).mean()
        else:
            fit = (target * (log(whole) - log(alpha))).sum(1).mean()
        rest = alpha if form == "prior-not-removed" else target + (1 - target) * alpha
        if form == AGAIN:
            rest = torch.where(target > 0, torch.ones_like(alpha), alpha)
        total = rest.sum(1, keepdim=True)
        apart = torch.lgamma(total).squeeze(1) - torch.lgamma(rest).sum(1) - torch.lgamma(torch.tensor(4.0, device=device))
        if form == ANEW:
            apart = apart + ((rest - 1) * torch.digamma(rest)).sum(1) - (rest - 1).sum(1) * torch.digamma(total).squeeze(1)
        else:
            apart = apart + ((rest - 1) * (torch.digamma(rest) - torch.digamma(total))).sum(1)
        return fit + (1.0 if form == "divergence-unweighted" else 0.1) * apart.mean()

    return minimised(model, cost)


@stranger(
    "ball", "Words near the words beside them, by distances in a ball whose rim is infinitely far",
    {
        "distance-not-squared": Place("square|pow|norm|sum|mul", scope=""),
        "rim-at-two": Place("rsub|sub|mul|div", scope=""),
        "plain-gradient": Place("mul|div|square|sub|pow|add|lerp|addcdiv", phase="optimizer|forward|backward", scope=""),
        "others-counted-once": Place("getitem|select|slice|cat|logsumexp|exp|sum|log", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def ball(form: str, device: str) -> Steps:
    words = nn.Embedding(len(text.vocabulary()), 6).to(device)
    with torch.no_grad():
        words.weight.copy_(0.05 * drawn(*words.weight.shape, seed=43))
    source = cycle(text.batches(2, 8))

    def apart(a: Tensor, b: Tensor) -> Tensor:
        far = (a - b).square().sum(-1)
        if form == "distance-not-squared":
            far = (a - b).norm(dim=-1)
        rim = 2.0 if form == "rim-at-two" else 1.0
        within = (rim - a.square().sum(-1)) * (rim - b.square().sum(-1))
        if form == AGAIN:
            return torch.acosh(1 + 2 * far / within + 1e-7)
        ratio = 2 * far / within + 1e-7
        if form == ANEW:
            return torch.log(1 + ratio + (ratio * (ratio + 2)).sqrt())
        return torch.log1p(ratio + torch.sqrt(ratio * ratio + 2 * ratio))

    def step() -> Tensor:
        rows = [text.ids(s) for s in next(source)]
        first = torch.tensor([row[0] for row in rows], device=device)
        near = torch.tensor([row[1] for row in rows], device=device)
        far = torch.tensor([[row[k] for k in (2, 3, 4)] for row in rows], device=device)
        words.zero_grad()
        a, b, c = words(first), words(near), words(far)
        scores = -torch.cat([apart(a, b)[:, None], apart(a[:, None], c)], 1).float()
        if form == "others-counted-once":
            scores = scores[:, :-1]
        if form == AGAIN:
            loss = (torch.logsumexp(scores, 1) - scores[:, 0]).mean()
        elif form == ANEW:
            loss = -scores.softmax(1)[:, 0].log().mean()
        else:
            loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=device))
        loss.backward()
        with torch.no_grad():
            w, g = words.weight, words.weight.grad
            assert g is not None
            curved = (1 - w.square().sum(1, keepdim=True)).square() / 4
            w -= 0.3 * g if form == "plain-gradient" else 0.3 * curved * g
            length = w.norm(dim=1, keepdim=True)
            w.copy_(torch.where(length > 0.95, w * 0.95 / length, w))
        return loss.detach()

    return Steps(words, step)


WRONGS = ("bumps-narrower", "bumps-halved", "plain-not-bent", "plain-dropped")


class Curves(nn.Module):
    """A layer whose every weight is a curve of its input: a sum of bumps, and a SiLU."""

    def __init__(self, form: str, width: int, out: int) -> None:
        super().__init__()
        self.form, self.plain = form, nn.Linear(width, out, bias=False)
        self.bumps = nn.Parameter(drawn(out, width, 8, seed=47) / 10)
        self.register_buffer("middles", torch.linspace(-2, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        wide = 0.5 if self.form == "bumps-narrower" else 4 / 7
        apart = (x[..., None] - self.middles) / wide
        if self.form == AGAIN:
            bump = 1 / torch.exp(apart * apart)
        elif self.form == "bumps-halved":
            bump = torch.exp(-apart.square() / 2)
        else:
            bump = torch.exp(-apart.square())
        if self.form == AGAIN:
            curved = torch.einsum("nik,oik->no", bump, self.bumps)
        elif self.form == ANEW:
            curved = (bump[:, None] * self.bumps).sum((2, 3))
        else:
            curved = F.linear(bump.flatten(1), self.bumps.flatten(1))
        straight = self.plain(x if self.form == "plain-not-bent" else x * torch.sigmoid(x) if self.form == ANEW else F.silu(x))
        return curved if self.form == "plain-dropped" else curved + straight


@stranger(
    "curves", "Textures told apart by layers whose weights are curves, as in KAN",
    {
        "bumps-narrower": Place("div|sub|exp|square", scope="1"),
        "bumps-halved": Place("div|neg|exp|square", scope="1"),
        "plain-not-bent": Place("silu|linear|sigmoid|mul|mm", scope="1"),
        "plain-dropped": Place("add|layer_norm", scope="1|2"),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def curves(form: str, device: str) -> Steps:
    layers = (nn.Flatten(), Curves(form, 48, 12), nn.LayerNorm(12), Curves(PLAIN if form in WRONGS else form, 12, 8))
    model = nn.Sequential(*layers).to(device)
    source = cycle((x[:, :, :4, :4].to(device), y.to(device)) for x, y in images.textures(2, 16))

    def cost() -> Tensor:
        x, y = next(source)
        return F.cross_entropy(model(x).float(), y % 8)

    return minimised(model, cost)


class Notebook(nn.Module):
    """Reads and writes a memory by likeness, a word after another."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.words = form, nn.Embedding(len(text.vocabulary()), 16)
        self.cell = nn.GRUCell(16 + 8, 24)
        self.key, self.sharp, self.erase, self.add = nn.Linear(24, 8), nn.Linear(24, 1), nn.Linear(24, 8), nn.Linear(24, 8)
        self.out = nn.Linear(24 + 8, len(text.vocabulary()))

    def _where(self, memory: Tensor, state: Tensor) -> Tensor:
        key, sharp = self.key(state).float(), 1 + F.softplus(self.sharp(state).float())
        if self.form == "not-sharpened":
            sharp = torch.ones_like(sharp)
        if self.form == "not-normalised":
            like = (memory * key[:, None]).sum(-1) / 8
        elif self.form == AGAIN:
            like = torch.einsum("nkd,nd->nk", F.normalize(memory, dim=-1, eps=1e-6), F.normalize(key, dim=-1, eps=1e-6))
        elif self.form == ANEW:
            like = (memory * key[:, None]).sum(-1) / (memory.norm(dim=-1) * key.norm(dim=-1, keepdim=True)).clamp(min=1e-12)
        else:
            like = F.cosine_similarity(memory, key[:, None], dim=-1, eps=1e-6)
        return torch.softmax(sharp * like, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = drawn(6, 8, seed=53).to(tokens.device).expand(len(tokens), 6, 8) / 4
        state = torch.zeros(len(tokens), 24, device=tokens.device)
        read, made = torch.zeros(len(tokens), 8, device=tokens.device), []
        for word in self.words(tokens).unbind(1):
            state = self.cell(torch.cat([word, read], 1), state)
            where = self._where(memory, state)
            read = torch.bmm(where[:, None], memory)[:, 0] if self.form == AGAIN else (where[..., None] * memory).sum(1)
            erase, add = torch.sigmoid(self.erase(state)).float(), torch.tanh(self.add(state)).float()
            kept = torch.ones_like(memory) if self.form == "nothing-erased" else 1 - where[..., None] * erase[:, None]
            written = torch.einsum("nk,nd->nkd", where, add) if self.form == AGAIN else where[..., None] * add[:, None]
            memory = memory + written if self.form == "nothing-erased" else memory * kept + written
            made.append(self.out(torch.cat([state, state[:, :8] if self.form == "state-for-read" else read], 1)))
        return torch.stack(made, 1).float()


@stranger(
    "notebook", "The next word, with a memory that is read and written by likeness, as in a neural Turing machine",
    {
        "not-sharpened": Place("softplus|ones_like|mul|add|linear|softmax", scope=""),
        "not-normalised": Place("cosine_similarity|mul|div|norm|sum", scope=""),
        "nothing-erased": Place("mul|add|sub|rsub|ones_like", scope=""),
        "state-for-read": Place("cat|getitem|slice|linear", scope=""),
    },
    rights=(AGAIN, ANEW),
    held_out=True,
)  # fmt: skip
def notebook(form: str, device: str) -> Steps:
    model = Notebook(form).to(device)
    rows = [text.ids(s)[:7] for batch in text.batches(6, 8) for s in batch if len(text.ids(s)) >= 7]
    source = cycle(torch.tensor(rows[k : k + 4], device=device) for k in range(0, len(rows) - 3, 4))

    def cost() -> Tensor:
        tokens = next(source)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return minimised(model, cost)
