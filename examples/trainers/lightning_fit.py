"""Lightning, with accumulation, validation and a checkpoint: `python lightning_fit.py`.

With `--capture DIR` the trainer gets a callback that records the run.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings

import pytorch_lightning as pl
import torch
from task import classifier, digits
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import trueup

Batch = tuple[Tensor, Tensor]


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def training_step(self, batch: Batch) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        print(f"loss {loss.item()!r}", flush=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--capture", metavar="DIR")
    args = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")  # advice on the number of workers
    pl.seed_everything(1234, verbose=False)
    train, test = digits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder, accelerator="cpu", max_steps=args.steps, accumulate_grad_batches=2, val_check_interval=4,
            limit_val_batches=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[trueup.LightningCallback(args.capture)] if args.capture else [],
        )  # fmt: skip
        trainer.fit(
            Digits(),
            DataLoader(train, batch_size=32, shuffle=True, num_workers=args.workers),
            DataLoader(test, batch_size=197),
        )
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}", flush=True)


if __name__ == "__main__":
    main()
