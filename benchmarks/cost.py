"""What a capture costs: step time with it over step time without, and how fast two captures are compared.

Each mode runs in a process of its own, rounds interleaved over the modes; a figure is the median over steps of all rounds, the
range is that of the rounds' medians. `make bench` runs it. Set the machine aside: neighbours make these numbers meaningless.

    gpt      plain                          154.2 ms
    gpt      module stats                   1.10 x [1.08-1.13]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent

MODES: dict[str, dict[str, object] | None] = {
    "plain": None,
    "idle": {"steps": "1000000:"},
    "module stats": {"level": "module"},
    "api digest": {"level": "api", "detail": "digest", "exclude_optimizer": True},
    "api stats": {"level": "api", "exclude_optimizer": True},
    "api tensor": {"level": "api", "detail": "tensor", "exclude_optimizer": True},
    "aten stats": {"level": "aten"},
    "all levels stats": {},
}
"""Optimizer outside for the api level, as in the figures other tools publish; inside for aten and all levels."""


def measure(model: str, mode: str, steps: int, into: Path) -> dict[str, float]:
    """Run one mode in this process: milliseconds of each measured step, bytes a step, peak memory in MB."""
    import torch

    sys.path.insert(0, str(HERE))
    import models

    torch.set_num_threads(2)
    step = models.build(model)
    for _ in range(3):
        step()
    options = MODES[mode]
    times = []
    if options is None:
        for _ in range(steps):
            times.append(_timed(step))
    else:
        import trueup

        options = dict(options)
        if options.pop("exclude_optimizer", False):
            options["phase"] = ["forward", "backward"]
        with trueup.capture(into, on_error="stop", **options):  # type: ignore[arg-type]
            step()
            for _ in range(steps):
                times.append(_timed(step))
    written = sum(f.stat().st_size for f in into.rglob("*") if f.is_file()) / (steps + 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms": statistics.median(times), "mb": written / 2**20, "peak": peak}


def _timed(step) -> float:  # type: ignore[no-untyped-def]
    started = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - started)


def in_process(model: str, mode: str, steps: int) -> dict[str, float]:
    """Measure a mode in a fresh process."""
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, __file__, "--one", model, mode, str(steps), str(Path(work) / "capture")]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(model: str, steps: int) -> None:
    """Capture a model twice and time the comparison."""
    with tempfile.TemporaryDirectory() as work:
        for side in ("a", "b"):
            command = [sys.executable, __file__, "--one", model, "all levels stats", str(steps), str(Path(work) / side)]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        import trueup

        rows = trueup.open_capture(Path(work) / "a").rows
        times = []
        for _ in range(3):
            started = time.perf_counter()
            result = trueup.compare(Path(work) / "a", Path(work) / "b")
            times.append(time.perf_counter() - started)
        shutil.rmtree(Path(work) / "a")
    best, worst = min(times), max(times)
    print(f"{model:8} compare {rows:,} slots a side: {best:.2f}-{worst:.2f} s, {rows / best:,.0f} slots/s, {result.verdict}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "MODE", "STEPS", "DIRECTORY"), help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="*", default=["gpt", "resnet"])
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    if options.one:
        model, mode, steps, into = options.one
        print(json.dumps(measure(model, mode, int(steps), Path(into))))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")
    for model in options.models:
        rounds = [{mode: in_process(model, mode, options.steps) for mode in options.modes} for _ in range(options.rounds)]
        plain = statistics.median(r["plain"]["ms"] for r in rounds)
        for mode in options.modes:
            ratios = sorted(r[mode]["ms"] / r["plain"]["ms"] for r in rounds)
            figures = f"{statistics.median(ratios):.2f} x [{ratios[0]:.2f}-{ratios[-1]:.2f}]"
            figures = f"{plain:.1f} ms" if mode == "plain" else figures
            one = rounds[0][mode]
            print(f"{model:8} {mode:18} {figures:22} {one['mb']:8.1f} MB/step  peak {one['peak']:.0f} MB", flush=True)
        compare(model, 3)


if __name__ == "__main__":
    main()
