"""Strangers that learn from sequences: a mixture of experts, a state space, speech, pictures beside words."""

from __future__ import annotations

import math
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from silent.language import Attention, batches, shifted
from strange.stranger import AGAIN, Steps, stranger
from zoo import images, text

WIDTH = 32


class Experts(nn.Module):
    """Four feed-forward experts, of which each word takes the two that a router prefers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 48), nn.SiLU(), nn.Linear(48, WIDTH)) for _ in range(4))
        self.form, self.balance = form, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        words = x.reshape(-1, WIDTH)
        chances = self.router(words).float().softmax(-1)
        best, chosen = chances.topk(2, -1)
        if self.form != "router-weights-not-renormalised":
            best = best / best.sum(-1, keepdim=True)
        taken = F.one_hot(chosen, 4).float().sum(1).mean(0)
        if self.form == "balance-ignores-chances":
            self.balance = 4 * (taken * taken).sum()
        else:
            self.balance = 4 * (taken * chances.mean(0)).sum()
        if self.form == AGAIN:
            weights = torch.zeros_like(chances).scatter(1, chosen, best)
            every = torch.stack([expert(words).float() for expert in self.experts], 1)
            return (every * weights[..., None]).sum(1).reshape(x.shape)
        mixed = torch.zeros_like(words, dtype=torch.float32)
        for k, expert in enumerate(self.experts):
            rows, place = (chosen == k).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, expert(words[rows]).float() * best[rows, place, None])
        return mixed.reshape(x.shape)


class Mixture(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.words = nn.Embedding(len(text.vocabulary()), WIDTH)
        self.attention, self.experts = Attention(), Experts(form)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(text.vocabulary()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.attention(self.norm1(x))
        return self.head(x + self.experts(self.norm2(x)))


def next_word(model: nn.Module, device: str, rate: float = 1e-3, extra: str = "") -> Steps:
    """Train on the next word; ``extra`` names a module that has a loss of its own, ``balance``."""
    optimizer, source = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False), batches()

    def step() -> Tensor:
        tokens, labels = (each.to(device) for each in shifted(next(source)))
        optimizer.zero_grad()
        logits = model(tokens).flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=text.IGNORED)
        if extra:
            loss = loss + 0.01 * model.get_submodule(extra).balance
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


@stranger(
    "mixture", "Words routed to two of four experts",
    {
        "router-weights-not-renormalised": Place("div|sum|mul", scope="experts"),
        "balance-ignores-chances": Place("mean|mul|sum", scope="experts"),
    },
    held_out=True,
)  # fmt: skip
def mixture(form: str, device: str) -> Steps:
    return next_word(Mixture(form).to(device), device, extra="experts")


class Scan(nn.Module):
    """A state per channel that decays and is written as each word asks: the selective scan of a state space model."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.asked, self.pace = nn.Linear(WIDTH, 2 * 4), nn.Linear(WIDTH, WIDTH)
        self.rates = nn.Parameter(torch.log(torch.arange(1, 5).float()).repeat(WIDTH, 1))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inlet(x).chunk(2, -1)
        write, read = self.asked(value).float().chunk(2, -1)
        pace = self.pace(value).float()
        pace = pace.exp() if self.form == "pace-by-exponential" else F.softplus(pace)
        value = value.float()
        speed = torch.ones_like(pace) if self.form == "decay-ignores-pace" else pace
        state, seen = x.new_zeros(x.shape[0], WIDTH, 4, dtype=torch.float32), []
        for t in range(x.shape[1]):
            decay = torch.exp(-self.rates.exp() * speed[:, t, :, None])
            if self.form == AGAIN:
                state = torch.addcmul(torch.einsum("bc,bn->bcn", pace[:, t] * value[:, t], write[:, t]), decay, state)
                seen.append(torch.einsum("bcn,bn->bc", state, read[:, t]))
            else:
                state = decay * state + (pace[:, t] * value[:, t])[..., None] * write[:, t, None]
                seen.append((state * read[:, t, None]).sum(-1))
        return self.outlet(torch.stack(seen, 1) * F.silu(gate))


class StateSpace(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(len(text.vocabulary()), WIDTH), nn.RMSNorm(WIDTH)
        self.before, self.scan = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH), Scan(form)
        self.head = nn.Linear(WIDTH, len(text.vocabulary()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens[:, :10])
        mixed = self.before(self.norm(x).transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)
        return self.head(x + self.scan(F.silu(mixed)))


@stranger(
    "state-space", "A selective scan over words, as in Mamba",
    {
        "pace-by-exponential": Place("exp|softplus", scope="scan"),
        "decay-ignores-pace": Place("mul|exp|ones_like|getitem|index|select", scope="scan"),
    },
)  # fmt: skip
def state_space(form: str, device: str) -> Steps:
    model, source = StateSpace(form).to(device), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> Tensor:
        tokens, labels = (each[:, :10].to(device) for each in shifted(next(source)))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(), ignore_index=text.IGNORED)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


