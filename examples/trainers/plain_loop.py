"""A loop without a trainer: `python plain_loop.py`, or `trueup capture -o runs/plain -- python plain_loop.py`.

With `--capture DIR` the script records itself; that takes the two lines that name trueup.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from itertools import islice

import torch
from task import classifier, digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import trueup


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--capture", metavar="DIR")
    args = parser.parse_args()
    torch.manual_seed(1234)
    train, test = digits()
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=args.workers)
    with trueup.capture(args.capture, model=model) if args.capture else nullcontext():
        for step, (images, labels) in enumerate(islice(loader, args.steps)):
            model.train()
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trueup.step()  # optional; does nothing where nothing is captured
            print(f"step {step} loss {loss.item()!r}", flush=True)
            if step % 3 == 2:
                print(f"accuracy {accuracy(model, test):.3f}", flush=True)


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: torch.utils.data.TensorDataset) -> float:
    model.eval()
    images, labels = test.tensors
    return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    main()
