"""Trainings that overflow, and healthy ones full of infinities; each is a function that trains inside a capture that is on."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 3


def train(model: nn.Module, loss_of: Callable[[int], Tensor], *, lr: float = 0.01, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()


class Scores(nn.Module):
    """Attention as papers write it; without the scaling, or with it."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.scale = scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        return scores.softmax(-1) @ self.value(x)


class Block(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.attention = Scores(width, scale)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.norm(x + self.attention(self.inner(x), mask))


# ---------------------------------------------------------------- what overflows
def attention_without_scaling() -> None:
    model = nn.Sequential(Block(32, 1.0), Block(32, 1.0), nn.Linear(32, 4)).half()
    with torch.no_grad():
        model[1].attention.query.weight.mul_(400)
        model[1].attention.key.weight.mul_(400)
    x = torch.randn(2, 6, 32).half()
    train(model, lambda _: model(x).float().square().mean(), steps=1)


class LogOfZero(nn.Module):
    def forward(self, probabilities: Tensor, target: Tensor) -> Tensor:
        return -(probabilities.log() * target).sum(-1).mean()


def log_of_zero() -> None:
    model, loss = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), LogOfZero()
    with torch.no_grad():
        model[2].weight.mul_(400)
    x, target = torch.randn(16, 8) * 5, torch.eye(4)[torch.arange(16) % 4]
    train(nn.ModuleList([model, loss]), lambda _: loss(model(x).softmax(-1), target), steps=2)


class Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


def zero_norm() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Cosine(), nn.Linear(8, 3))
    x = torch.randn(6, 8)
    x[2] = 0  # a padded row
    train(model, lambda _: F.cross_entropy(model(x), torch.zeros(6, dtype=torch.long)), steps=2)


def batch(step: int, bad: float) -> Tensor:
    """Return data as a loader gives it: made by no call that is recorded."""
    numbers = np.random.default_rng(step).standard_normal((4, 8)).astype(np.float32)
    if step == 1:
        numbers[2, 3] = bad
    return torch.from_numpy(numbers)


def bad_batch() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    train(model, lambda step: F.cross_entropy(model(batch(step, math.nan)), torch.zeros(4, dtype=torch.long)))


def infinite_batch() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    train(model, lambda step: F.cross_entropy(model(batch(step, math.inf)), torch.zeros(4, dtype=torch.long)))


def large_batch() -> None:
    """A batch ten thousand times larger than the one before: finite, and too large for what is done with it."""
    model = nn.Sequential(nn.Linear(8, 16), Exponential(), nn.Linear(16, 3))
    train(model, lambda step: model(batch(step, 0.5) * (1e4 if step == 1 else 1.0)).square().mean(), lr=1e-6)


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


def exploding_step() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(4, 8)
    train(model, lambda step: F.cross_entropy(model(x), torch.zeros(4, dtype=torch.long)), lr=1e25)


class Root(nn.Module):
    """Its backward divides by zero where x is 0, though its forward is clean."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.clamp(min=0).sqrt(), torch.zeros_like(x))


def backward_only() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Hardtanh(0, 1), nn.Linear(16, 16, bias=False), Root(), nn.Linear(16, 3))
    x = torch.randn(4, 8)
    with torch.no_grad():
        model[2].weight[5:] = 0  # units that were pruned: their result is exactly 0
    train(model, lambda _: F.cross_entropy(model(x), torch.zeros(4, dtype=torch.long)), steps=2)


def fully_masked_row() -> None:
    model = Block(16, 0.25)
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 5, 5, dtype=torch.bool)
    mask[1] = True
    train(model, lambda _: model(x, mask).square().mean(), steps=1)


def saturating() -> None:
    """Train in float16 on the simulated device, with a layer whose result is beyond 65504; a norm makes it small again."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3)).half()
    with torch.no_grad():
        model[1].weight.mul_(40000).mul_(5)
    model.to("npu")
    x = torch.randn(4, 16).half().to("npu")
    train(model, lambda _: model(x).float().square().mean(), lr=1e-6, steps=1)


class Wide(nn.Module):
    """Fine in float32 and beyond float16, with a mask of -1e9."""

    def forward(self, x: Tensor) -> Tensor:
        large = x * 3e5
        mask = torch.arange(8) > 5
        return (large / large.norm(dim=-1, keepdim=True)).masked_fill(mask, -1e9).softmax(-1)


def wide() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Wide(), nn.Linear(8, 3))
    x = torch.randn(4, 8)
    train(model, lambda _: model(x).square().mean() * 100, steps=1)


def scaled() -> None:
    """Train in float16 under a GradScaler whose first scales are too large: the first steps are skipped, then all is well."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**18)
    x = torch.randn(4, 8)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean() * 8
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Energy(nn.Module):
    """A square in float16, whatever autocast or a policy says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.half() * 1000
        return (x * x).float()


