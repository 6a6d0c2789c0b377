"""Train the recogniser in PyTorch: `python train_torch.py --steps 300`.

An ordinary training script; nothing in it knows that it may be watched. `--device npu` is the simulated accelerator of
`trueup.simdev`; `--fault` breaks one of its operators.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from recogniser_torch import Recogniser, losses
from words import batches, held_out, read


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a text recogniser on rendered words.")
    parser.add_argument("--neck", choices=("lstm", "transformer"), default="lstm")
    parser.add_argument("--device", choices=("cpu", "npu"), default="cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--evaluate", type=int, default=0, metavar="WORDS", help="then read so many words never seen")
    parser.add_argument("--fault", metavar="NAME", help="break this operator of the simulated accelerator")
    args = parser.parse_args()
    if args.fault and args.device != "npu":
        parser.error("--fault needs --device npu: only the simulated accelerator can be broken")
    return args


def prepare(args: argparse.Namespace) -> torch.device:
    if args.device == "npu":
        from trueup import simdev

        simdev.install()
        if args.fault:
            simdev.inject(args.fault)
    torch.manual_seed(args.seed)
    return torch.device(args.device)


def main() -> None:
    args = arguments()
    device = prepare(args)
    model = Recogniser(args.neck, dropout=args.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    model.train()
    for step, arrays in enumerate(itertools.islice(batches(args.batch_size, args.seed), args.steps)):
        batch = {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}
        terms = losses(model(batch["image"], batch["given"]), batch)
        optimizer.zero_grad()
        terms["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        print(f"step {step}", *(f"{name} {term.item()!r}" for name, term in terms.items()), flush=True)
    if args.evaluate:
        model.eval()
        words, arrays = held_out(args.evaluate, args.seed)
        with torch.no_grad():
            columns = model(torch.from_numpy(arrays["image"]).to(device))["ctc"].argmax(-1).cpu().numpy()
        right = sum(said == word for said, word in zip(read(columns), words, strict=True))
        print(f"read {right / len(words)!r} of {len(words)} unseen words right")


if __name__ == "__main__":
    main()
