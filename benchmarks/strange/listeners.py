"""Strangers that follow a signal or an order: a transducer, a causal convolution over waves, a ranking."""

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

LETTERS = 6
"""The last is silence."""


class Recurrent(nn.Module):
    """A gated recurrent layer, by PyTorch's kernel or cell by cell."""

    def __init__(self, inward: int, form: str) -> None:
        super().__init__()
        self.layer, self.form = nn.GRU(inward, 16, batch_first=True), form

    def forward(self, x: Tensor) -> Tensor:
        if self.form != ANEW:
            return self.layer(x)[0]
        layer, state, states = self.layer, x.new_zeros(len(x), 16), []
        outside = F.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
        for t in range(x.shape[1]):
            inside = F.linear(state, layer.weight_hh_l0, layer.bias_hh_l0)
            (r, z, n), (hr, hz, hn) = outside[:, t].chunk(3, -1), inside.chunk(3, -1)
            r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
            n = torch.tanh(n + r * hn)
            state = n + z * (state - n)
            states.append(state)
        return torch.stack(states, 1)


class Transducer(nn.Module):
    """Frames of a signal beside the letters so far; the scores of what comes next [batch, frames, letters + 1, symbols]."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.hear, self.write, self.letters = Recurrent(16, form), Recurrent(8, form), nn.Embedding(LETTERS, 8)
        self.left, self.right, self.out = nn.Linear(16, 24), nn.Linear(16, 24, bias=False), nn.Linear(24, LETTERS)
        self.form = form

    def forward(self, frames: Tensor, letters: Tensor) -> Tensor:
        before = letters.roll(-1, 1) if self.form == "letters-one-early" else letters
        before = F.pad(before, (1, 0), value=LETTERS - 1)
        left, right = self.left(self.hear(frames))[:, :, None], self.right(self.write(self.letters(before)))[:, None]
        mixed = left + right
        mixed = F.gelu(mixed) if self.form == "joined-by-gelu" else torch.tanh(mixed)
        return self.out(mixed).float()


def lattice(logs: Tensor, letters: Tensor, form: str) -> Tensor:
    """Return minus the log chance of each row's letters over all ways through the frames (Graves 2012)."""
    frames, count = logs.shape[1], letters.shape[1]
    silent = logs[..., LETTERS - 1]
    spoken = logs[:, :, :count].gather(3, letters[:, None, :, None].expand(-1, frames, -1, -1))[..., 0]
    if form == AGAIN:  # the letters of a frame by a cumulative sum
        said = F.pad(spoken.cumsum(2), (1, 0))
        row = said[:, 0]
        for t in range(1, frames):
            row = said[:, t] + torch.logcumsumexp(row + silent[:, t - 1] - said[:, t], 1)
        return -(row[:, -1] + silent[:, -1, -1])
    if form == ANEW:  # diagonal by diagonal
        place = torch.arange(count + 1, device=logs.device)
        row = torch.where(place == 0, 0.0, -math.inf).expand(len(logs), -1)
        for d in range(1, frames + count):
            t = d - place
            waited = row + silent[:, (t - 1).clamp(0, frames - 1), place]
            wrote = F.pad(row[:, :-1] + spoken[:, t[1:].clamp(0, frames - 1), place[:-1]], (1, 0), value=-math.inf)
            waited = waited.masked_fill((t < 1) | (t >= frames), -1e30)
            row = torch.stack((waited, wrote.masked_fill((t < 0) | (t >= frames), -1e30))).logsumexp(0)
        return -(row[:, -1] + silent[:, -1, -1])
    late = 0 if form == "silence-of-the-next-frame" else 1
    rows: list[list[Tensor]] = []
    for t in range(frames):
        row = []
        for u in range(count + 1):
            ways = [rows[-1][u] + silent[:, t - late, u]] if t else []
            ways += [row[-1] + spoken[:, t, u - 1]] if u else []
            row.append(torch.logaddexp(*ways) if len(ways) == 2 else ways[0] if ways else torch.zeros_like(silent[:, 0, 0]))
        rows.append(row)
    return -rows[-1][-1] if form == "last-silence-left-out" else -(rows[-1][-1] + silent[:, -1, -1])