def skipping() -> None:
    """Overflow in the forward of each step, whatever the scale: a GradScaler skips all of them."""
    model = nn.Sequential(nn.Linear(8, 16), Energy(), nn.Linear(16, 3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    x = torch.randn(4, 8)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def collapsing_scale() -> None:
    """Overflow in each step: the scale falls to 1 and below."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e5)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
    x = torch.randn(4, 8)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# ---------------------------------------------------------------- what can be healed, well or badly
class Clamped(nn.Module):
    """A product beyond float16 that is clamped to 10 at once: what it really was does not matter."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 60000 * 20).clamp(-10, 10)


def clamped() -> None:
    model = nn.Sequential(nn.Linear(8, 16), Clamped(), nn.Linear(16, 3)).half()
    x = torch.randn(4, 8).half()
    train(model, lambda _: model(x).float().square().mean(), lr=1e-6, steps=1)


class HalfNorm(nn.Module):
    """A norm whose squares overflow in float16: 1 / sqrt(Inf) is 0, and so is all that it gives, which looks clean."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


def half_norm() -> None:
    model = nn.Sequential(nn.Linear(8, 16), HalfNorm(), nn.Linear(16, 3)).half()
    x = (torch.randn(4, 8) * 3000).half()
    train(model, lambda _: model(x).float().square().mean(), lr=1e-6, steps=1)


def half_norm_evaluated() -> None:
    """The same in an evaluation: nobody that is recorded reads the result."""
    model = nn.Sequential(nn.Linear(8, 16), HalfNorm(), nn.Linear(16, 3)).half().eval()
    with torch.no_grad():
        model((torch.randn(4, 8) * 3000).half())


def saturating_and_clamped() -> None:
    """Train in float16 on the simulated device, where a product is beyond 65504 and what follows clamps it."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU6(), nn.Linear(16, 3)).half()
    with torch.no_grad():
        model[1].weight.mul_(40000).mul_(5)
    model.to("npu")
    x = torch.randn(4, 16).half().to("npu")
    train(model, lambda _: model(x).float().square().mean(), lr=1e-6, steps=1)


def logarithm_of_zero_masked() -> None:
    """The logarithm of zeros as scores of a softmax, as written by hand for masks of 0 and 1: mathematics, and no range."""
    mask = torch.tensor([1.0, 1.0, 0.0])
    model = nn.Linear(8, 3)
    x = torch.randn(4, 8)
    train(model, lambda _: (model(x) + mask.log()).softmax(-1).square().mean(), steps=1)


# ---------------------------------------------------------------- what is healthy
def causal_gpt() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, attn_implementation="eager", bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 64, (2, 12))
    padding = torch.ones_like(ids)
    padding[1, :5] = 0
    train(model, lambda _: model(input_ids=ids, attention_mask=padding, labels=ids).loss, steps=2)


def infinite_mask() -> None:
    """A mask of -Inf as a buffer, added to scores; kept over steps."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
            self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).mT / 4 + self.mask[: x.shape[1], : x.shape[1]]
            return scores.softmax(-1) @ self.value(x)

    model = nn.Sequential(Masked(), nn.LayerNorm(16), Masked())
    x = torch.randn(2, 4, 16)
    train(model, lambda _: model(x).square().mean(), steps=2)


def half_mask() -> None:
    """The smallest float16 as a mask, to which scores are added."""
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]).half()
    x = torch.randn(2, 5, 16).half()
    mask = (1.0 - torch.ones(5, 5).tril().half()) * torch.finfo(torch.float16).min

    def loss(_: int) -> Tensor:
        scores = model[0](x) @ x.mT - 40 + mask
        return (scores.softmax(-1) @ model[1](x)).float().square().mean()

    train(model, loss, steps=2)


def max_pool() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), nn.Flatten(), nn.Linear(64, 3))
    x = torch.randn(2, 1, 8, 8)
    by_hand = lambda y: F.pad(y, (1, 1, 1, 1), value=-math.inf).unfold(-1, 3, 2).amax(-1)  # noqa: E731
    train(model, lambda _: model(x).square().mean() + by_hand(model[0](x)).clamp(min=-9).square().mean(), steps=2)


def masked_softmax() -> None:
    model = Block(16, 0.25)
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 5, 5, dtype=torch.bool)
    mask[1, :, 3:] = True
    train(model, lambda _: model(x, mask).square().mean(), steps=2)


def padded_logsumexp() -> None:
    model = nn.Linear(8, 6)
    x, lengths = torch.randn(4, 8), torch.tensor([6, 3, 1, 2])
    padding = torch.arange(6)[None] >= lengths[:, None]

    def loss(_: int) -> Tensor:
        total = torch.where(padding, -math.inf, model(x)).logsumexp(-1)
        empty = torch.where(padding.all(-1), 0.0, total)
        return empty.square().mean() + torch.logsumexp(model(x)[:, :0], -1).exp().sum()

    train(model, loss, steps=2)


def flash_gpt() -> None:
    """Attention in one fused call, causal."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    x, mask = torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    train(model, lambda _: model(x, mask, src_key_padding_mask=padding.float() * -1e30, is_causal=True).square().mean(), steps=2)


HEALTHY = (causal_gpt, infinite_mask, half_mask, max_pool, masked_softmax, padded_logsumexp, flash_gpt)

ORIGINS = {
    # case: kind, scope, phase, step, operator at api, operator at aten
    "attention_without_scaling": ("overflow", "1.attention", "forward", 0, "torch.Tensor.matmul", "aten::bmm"),
    "log_of_zero": ("overflow", "LogOfZero", "forward", 0, "torch.Tensor.log", "aten::log"),
    "zero_norm": ("nan", "1", "forward", 0, "torch.Tensor.div", "aten::div"),
    "bad_batch": ("input", "0", "forward", 1, "torch.nn.functional.linear", "aten::addmm"),
    "infinite_batch": ("input", "0", "forward", 1, "torch.nn.functional.linear", "aten::addmm"),
    "large_batch": ("overflow", "1", "forward", 1, "torch.exp", "aten::exp"),
    "exploding_step": ("parameters", "", "optimizer", 0, "torch.Tensor.add_", "aten::add_"),
    "backward_only": ("nan", "3", "backward", 0, "torch.Tensor.sqrt", "aten::div"),
    "fully_masked_row": ("nan", "attention", "forward", 0, "torch.Tensor.softmax", "aten::_softmax"),
}
"""What `trueup overflow` is to say first."""
