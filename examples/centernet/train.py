"""Train the detector: `python train.py --device cpu --steps 30`.

An ordinary training script; nothing in it knows that it may be watched. `--device npu` is the simulated accelerator
of `trueup.simdev`, a stand-in for hardware this machine lacks; `--fault` breaks one of its operators.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from data import CLASSES, batches

import trueup
from centernet import CenterNet, losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a CenterNet-style detector on scikit-image's photographs.")
    parser.add_argument("--device", choices=("cpu", "npu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=14)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--fault", metavar="NAME", help="break this operator of the simulated accelerator")
    parser.add_argument("--noise", metavar="NAME", help="give the simulated accelerator this legitimate difference")
    args = parser.parse_args()
    if args.device != "npu" and (args.fault or args.noise):
        parser.error("--fault and --noise need --device npu: only the simulated accelerator can be told to differ")
    return args


def prepare(args: argparse.Namespace) -> torch.device:
    if args.device == "npu":
        from trueup import simdev

        simdev.install()
        if args.fault:
            simdev.inject(args.fault)
        if args.noise:
            simdev.noise(args.noise)
    trueup.seed_all(args.seed)
    return torch.device(args.device)


def main() -> None:
    args = arguments()
    device = prepare(args)
    model = CenterNet(classes=len(CLASSES)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model.train()
    for step, batch in enumerate(itertools.islice(batches(args.batch_size, args.seed), args.steps)):
        batch = {key: value.to(device) for key, value in batch.items()}
        terms = losses(model(batch["image"]), batch)
        optimizer.zero_grad()
        terms["loss"].backward()
        optimizer.step()
        print(f"step {step}", *(f"{name} {term.item()!r}" for name, term in terms.items()), flush=True)


if __name__ == "__main__":
    main()
