"""The recogniser of both frameworks, trained side by side on the same words: `python align_frameworks.py --neck lstm`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import paddle
import recogniser_paddle
import recogniser_torch
import torch
from words import batches

import trueup


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--neck", choices=("lstm", "transformer"), default="lstm")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    paddle.seed(0)
    module = recogniser_torch.Recogniser(args.neck, dropout=0.0)
    layer = recogniser_paddle.Recogniser(args.neck, dropout=0.0)
    batch = next(batches(4, seed=0))

    def loss_of(losses: Any) -> Any:
        def loss(model: Any, *tensors: Any) -> Any:
            given = dict(zip(batch, tensors, strict=True))
            return losses(model(given["image"], given["given"]), given)["loss"]

        return loss

    optimizers = (
        torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.01),
        paddle.optimizer.AdamW(2e-3, parameters=layer.parameters(), weight_decay=0.01),
    )
    losses = loss_of(recogniser_torch.losses), loss_of(recogniser_paddle.losses)
    found = trueup.align(module, layer, batch, loss=losses, optimizers=optimizers, steps=args.steps)
    print(found)
    return found.result.exit_code


if __name__ == "__main__":
    sys.exit(main())
