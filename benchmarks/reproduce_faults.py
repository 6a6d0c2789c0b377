"""The planted-fault table through `trueup reproduce`: does each reproducer fail on the fault and pass without?

Each model trains two steps on the CPU, recorded with all tensors. For each fault, calls whose result it changes on the simulated
device are judged one by one; of those found wrong the first of each level and phase becomes a reproducer, whose test is then loaded
and run on the broken device, on the healthy one, and on the CPU.

A fault that no single call shows is tried with `--context`: the calls that it may change, with the fewest calls before them.

    right    fails on the fault, passes on the healthy device and on the CPU
    weak     passes on the fault
    strict   fails where nothing is wrong
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import trueup
import zoo
from replay_faults import capture, distinct
from trueup import simdev
from trueup.analysis.rerun.reproduce import run_test, write_files
from trueup.recording.adapters.torch.executing import CASES, Replayer, judged, written
from trueup.recording.execution.cases import Case, Chain
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls
from trueup.simdev import injection


def reproducer(chain: Chain, folder: Path) -> Any:
    """Write calls of which the last has the CPU's results, and return their test as a module."""
    told = written(chain, "npu", "cpu", {})
    folder.mkdir(parents=True)
    told = CASES.saved(told, folder)
    test = write_files(folder, chain.target, told, device="npu", against="cpu", notes=[], origin=[], simulated=True)
    spec = importlib.util.spec_from_file_location(f"reproducer_{folder.name}", test)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIRED: set[str] = set()
"""Faults that changed the result of a call."""


def wrong_calls(calls: RecordedCalls, chosen: list[RecordedCall]) -> Iterator[tuple[RecordedCall, Chain]]:
    """Yield calls that the fault that is on makes wrong: the first of each level and phase."""
    found: set[tuple[str, str]] = set()
    replayer = Replayer(calls, "npu")
    for call in chosen:
        if (call.key.level, call.key.phase) in found:
            continue
        injection._fired.clear()
        try:
            replayer.execute(call, replayer.target)
        except NotReplayable:
            continue
        if injection._fired:
            FIRED.update(fired.fault for fired in injection._fired)
            chain, outcome = judged(Chain.alone(Case.of(calls, call)), "npu", "cpu")
            if outcome.verdict == "wrong":
                found.add((call.key.level, call.key.phase))
                yield call, chain


def capture_rest(into: Path) -> None:
    """Record what no model of the zoo does: a GRU, cumulative sums, scattered sums and masks, products beyond 65504."""
    torch.manual_seed(0)
    gru, x = torch.nn.GRU(6, 8), torch.randn(5, 3, 6, requires_grad=True)
    index = torch.randint(0, 3, (4, 40))
    with trueup.capture(into, model=gru, detail="tensor", level=["api", "aten"]):
        gru(x)[0].square().mean().backward()
        y = torch.randn(4, 40).cumsum(1)
        torch.mm(300 * torch.randn(8, 64).half(), 300 * torch.randn(64, 8).half())
        torch.zeros(4, 40).scatter_add(1, index, y).masked_fill(y > 0, 9.0)


def rows(model: str, faults: list[str], work: Path) -> Iterator[tuple[str, RecordedCall, str, str]]:
    """Yield ``(fault, call, word, what it said)`` for a model."""
    capture_rest(work / model) if model == "rest" else capture(model, work / model)
    calls = RecordedCalls(trueup.open_capture(work / model))
    chosen = distinct(calls)
    for fault in faults:
        simdev.heal()
        with simdev.inject(fault):
            made = []
            for call, chain in wrong_calls(calls, chosen):
                module = reproducer(chain, work / f"{model}-{fault}-{call.seq}")
                made.append((call, module, module.verdicts(module.run("npu"), module.run("cpu"))))
        for call, module, said in made:
            sound = module.verdicts(module.run("npu"), module.run("cpu")) + module.verdicts(module.run("cpu"), module.run("cpu"))
            yield fault, call, "strict" if sound else "right" if said else "weak", "; ".join(sound or said)


def with_context(model: str, fault: str, work: Path) -> Iterator[tuple[RecordedCall, str, str]]:
    """Yield the first call of a model that fails on a fault after other calls: as `trueup reproduce --context` finds it."""
    calls = RecordedCalls(trueup.open_capture(work / model))
    operators = {name.partition(".")[0] for name in simdev.FAULTS[fault].ops}
    may = [call for call in calls.of_step(0, calls.capture.steps[-1], ("aten",)) if call.key.op in operators]
    os.environ["TRUEUP_SIMDEV_FAULT"] = fault
    try:
        for call in may[:4]:
            into = work / f"context-{model}-{call.seq}"
            found = trueup.reproduce(work / model, call.seq, into, device="npu", simulated=True, context=True, seconds=120.0)
            if found.fails:
                del os.environ["TRUEUP_SIMDEV_FAULT"]
                sound = [run_test(found.test, device, "cpu", "trueup.simdev")[0] == 0 for device in ("npu", "cpu")]
                yield call, "right" if found.checked and all(sound) else "strict", found.sentence
                return
    finally:
        os.environ.pop("TRUEUP_SIMDEV_FAULT", None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*zoo.MODELS, "rest"])
    parser.add_argument("--faults", nargs="*", default=list(simdev.FAULTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    simdev.install()
    started, words, felt = time.perf_counter(), [], set()
    with tempfile.TemporaryDirectory() as work:
        for model in options.models:
            for fault, call, word, said in rows(model, options.faults, Path(work)):
                words.append(word)
                felt.add(fault)
                print(f"{model:12} {fault:36} {word:7} {call.key.level:4} {call.kind} {call.key.phase}: {said[:120]}", flush=True)
        hidden = [fault for fault in options.faults if fault not in felt]
        for fault in [fault for fault in hidden if fault in FIRED]:
            for model in options.models:
                for call, word, said in with_context(model, fault, Path(work)):
                    words.append(word)
                    felt.add(fault)
                    print(f"{model:12} {fault:36} {word:7} {call.key.level:4} {call.kind} {call.key.phase}: {said}", flush=True)
                if fault in felt:
                    break
    print(f"{words.count('right')} of {len(words)} reproducers fail on the fault and pass without; "
          f"{len(felt)} of {len(options.faults)} faults; {time.perf_counter() - started:.0f} s")  # fmt: skip
    print(f"no single call shows: {', '.join(hidden) or 'none'}; nor with others before it: "
          f"{', '.join(f for f in hidden if f not in felt) or 'none'}")  # fmt: skip


if __name__ == "__main__":
    main()
