"""Train a tagger of named entities in float16; nothing here knows of capturing.

    python train.py                   emissions of ordinary size: the loss falls
    python train.py --large           the tag O has a bias of 4000, as after a bad fine-tuning: the loss is NaN
    python train.py --large --crf-float32     the same with the CRF in float32: it is not
"""

from __future__ import annotations

import argparse

import torch
from data import TAGS, batch, vocabulary

from bert_crf import BertCRF

LOSS_SCALE = 256.0
"""Static, as in the training that this example is modelled on: float16 gradients would be subnormal without it."""


def main() -> None:
    """Train and print a loss a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="make the emissions large")
    parser.add_argument("--crf-float32", action="store_true", help="compute the CRF in float32")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = BertCRF(len(vocabulary()) + 1, len(TAGS), crf_float32=options.crf_float32)
    if options.large:
        with torch.no_grad():
            model.classifier.bias[TAGS.index("O")] = 4000
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = model(*batch(step))
        (loss * LOSS_SCALE).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(LOSS_SCALE)
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
