"""How many recorded calls a second `trueup replay` and `verify-capture` execute, from the shell, start of processes included.

    calls a second     calls   replay -j 1          -j 2   verify -j 1
    gpt2               2,168           253           389           366

Each row is a real model of the tests, two steps on the CPU with all tensors, replayed on the simulated device. `make bench`
prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = ("gpt2", "resnet")
WAYS: dict[str, list[str]] = {
    "replay -j 1": ["replay", "-j", "1"],
    "-j 2": ["replay", "-j", "2"],
    "verify -j 1": ["verify-capture", "-j", "1"],
}


def captured(model: str, into: Path) -> None:
    """Record a model in a process of its own."""
    code = f"import sys, pathlib; sys.path[:0] = {[str(HERE), str(HERE.parent / 'tests')]!r}\n"
    code += f"import replay_faults; replay_faults.capture({model!r}, pathlib.Path({str(into)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment(), capture_output=True)


def rate(way: list[str], capture: Path) -> tuple[int, float]:
    """Return how many calls were executed, and how many a second, from the start of the command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        device = ["--device", "npu", "--simulated"] if way[0] == "replay" else []
        command = [sys.executable, "-m", "trueup", way[0], str(capture), *device, *way[1:], "-o", f"{folder}/out"]
        began = time.perf_counter()
        subprocess.run(command, check=False, env=_environment(), capture_output=True)
        seconds = time.perf_counter() - began
        counts = json.loads(Path(folder, "out", "replay.json").read_text())["counts"]
    return sum(counts.values()), sum(counts.values()) / seconds


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    print(f"{'calls a second':16}{'calls':>8}" + "".join(f"{name:>14}" for name in WAYS))
    with tempfile.TemporaryDirectory() as work:
        for model in options.models:
            captured(model, Path(work) / model)
            rates = [rate(way, Path(work) / model) for way in WAYS.values()]
            print(f"{model:16}{rates[0][0]:8,}" + "".join(f"{each:14,.0f}" for _, each in rates), flush=True)


if __name__ == "__main__":
    main()
