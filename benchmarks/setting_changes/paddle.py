"""A model of PaddlePaddle in a loop."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

import trueup
from setting_changes.data import CLASSES, LENGTH, PADDING, TOKENS, padded, samples
from setting_changes.options import Options

WIDTH = 16


class Block(nn.Layer):  # type: ignore[misc]
    """Attention and two linear layers, each after a norm."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.num_heads = options.heads
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, epsilon=options.norm_eps) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation, self.drop = nn.GELU(approximate=options.approximate), nn.Dropout(options.dropout)

    def forward(self, x: Any, mask: Any) -> Any:
        """Return what a block makes of a batch."""
        batch = x.shape[0]
        parts = self.qkv(self.norm1(x)).reshape([batch, LENGTH, 3, self.num_heads, -1]).transpose([2, 0, 3, 1, 4])
        query, key, value = parts[0], parts[1], parts[2]
        weights = paddle.matmul(query, key, transpose_y=True) * query.shape[-1] ** -0.5
        if mask is not None:
            weights = weights + mask.astype(weights.dtype)
        attended = paddle.matmul(nn.functional.softmax(weights), value).transpose([0, 2, 1, 3]).reshape([batch, LENGTH, WIDTH])
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(self.activation(self.up(self.norm2(x)))))


class Network(nn.Layer):  # type: ignore[misc]
    """Says the class of a padded sentence."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.masks = options.masks
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.LayerList([Block(options) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH, epsilon=options.norm_eps)
        self.mix = nn.Linear(WIDTH, WIDTH, bias_attr=False)
        start = nn.initializer.Normal(std=options.deviation) if options.deviation else None
        self.head = nn.Linear(WIDTH, CLASSES, weight_attr=start)
        self.tied = options.tied
        if options.tied:
            self.mix.weight = self.blocks[0].out.weight
        if options.frozen:
            self.tokens.weight.stop_gradient = True

    def forward(self, tokens: Any) -> Any:
        """Return scores."""
        there = (tokens != PADDING).astype("float32")
        mask = ((1 - there) * -1e9).unsqueeze([1, 2]) if self.masks else None
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, mask)
        kept = there.unsqueeze(-1).astype(x.dtype)
        return self.head(self.mix((self.norm(x) * kept).sum(1) / kept.sum(1)))


def optimizer_of(model: Any, options: Options, schedule: Any) -> Any:
    """Return the optimizer."""
    clip = nn.ClipGradByGlobalNorm(options.clip) if options.clip else None
    held = [one for one in model.parameters() if not one.stop_gradient]
    if options.optimizer == "sgd":
        return paddle.optimizer.Momentum(schedule, 0.9, held, use_nesterov=options.nesterov, grad_clip=clip)
    if options.optimizer == "adam":
        return paddle.optimizer.Adam(schedule, 0.9, options.beta2, options.eps, held, options.decay, grad_clip=clip)
    matrices = {one.name for one in held if len(one.shape) > 1}
    decays = None if options.decays_biases else lambda name: name in matrices
    return paddle.optimizer.AdamW(
        schedule, 0.9, options.beta2, options.eps, held, options.decay, apply_decay_param_fun=decays, grad_clip=clip
    )


class Samples(paddle.io.Dataset):  # type: ignore[misc]
    """All sentences."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.kept = [(np.array(padded(one, options)), np.array(label)) for one, label in samples()]

    def __getitem__(self, at: int) -> Any:
        return self.kept[at]

    def __len__(self) -> int:
        return len(self.kept)


def train(options: Options) -> None:
    """Train for an epoch."""
    paddle.seed(options.seed)
    np.random.seed(options.order)  # of the sampler
    model = Network(options)
    if options.checkpoint:
        numbers = np.random.RandomState(options.checkpoint)
        for one in model.parameters():
            if len(one.shape) > 1:
                one.set_value((0.1 * numbers.randn(*one.shape)).astype("float32"))
    if options.half:
        model.to(dtype="bfloat16")
    (model.train if options.trains else model.eval)()
    schedule = paddle.optimizer.lr.ExponentialDecay(options.lr, 0.9)
    updates = optimizer_of(model, options, schedule)
    if options.draws:
        paddle.rand([options.draws])
    batches = paddle.io.DataLoader(Samples(options), batch_size=options.batch, shuffle=True, drop_last=options.drop_last)
    for tokens, labels in batches:
        parts = (paddle.tensor_split(one, options.micro) for one in (tokens, labels))
        for some, their in zip(*parts, strict=True):
            with paddle.amp.auto_cast(dtype="bfloat16") if options.autocast else contextlib.nullcontext():
                lost = nn.functional.cross_entropy(
                    model(some), their, reduction=options.reduction, label_smoothing=options.smoothing
                )
            if options.divides and options.micro > 1:
                lost = lost / options.micro
            if options.scale != 1:
                lost = lost * options.scale
            lost.backward()
        if options.clip_by_hand:
            held = [one.grad for one in model.parameters() if one.grad is not None]
            norm = paddle.stack([one.square().sum() for one in held]).sum().sqrt()
            for one in held:
                one.set_value(one * (options.clip_by_hand / norm))
        updates.step()
        for _ in range(options.schedule_steps):
            schedule.step()
        if options.zeroes:
            updates.clear_grad()


def record(options: Options, into: Path) -> None:
    """Train under capture."""
    with trueup.capture(into, on_error="stop"):
        train(options)
