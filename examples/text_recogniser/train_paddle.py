"""Train the recogniser in PaddlePaddle: `python train_paddle.py --steps 300`.

An ordinary training script; nothing in it knows that it may be watched. `--fault` breaks one of Paddle's operators, as a faulty
kernel of a new accelerator would.
"""

from __future__ import annotations

import argparse
import itertools

import paddle
from recogniser_paddle import Recogniser, losses
from words import batches, held_out, read


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a text recogniser on rendered words.")
    parser.add_argument("--neck", choices=("lstm", "transformer"), default="lstm")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--evaluate", type=int, default=0, metavar="WORDS", help="then read so many words never seen")
    parser.add_argument("--fault", metavar="NAME", help="break an operator of Paddle's: see broken.py")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.fault:
        import broken

        broken.inject(args.fault)
    paddle.seed(args.seed)
    model = Recogniser(args.neck, dropout=args.dropout)
    clip = paddle.nn.ClipGradByGlobalNorm(5.0)
    optimizer = paddle.optimizer.AdamW(args.lr, parameters=model.parameters(), weight_decay=0.01, grad_clip=clip)
    model.train()
    for step, arrays in enumerate(itertools.islice(batches(args.batch_size, args.seed), args.steps)):
        batch = {name: paddle.to_tensor(values) for name, values in arrays.items()}
        terms = losses(model(batch["image"], batch["given"]), batch)
        terms["loss"].backward()
        optimizer.step()
        optimizer.clear_grad()
        print(f"step {step}", *(f"{name} {float(term)!r}" for name, term in terms.items()), flush=True)
    if args.evaluate:
        model.eval()
        words, arrays = held_out(args.evaluate, args.seed)
        with paddle.no_grad():
            columns = model(paddle.to_tensor(arrays["image"]))["ctc"].argmax(-1).numpy()
        right = sum(said == word for said, word in zip(read(columns), words, strict=True))
        print(f"read {right / len(words)!r} of {len(words)} unseen words right")


if __name__ == "__main__":
    main()