@stranger(
    "transducer", "Letters written while rows of pictures are heard, as in RNN-T",
    {
        "letters-one-early": Place("roll|embedding|pad", scope="(letters)?"),
        "joined-by-gelu": Place("gelu|tanh", scope=""),
        "silence-of-the-next-frame": Place("add|getitem|select|index", scope=""),
        "last-silence-left-out": Place("add|neg", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def transducer(form: str, device: str) -> Steps:
    model, source = Transducer(form).to(device), cycle([batch[:, 0, :8].to(device) for batch in grey(16)])
    letters = torch.randint(LETTERS - 1, (8, 4), generator=torch.Generator().manual_seed(11)).to(device)

    def cost() -> Tensor:
        return lattice(model(next(source), letters).log_softmax(-1), letters, form).mean()

    return minimised(model, cost)


class Waves(nn.Module):
    """A causal convolution whose weights have a direction and a length of their own."""

    def __init__(self, inward: int, outward: int, step: int, form: str) -> None:
        super().__init__()
        self.way, self.bias = nn.Parameter(0.4 * torch.randn(outward, inward, 2)), nn.Parameter(torch.zeros(outward))
        self.length = nn.Parameter(self.way.detach().flatten(1).norm(dim=1))
        self.pace, self.form = step, form

    def weight(self) -> Tensor:
        if self.form == AGAIN:
            return self.way * (self.length * torch.rsqrt(self.way.square().sum((1, 2))))[:, None, None]
        if self.form == "levelled-over-all":
            return self.way / self.way.norm() * self.length[:, None, None]
        if self.form == ANEW:
            return F.normalize(self.way.flatten(1), dim=1).view_as(self.way) * self.length[:, None, None]
        return torch._weight_norm(self.way, self.length[:, None, None], 0)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "next-moment-seen":
            return F.conv1d(F.pad(x, (self.pace - 1, 1)), self.weight(), self.bias, dilation=self.pace)
        early = F.pad(x, (self.pace, 0))
        if self.form == ANEW:
            past, now = self.weight().unbind(2)
            made = past @ early[..., : x.shape[2]] + now @ x
            return made + self.bias[:, None].to(made.dtype)
        return F.conv1d(early, self.weight(), self.bias, dilation=self.pace)


class Singer(nn.Module):
    """What comes next in a wave, as one of 32 loudnesses (van den Oord et al. 2016)."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.start, self.form = Waves(1, 16, 1, form), form
        self.gates = nn.ModuleList(Waves(16, 32, 2**k, form) for k in range(3))
        self.ways, self.skips = (nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3)) for _ in range(2))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 24, 1), nn.ReLU(), nn.Conv1d(24, 32, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, heard = self.start(x), None
        for gate, way, skip in zip(self.gates, self.ways, self.skips, strict=True):
            one, other = gate(x).chunk(2, 1)
            if self.form == ANEW:
                bent = (2 * torch.sigmoid(2 * one) - 1) * torch.sigmoid(other)
            else:
                bent = torch.tanh(one) * (F.hardsigmoid(other) if self.form == "gate-by-straight-lines" else torch.sigmoid(other))
            heard = skip(bent) if heard is None else heard + skip(bent)
            x = way(bent) if self.form == "way-past-lost" else x + way(bent)
        return self.out(heard)


@stranger(
    "waves", "The next loudness of a sum of tones, by causal dilated convolutions, as in WaveNet",
    {
        "levelled-over-all": Place("norm|div|mul", scope="start"),
        "next-moment-seen": Place("pad|conv", scope="start"),
        "gate-by-straight-lines": Place("sigmoid", scope=""),
        "way-past-lost": Place("add|ways", scope="|ways.0"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def waves(form: str, device: str) -> Steps:
    model, moments = Singer(form).to(device), torch.arange(49) / 8
    tones = 0.4 * torch.sin(moments * (1 + torch.arange(6)[:, None])) + 0.3 * torch.sin(2.7 * moments + torch.arange(6)[:, None])
    squeezed = torch.sign(tones) * torch.log1p(255 * tones.abs()) / math.log(256)
    heard, loud = squeezed[:, None, :-1].to(device), ((squeezed[:, 1:] + 1) / 2 * 31).round().clamp(0, 31).long().to(device)

    def cost() -> Tensor:
        scores = model(heard).float()
        if form == AGAIN:
            return F.nll_loss(scores.transpose(1, 2).flatten(0, 1).log_softmax(-1), loud.flatten())
        return F.cross_entropy(scores, loud)

    return minimised(model, cost)


@stranger(
    "ranking", "Ten answers to a question put in order, weighed by what an exchange would gain, as in LambdaRank",
    {
        "places-from-one": Place("add", scope=""),
        "gain-not-exponential": Place("pow|exp|sub|mul", scope=""),
        "ties-counted": Place("gt|ge|where|mul|masked_fill|index", scope=""),
        "ideal-order-as-given": Place("sort|mul|div|sum|getitem|argsort", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def ranking(form: str, device: str) -> Steps:
    model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ELU(), nn.Linear(32, 1)).to(device)
    told = drawn(8, 10, 12, seed=91)
    liked = (told[..., 0] + 0.5 * told[..., 1] * told[..., 2] + 0.3 * drawn(8, 10, seed=92)).mul(1.5).round().clamp(0, 4).to(device)
    told = told.to(device)

    def worth(places: Tensor) -> Tensor:
        """Return what a place counts, places from 0."""
        if form == "places-from-one":
            return 1 / torch.log2(places + 3)
        return math.log(2) / torch.log(places + 2) if form == AGAIN else 1 / torch.log2(places + 2)

    def cost() -> Tensor:
        scores = model(told)[..., 0].float()
        gain = liked if form == "gain-not-exponential" else torch.exp2(liked) - 1 if form == ANEW else 2**liked - 1
        with torch.no_grad():
            if form == AGAIN:
                places = (scores[:, None] > scores[:, :, None]).float().sum(-1)
            else:
                places = scores.argsort(1, descending=True).argsort(1).float()
            best = gain if form == "ideal-order-as-given" else gain.sort(1, descending=True).values
            ideal = (best * worth(torch.arange(10, device=device).float())).sum(1)
            kept = worth(places)
            swapped = ((gain[:, :, None] - gain[:, None]) * (kept[:, :, None] - kept[:, None])).abs() / ideal[:, None, None]
        far = scores[:, :, None] - scores[:, None]
        if form == ANEW:
            which = (liked[:, :, None] > liked[:, None]).nonzero(as_tuple=True)
            return (swapped[which] * torch.log1p(torch.exp(-far[which]))).sum() / 8
        over = liked[:, :, None] >= liked[:, None] if form == "ties-counted" else liked[:, :, None] > liked[:, None]
        if form == "ties-counted":
            swapped = swapped + 0.01
        each = swapped * (F.softplus(-far) if form == AGAIN else -F.logsigmoid(far))
        return torch.where(over, each, 0.0).sum() / 8

    return minimised(model, cost)
