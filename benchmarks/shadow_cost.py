"""What a shadow costs: milliseconds of a step without, with, and with part of the calls, on the CPU.

    model        plain    all       10 %     1 %
    gpt          152.0    1210.0    260.0    170.0     (8.0 x, 1.7 x, 1.1 x)

`make bench` prints it last, `make bench-shadow` before the table of faults. The reference computes in float64 on the same CPU and
thread; where the training runs on an accelerator and the reference on an idle host, the step waits for the copies and the host's
arithmetic.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import models
import trueup

SHARES = (1.0, 0.1, 0.01)
STEPS = 3


def milliseconds(step: object) -> float:
    """Return how long a call took."""
    began = time.perf_counter()
    step()  # type: ignore[operator]
    return (time.perf_counter() - began) * 1000


def measure(name: str) -> list[float]:
    """Return medians: plain, then one for each share; the first step, in which every kind is met, does not count."""
    step = models.build(name)
    step()
    found = [statistics.median(milliseconds(step) for _ in range(STEPS + 2))]
    for share in SHARES:
        with trueup.shadow(sample=share, quiet=True) as shadow:
            times = []
            for _ in range(STEPS + 1):
                times.append(milliseconds(step))
                shadow.step()
        found.append(statistics.median(times[1:]))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["gpt", "resnet"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = "".join(f"{f'{share:.0%}':>10}" for share in SHARES)
    print("a step under a shadow in float64 on the same core, milliseconds")
    print(f"{'model':12}{'plain ms':>10}{heads}")
    for name in options.models:
        plain, *shadowed = measure(name)
        cells = "".join(f"{ms:10.1f}" for ms in shadowed)
        ratios = ", ".join(f"{ms / plain:.1f} x" for ms in shadowed)
        print(f"{name:12}{plain:10.1f}{cells}     ({ratios})", flush=True)


if __name__ == "__main__":
    main()
