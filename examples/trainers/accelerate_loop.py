"""A loop with Accelerate, gradients accumulated over two batches: `accelerate launch accelerate_loop.py`, or python.

With `--capture DIR` the script records itself.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from itertools import islice

import torch
from accelerate import Accelerator
from task import classifier, digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import trueup


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--capture", metavar="DIR")
    args = parser.parse_args()
    torch.manual_seed(1234)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(digits()[0], batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with trueup.capture(args.capture, model=model) if args.capture else nullcontext():
        for images, labels in islice(loader, 2 * args.steps):
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {loss.item()!r}", flush=True)
            if accelerator.sync_gradients:
                trueup.step()  # optional; one step of a capture is one step of the optimizer


if __name__ == "__main__":
    main()
