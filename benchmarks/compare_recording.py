"""Records one step of the benchmark's GPT for a comparison, by Trueup or, in its own environment, by msprobe: the same numbers.

The candidate's embedding differs from the baseline's by 1e-7 of each weight, a rounding, so that all that is computed differs in
its last bits and nothing can be compared by its digest. The optimizer stays outside, as msprobe's users do it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import models

ROUNDING = 1e-7


def training(side: str) -> models.Training:
    """Return the training of a side, ``baseline`` or ``candidate``."""
    step = models.build("gpt")
    if side == "candidate":
        with torch.no_grad():
            weight = step.model.tok.weight
            weight *= 1 + ROUNDING * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return step


def by_trueup(side: str, detail: str, folder: Path) -> None:
    import trueup

    step = training(side)
    with trueup.capture(
        folder / side, model=step.model, level="api", phase=["forward", "backward"], detail=detail, on_error="stop"
    ):
        step()


def by_msprobe(side: str, detail: str, folder: Path) -> None:
    from msprobe.pytorch import PrecisionDebugger

    step = training(side)
    task: dict[str, Any] = {"task": "tensor"} if detail == "tensor" else {"task": "statistics"}
    if detail != "tensor":
        task["statistics"] = {"summary_mode": "statistics"}
    (folder / side).mkdir(parents=True)
    config = folder / side / "config.json"
    places = {"dump_path": str(folder / side / "dump"), "rank": [], "step": [], "level": "L1", "async_dump": False}
    config.write_text(json.dumps(places | task))
    debugger = PrecisionDebugger(config_path=str(config))
    step.optimizer.register_step_pre_hook(lambda *_: debugger.stop())
    debugger.start(model=step.model)
    step()
    debugger.stop()
    debugger.step()


def main() -> None:
    """Take ``{tool, side, detail, folder}`` from the command line."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    tool = by_msprobe if asked["tool"] == "msprobe" else by_trueup
    tool(asked["side"], asked["detail"], Path(asked["folder"]))


if __name__ == "__main__":
    main()
