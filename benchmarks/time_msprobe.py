"""Times a model's step with and without msprobe, mode by mode; prints a line of JSON each. Runs in msprobe's own environment.

The optimizer stays outside as its users do it: the debugger is stopped before ``optimizer.step()``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import models
from machine import peak_megabytes, wait_until_quiet
from modes import MODES, Mode
from stepping import DISTURBED, count, disturbed_share, mean, median, run


def debugged(step: models.Training, config: dict[str, Any], optimizer: bool, folder: Path) -> Callable[[], None]:
    """Return a function that runs one step under msprobe."""
    from msprobe.pytorch import PrecisionDebugger

    path = folder / "config.json"
    path.write_text(json.dumps({"dump_path": str(folder / "dump"), "rank": [], "step": [], "async_dump": False, **config}))
    debugger = PrecisionDebugger(config_path=str(path))
    if not optimizer:
        step.optimizer.register_step_pre_hook(lambda *_: debugger.stop())

    def one() -> None:
        debugger.start(model=step.model)
        step()
        debugger.stop()
        debugger.step()

    return one


def measure(model: str, mode: Mode, folder: Path, seconds: float, patience: float) -> dict[str, float]:
    """Run a mode in this process, again where others disturbed it and patience is left."""
    torch.set_num_threads(2)
    step = models.build(model)
    for _ in range(3):
        step()
    wait_until_quiet(patience)
    before = run(step, seconds)
    peak = peak_megabytes()
    assert mode.rival is not None
    one = debugged(step, mode.rival, mode.rival_optimizer, folder)
    one()
    started = time.perf_counter()
    one()
    guess, steps = time.perf_counter() - started, 2
    chunks = run(one, seconds, guess)
    steps += count(chunks)
    if disturbed_share(chunks) >= DISTURBED and wait_until_quiet(patience) < patience:
        chunks = run(one, seconds, guess)
        steps += count(chunks)
    written = sum(f.stat().st_size for f in (folder / "dump").rglob("*") if f.is_file())
    return {
        "plain_mean": mean(before), "plain_median": median(before), "mean": mean(chunks), "median": median(chunks),
        "mb": written / 2**20 / steps, "memory": peak_megabytes() - peak,
        "plain_peak": peak, "steps": count(chunks), "disturbed": disturbed_share(before + chunks),
    }  # fmt: skip


def main() -> None:
    """Take ``{model, modes, seconds, patience, folder}`` from the command line."""
    asked = json.loads(sys.argv[1])
    folder = Path(asked["folder"])
    if asked["model"] == "llama":
        import transformers.models.llama.modeling_llama  # noqa: F401 - once for all children
    for name in asked["modes"]:
        child = os.fork()  # before PyTorch starts its threads; msprobe takes one configuration a process
        if child == 0:
            with contextlib.redirect_stdout(sys.stderr):
                found = measure(asked["model"], MODES[name], folder, asked["seconds"], asked["patience"])
            print(json.dumps({"mode": name, **found}), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{asked['model']} {name}: the process failed")
        shutil.rmtree(folder / "dump", ignore_errors=True)


if __name__ == "__main__":
    main()
