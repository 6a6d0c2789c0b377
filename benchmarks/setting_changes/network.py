"""The PyTorch model that three of the trainings share: two blocks of attention over token numbers, and a head."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from setting_changes.data import CLASSES, LENGTH, PADDING, TOKENS, padded, samples
from setting_changes.options import Options

WIDTH = 16


class Block(nn.Module):
    """Attention and two linear layers, each after a norm."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.num_heads, self.p = options.heads, options.dropout
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=options.norm_eps) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation = nn.GELU("tanh" if options.approximate else "none")
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(self.activation(self.up(self.norm2(x)))))


class Network(nn.Module):
    """Says the class of a padded sentence."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.masks = options.masks
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(options) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, eps=options.norm_eps)
        self.mix, self.head = nn.Linear(WIDTH, TOKENS, bias=False), nn.Linear(TOKENS, CLASSES)
        if options.tied:
            self.mix.weight = self.tokens.weight
        if options.deviation:
            nn.init.normal_(self.head.weight, std=options.deviation)
        if options.frozen:
            self.tokens.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        there = tokens != PADDING
        mask = there[:, None, None, :] if self.masks else None
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x, mask)
        kept = there.unsqueeze(-1).to(x.dtype)
        return self.head(self.mix((self.norm(x) * kept).sum(1) / kept.sum(1)))


def load(model: nn.Module, checkpoint: int) -> None:
    """Give the weights of matrices other values, which no recorded call makes."""
    numbers = np.random.RandomState(checkpoint)
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim > 1:
                one.copy_(torch.from_numpy(0.1 * numbers.randn(*one.shape)))


def loss(scores: Tensor, labels: Tensor, options: Options) -> Tensor:
    """Return the loss of a batch."""
    return functional.cross_entropy(scores, labels, label_smoothing=options.smoothing, reduction=options.reduction)


def data(options: Options) -> torch.utils.data.TensorDataset:
    """Return all samples, padded."""
    kept = samples()
    tokens = torch.tensor([padded(one, options) for one, _ in kept])
    return torch.utils.data.TensorDataset(tokens, torch.tensor([label for _, label in kept]))


def optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Return the optimizer, which decays no biases unless it is told so."""
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": trained, "weight_decay": options.decay}]
    if not options.decays_biases:
        groups = [
            {"params": [one for one in trained if (one.ndim > 1) == decays], "weight_decay": options.decay * decays}
            for decays in (True, False)
        ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=0.9, nesterov=options.nesterov)
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=options.lr, betas=(0.9, options.beta2), eps=options.eps)


def step(
    model: nn.Module, updates: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, options: Options
) -> None:  # fmt: skip
    """Clip the gradients as the options say, and step: what stands in a training's loop behind the backward."""
    if options.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    if options.clip_by_hand:
        held = [one.grad for one in model.parameters() if one.grad is not None]
        norm = torch.stack([one.square().sum() for one in held]).sum().sqrt()
        for one in held:
            one.mul_(options.clip_by_hand / norm)
    updates.step()
    for _ in range(options.schedule_steps):
        schedule.step()
    if options.zeroes:
        updates.zero_grad()
