"""Times the comparison of two captures of a model's training, and what `trueup overflow` makes of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 3


def capture(model: str, into: Path) -> None:
    """Record all levels of `STEPS` steps."""
    import torch

    import models
    import trueup

    torch.set_num_threads(2)
    step = models.build(model)
    with trueup.capture(into, on_error="stop"):
        for _ in range(STEPS):
            step()


def compare(model: str) -> str:
    """Capture a model twice, in processes of their own, compare three times, and say how long it took."""
    with tempfile.TemporaryDirectory() as work:
        sides = [Path(work) / side for side in ("baseline", "candidate")]
        for side in sides:
            command = [sys.executable, __file__, json.dumps([model, str(side)])]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
        import trueup

        rows = trueup.open_capture(sides[0]).rows
        times = []
        for _ in range(3):
            started = time.perf_counter()
            result = trueup.compare(*sides)
            times.append(time.perf_counter() - started)
        started = time.perf_counter()
        judged = trueup.overflow(sides[0])
        judging = time.perf_counter() - started
    best = min(times)
    took = f"{best:.2f}-{max(times):.2f} s, {rows / best:,.0f} slots/s"
    overflow = f"overflow of {rows:,} slots took {judging:.2f} s, {rows / judging:,.0f} slots/s: {judged.verdict}"
    return f"{model}: comparing {rows:,} slots a side took {took}: {result.verdict}\n{model}: {overflow}"


if __name__ == "__main__":
    name, directory = json.loads(sys.argv[1])
    capture(name, Path(directory))
