"""A loop in plain PyTorch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

import trueup
from setting_changes.network import Network, data, load, loss, optimizer, step
from setting_changes.options import Options


def train(options: Options) -> None:
    """Train for an epoch."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision(options.precision)
    model = Network(options)
    if options.checkpoint:
        load(model, options.checkpoint)
    if options.half:
        model.to(torch.bfloat16)
    model.train(options.trains)
    order = torch.Generator().manual_seed(options.order)
    batches = torch.utils.data.DataLoader(data(options), options.batch, shuffle=True, generator=order, drop_last=options.drop_last)
    updates = optimizer(model, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(updates, 0.9)
    if options.draws:
        torch.rand(options.draws)
    for tokens, labels in batches:
        for some, their in zip(tokens.chunk(options.micro), labels.chunk(options.micro), strict=True):
            with torch.autocast("cpu", torch.bfloat16) if options.autocast else contextlib.nullcontext():
                lost = loss(model(some), their, options)
            if options.divides and options.micro > 1:
                lost = lost / options.micro
            if options.scale != 1:
                lost = lost * options.scale
            lost.backward()
        step(model, updates, schedule, options)


def record(options: Options, into: Path) -> None:
    """Train under capture, as ``trueup capture`` does: it begins before the model is built."""
    with trueup.capture(into, on_error="stop"):
        train(options)
