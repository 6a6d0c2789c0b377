"""Train a step under capture on CUDA while PyTorch forbids every wait for the device; the simulated device is not in this process.

Usage: python never_waits.py LEVEL FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trueup
from adapters.subjects import build
from trueup.foundation.store import open_capture


def main() -> None:
    """Take ``LEVEL FOLDER`` from the command line."""
    level, folder = sys.argv[1], Path(sys.argv[2])
    training = build("in-place", "cuda")
    batch = training.batch()
    training.batch = lambda: batch  # to bring another one there is a wait of the training's own
    with trueup.capture(folder / "warm", model=training.model, level=level, on_error="stop"):
        training.step()  # kernels are compiled, memory is allocated
    with trueup.capture(folder / "capture", model=training.model, level=level, on_error="stop"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            training.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    print(open_capture(folder / "capture").rows, "rows, no wait")


main()
