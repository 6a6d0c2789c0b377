"""The PyTorch model under Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import Tensor

import trueup
from setting_changes.network import Network, data, load, loss, optimizer
from setting_changes.options import Options

PRECISIONS = {(False, False): "32-true", (True, False): "bf16-mixed", (False, True): "bf16-true", (True, True): "bf16-true"}
"""Lightning's, by autocast and half."""


class Module(lightning.LightningModule):  # type: ignore[misc]
    """What Lightning trains."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options, self.net = options, Network(options)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        tokens, labels = batch
        lost = loss(self.net(tokens), labels, self.options)
        return lost if self.options.scale == 1 else lost * self.options.scale

    def configure_optimizers(self) -> Any:
        """Return optimizer and schedule."""
        updates = optimizer(self.net, self.options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(updates, 0.9)
        return [updates], [{"scheduler": schedule, "interval": "step"}]

    def on_train_start(self) -> None:
        """Evaluate, where it was forgotten to train."""
        self.train(self.options.trains)

    def on_before_optimizer_step(self, _: Any) -> None:
        """Clip by hand."""
        if self.options.clip_by_hand:
            held = [one.grad for one in self.parameters() if one.grad is not None]
            norm = torch.stack([one.square().sum() for one in held]).sum().sqrt()
            for one in held:
                one.mul_(self.options.clip_by_hand / norm)

    def on_train_batch_end(self, *_: Any) -> None:
        """Step the schedule once more."""
        for _ in range(self.options.schedule_steps - 1):
            self.lr_schedulers().step()


def train(options: Options) -> None:
    """Train for an epoch."""
    lightning.seed_everything(options.seed, verbose=False)
    torch.set_float32_matmul_precision(options.precision)
    module = Module(options)
    if options.checkpoint:
        load(module.net, options.checkpoint)
    order = torch.Generator().manual_seed(options.order)
    batches = torch.utils.data.DataLoader(
        data(options), options.batch // options.micro, shuffle=True, generator=order, drop_last=options.drop_last
    )
    if options.draws:
        torch.rand(options.draws)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=options.clip or None, accumulate_grad_batches=options.micro,
        precision=PRECISIONS[options.autocast, options.half],
    )  # fmt: skip
    trainer.fit(module, batches)


def record(options: Options, into: Path) -> None:
    """Train under capture."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with trueup.capture(into, on_error="stop"):
        train(options)
