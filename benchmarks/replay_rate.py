"""Is the recording complete, and how fast is a replay: six models, captured on the CPU with all tensors, verified and replayed.

    model         calls  reproduced   verify calls/s   replay calls/s (--dedup, with float64 truth)
    bert          3,104  3,104                  470              90
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

from replay_faults import capture
from trueup import simdev
from trueup.analysis.rerun.replay import Settings, run, verify

MODELS = ("bert", "gpt2", "llama", "vit", "lstm_tagger", "resnet")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    simdev.install()  # before autograd first runs: PyTorch counts devices then
    print(f"{'model':12} {'calls':>6} {'reproduced':>10} {'verify calls/s':>16} {'replay calls/s':>16}")
    with tempfile.TemporaryDirectory() as work:
        for model in options.models:
            into = Path(work) / model
            capture(model, into)
            started = time.perf_counter()
            verified = verify(into, processes=0)
            took = time.perf_counter() - started
            replayed = run(Settings(str(into), "npu", dedup=True, simulated=True), processes=0)
            total = len(verified.replay.outcomes)
            rate = len(replayed.outcomes) / replayed.seconds
            counts = f"{model:12} {total:6,} {verified.reproduced:10,} {total / took:16,.0f} {rate:16,.0f}"
            print(f"{counts}  {replayed.sentence}", flush=True)
            for kind, why, number in verified.reasons:
                print(f"    {number} x {kind}: {why}")


if __name__ == "__main__":
    main()
