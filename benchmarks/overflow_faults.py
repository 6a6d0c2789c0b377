"""Plants an overflow in each training of `tests/anomalies/planted.py`, in BERT-CRF and on one rank of two: who was blamed?

    case                       level  blamed                                            right
    attention_without_scaling  api    overflow 1.attention/torch.Tensor.matmul forward  yes

and runs the healthy ones, full of infinities, which must be silent. `python benchmarks/overflow_faults.py` runs it (2 minutes).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "examples" / "bert_crf")]

import torch  # noqa: E402

import trueup  # noqa: E402
from anomalies import planted  # noqa: E402
from trueup import simdev  # noqa: E402

LEVELS = ("api", "aten")


def saturating() -> None:
    """Train on a device that returns 65504 instead of Inf."""
    with simdev.inject("products-saturate-65504"):
        planted.saturating()


def bert_crf() -> None:
    """Train the example of examples/bert_crf with its large emissions."""
    import train

    sys.argv = ["train.py", "--large", "--steps", "2"]
    train.main()


MORE: dict[str, tuple[Callable[[], None], tuple[Any, ...]]] = {
    "bert_crf": (bert_crf, ("overflow", "crf", "forward", 0, "torch.Tensor.add", "aten::add")),
    "saturating": (saturating, ("saturated", "1", "forward", 0, "torch.nn.functional.linear", "aten::addmm")),
}


def main() -> None:
    """Run all cases at both levels and print a line each."""
    simdev.install()
    torch.set_num_threads(1)
    cases = {name: (getattr(planted, name), expected) for name, expected in planted.ORIGINS.items()} | MORE
    right = 0
    print(f"{'case':28}{'level':7}{'blamed':64}right")
    for name, (train, (kind, scope, phase, step, *ops)) in cases.items():
        for level, op in zip(LEVELS, ops, strict=True):
            first = judged(train, level).first
            place = None if first is None else (first.kind, first.place.scope, first.place.phase, first.place.step, first.place.op)
            right += tell(name, level, place, (kind, scope, phase, step, op))
    for level in LEVELS:
        first = on_rank_1(level).first
        place = None if first is None else (first.kind, first.place.rank, first.place.phase, first.place.step)
        right += tell("rank 1 under DDP", level, place, ("overflow", 1, "backward", 0))
    total = len(LEVELS) * (len(cases) + 1)
    print(f"\nthe right origin first: {right} of {total}")
    loud = [(one.__name__, level) for one in planted.HEALTHY for level in LEVELS if judged(one, level).anomalies]
    healthy = len(LEVELS) * len(planted.HEALTHY)
    print(f"healthy and silent: {healthy - len(loud)} of {healthy} {loud or ''}")


def tell(name: str, level: str, place: tuple[Any, ...] | None, expected: tuple[Any, ...]) -> bool:
    """Print one line."""
    said = "nothing" if place is None else " ".join(map(str, place))
    print(f"{name:28}{level:7}{said:64}{'yes' if place == expected else f'NO, {expected}'}", flush=True)
    return place == expected


def judged(train: Callable[[], None], level: str) -> Any:
    """Train under capture and judge it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        with trueup.capture(Path(folder) / "run", level=level, on_error="stop"):
            train()
        return trueup.overflow(Path(folder) / "run")


def on_rank_1(level: str) -> Any:
    """Train in two gloo processes, of which rank 1 overflows, and judge both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        job = f"from anomalies.ranks import train; train({f'{folder}/run'!r}, ({level!r},))"
        command = [sys.executable, "-c", job]
        started = [subprocess.Popen(command, env=common | {"RANK": str(rank)}) for rank in (0, 1)]
        if any(one.wait(300) for one in started):
            raise SystemExit("the ranks failed")
        return trueup.overflow(f"{folder}/run")


if __name__ == "__main__":
    main()
