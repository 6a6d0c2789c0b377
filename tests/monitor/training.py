"""A small transformer and a loop, with and without a monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trueup

WORDS, SIZE, HEADS = 20, 16, 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(SIZE), torch.nn.Linear(SIZE, 3 * SIZE)
        self.proj, self.drop = torch.nn.Linear(SIZE, SIZE), torch.nn.Dropout(0.1)
        self.router, self.act = torch.nn.Linear(SIZE, 4), torch.nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, length, 3, HEADS, size // HEADS).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(x.shape)))
        return x * self.act(self.router(x)).mean(-1, keepdim=True)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block, self.head = torch.nn.Embedding(WORDS, SIZE), Block(), torch.nn.Linear(SIZE, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.emb(words)))


def train(
    directory: Path | None, steps: int = 6, *, scaled: bool = False, spoil: int | None = None, **options: Any
) -> dict[str, Any]:  # fmt: skip
    """Train; return losses, gradients, weights and the state of the generator, and the monitor."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=scaled)
    monitor = None if directory is None else trueup.monitor(model, optimizer, directory, **{"every": 2, "alerts": False} | options)
    losses, gradients = [], []
    for step in range(steps):
        words = torch.randint(0, WORDS, (2, 5))
        loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        scaler.scale(loss).backward()
        if step == spoil:
            model.head.weight.grad.mul_(float("inf"))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
    weights = [p.detach().clone() for p in model.parameters()]
    return {
        "losses": losses, "gradients": gradients, "weights": weights, "random": torch.get_rng_state(), "monitor": monitor,
        "model": model, "optimizer": optimizer,
    }  # fmt: skip