LETTERS, RATE, FRAME = 6, 4000, 64


def spoken(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` sayings of three vowels each, float32 [count, samples], and which vowels, 1 to `LETTERS` - 1.

    A vowel is a pulse of the voice through two resonances, its formants.
    """
    generator = torch.Generator().manual_seed(seed)
    said = torch.randint(1, LETTERS, (count, 3), generator=generator)
    formants = torch.tensor([[0.0, 0.0], [700, 1200], [300, 1700], [450, 800], [320, 650], [550, 1500]])
    time = torch.arange(384) / RATE
    sounds = []
    for row in said:
        pitch = 100 + 60 * torch.rand(1, generator=generator)
        voice = sum(torch.sin(2 * math.pi * k * pitch * time) / k for k in range(1, 12))
        envelope = torch.hann_window(384)
        tones = [sum(torch.sin(2 * math.pi * f * time) for f in formants[letter]) for letter in row]
        sounds.append(torch.cat([envelope * voice * tone for tone in tones]))
    return torch.stack(sounds), said


class Listener(nn.Module):
    """A spectrogram through a convolution and a recurrence in both directions, to letters and the blank."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FRAME // 2 + 1, 24, 3, 2, 1)
        self.both = nn.GRU(24, 16, bidirectional=True, batch_first=True)
        self.letters, self.form = nn.Linear(32, LETTERS), form

    def forward(self, sound: Tensor) -> Tensor:
        window = torch.hann_window(FRAME).to(sound.device)
        frames = sound.unfold(1, FRAME, FRAME) * window
        power = torch.fft.rfft(frames).abs().square()
        loud = torch.log(power + (1.0 if self.form == "floor-of-the-logarithm" else 1e-5))
        loud = (loud - loud.mean((1, 2), keepdim=True)) / loud.std((1, 2), keepdim=True)
        heard, _ = self.both(F.relu(self.conv(loud.transpose(1, 2))).transpose(1, 2))
        scores = self.letters(heard).float()
        if self.form == AGAIN:
            return scores - scores.logsumexp(-1, keepdim=True)
        return scores.log_softmax(-1)


@stranger(
    "speech", "Generated vowels spelled from a spectrogram, by CTC",
    {
        "floor-of-the-logarithm": Place("add|log", scope=""),
        "blank-is-the-last-letter": Place("ctc_loss", scope="", setting="blank"),
    },
)  # fmt: skip
def speech(form: str, device: str) -> Steps:
    model = Listener(form).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)
    source = cycle([tuple(each.to(device) for each in spoken(4, seed)) for seed in (0, 1)])

    def step() -> Tensor:
        sounds, letters = next(source)
        optimizer.zero_grad()
        chances = model(sounds).transpose(0, 1)
        lengths = [torch.full((4,), length, device=device) for length in (len(chances), 3)]
        blank = LETTERS - 1 if form == "blank-is-the-last-letter" else 0
        loss = F.ctc_loss(chances, letters, *lengths, blank=blank, zero_infinity=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0, foreach=False)
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Pairs(nn.Module):
    """Pictures and the words of their names, as unit vectors, and how sharply they are told apart."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.sight = nn.Sequential(
            nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Conv2d(16, 32, 4, 4), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, WIDTH)
        )
        self.name = nn.Sequential(nn.EmbeddingBag(27, 24), nn.LayerNorm(24), nn.Linear(24, WIDTH))
        self.sharpness, self.form = nn.Parameter(torch.tensor(math.log(10.0))), form

    def forward(self, pictures: Tensor, letters: Tensor) -> Tensor:
        seen, read = self.sight(pictures).float(), self.name(letters).float()
        if self.form == AGAIN:
            seen, read = (each / each.square().sum(-1, keepdim=True).sqrt() for each in (seen, read))
        else:
            seen, read = F.normalize(seen, dim=-1), F.normalize(read, dim=-1)
        sharp = self.sharpness if self.form == "sharpness-not-exponentiated" else self.sharpness.exp()
        return sharp * (seen @ read.t()).float()


@stranger(
    "contrastive", "Pictures beside the letters of their names, as in CLIP",
    {
        "sharpness-not-exponentiated": Place("exp|mul", scope=""),
        "one-direction-only": Place("cross_entropy|log_softmax|add|div|t$|transpose", scope=""),
    },
    held_out=True,
)  # fmt: skip
def contrastive(form: str, device: str) -> Steps:
    model = Pairs(form).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    source = cycle([tuple(each.to(device) for each in batch) for batch in images.textures(2, 32)])
    names = torch.tensor([[(ord(letter) - 96) % 27 for letter in f"{name:_<8}"[:8]] for name in images.TEXTURES]).to(device)

    def step() -> Tensor:
        pictures, labels = next(source)
        optimizer.zero_grad()
        scores, own = model(pictures, names[labels]), torch.arange(len(labels), device=device)
        if form == "one-direction-only":
            loss = F.cross_entropy(scores, own)
        else:
            loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)
