"""Reproducers of Paddle's planted faults: for each model and fault the first wrong call of each phase becomes a test.

Each test is executed with the fault in a second device's kernels, where it must fail, and without, where it must pass. The second
device is that of the tests, built by `build` below; calls are recorded on the CPU: ``python benchmarks/reproduce_paddle.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests" / "with_paddle"
DEVICE, AGAINST = "host", "cpu"


def build(into: Path) -> None:
    """Build the second device and start this program again with it: Paddle loads devices when it is imported."""
    spec = importlib.util.find_spec("paddle")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    include = Path(spec.submodule_search_locations[0]) / "include"
    made = ["c++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{include}", str(TESTS / "device" / "host_device.cc")]
    subprocess.run([*made, "-o", str(into / "libhost_device.so")], check=True)
    environment = os.environ | {"CUSTOM_DEVICE_ROOT": str(into), "FLAGS_use_stride_kernel": "0"}
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)


@dataclass
class Cell:
    """One test."""

    model: str
    fault: str
    phase: str
    word: str
    """ok; or what it does: passes with the fault, fails without, or why it is not there."""


def cells(model: str, faults: list[str], work: Path) -> Iterator[Cell]:
    """Yield the tests of a model's faults."""
    sys.path[:0] = [str(TESTS / "cases"), str(Path(__file__).parent)]
    import faulty

    import replay_paddle
    import trueup
    from trueup.recording.adapters.paddle.executing import Replayer
    from trueup.recording.execution.recorded import RecordedCalls

    replay_paddle.capture(model, work / model)
    calls = RecordedCalls(trueup.open_capture(work / model))
    replayer = Replayer(calls, DEVICE)
    for fault in faults or list(faulty.FAULTS):
        done: set[str] = set()
        for step in calls.capture.steps:
            for call in calls.of_step(0, step, ("api",)):
                ops = [f"paddle._C_ops.{op}" for op in faulty.FAULTS[fault].ops]
                wanted = call.key.phase == "backward" if faulty.FAULTS[fault].phase == "backward" else call.key.phase != "backward"
                if call.key.phase in done or not wanted or not call.computed or not (call.key.op in ops or "Tensor" in call.key.op):
                    continue
                with faulty.inject(fault) as injection:
                    injection.spares_cpu = True
                    blamed = replayer.replay(call).verdict == "wrong"
                if blamed:
                    done.add(call.key.phase)
                    yield Cell(model, fault, call.key.phase, _tried(calls, call, fault, work / f"{model}-{fault}-{call.key.phase}"))


def _tried(calls: Any, call: Any, fault: str, folder: Path) -> str:
    import faulty

    from trueup.analysis.rerun.reproduce import write_files
    from trueup.recording.adapters.paddle.executing import CASES
    from trueup.recording.execution.cases import Case, Chain
    from trueup.recording.execution.recorded import NotReplayable

    folder.mkdir()
    try:
        chain = CASES.settled(Chain.alone(Case.of(calls, call)), AGAINST)
        told = json.loads(json.dumps(CASES.saved(CASES.written(chain, None, AGAINST, {}), folder)))
    except NotReplayable as reason:
        return str(reason)
    test = write_files(folder, chain.target, told, device=DEVICE, against=AGAINST, notes=[], origin=[], simulated=False)
    made = runpy.run_path(str(test))
    if wrong := made["verdicts"](made["run"](DEVICE), made["run"](AGAINST)):
        return f"fails without: {wrong[0]}"
    with faulty.inject(fault) as injection:
        injection.spares_cpu = True
        found = made["run"](DEVICE)
    return "ok" if made["verdicts"](found, made["run"](AGAINST)) else "passes with the fault"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["transformer", "resnet", "lstm", "ctc"])
    parser.add_argument("--faults", nargs="*", default=[])
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        if "CUSTOM_DEVICE_ROOT" not in os.environ:
            build(Path(work))
        found = []
        for model in options.models:
            for cell in cells(model, options.faults, Path(work)):
                found.append(cell)
                print(f"{cell.model:12} {cell.fault:36} {cell.phase:10} {cell.word}", flush=True)
        right = sum(cell.word == "ok" for cell in found)
        print(f"{right} of {len(found)} tests fail with the fault and pass without; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
