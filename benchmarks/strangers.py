"""The planted-fault table for strangers: models that nobody ran while Trueup was made, in float32 and the CPU's bfloat16 autocast.

Each is trained as it is, by another right implementation, with sums in another order and (float32) on the simulated device: all of
that must be aligned. Then with faults of the simulated device, and with wrong formulas written by hand: the first culprit must be
the place where they show first. The CPU itself plays the broken device, see `strange.Altered`.

    diffusion     float32   again                                aten  aligned
    diffusion     float32   schedule-not-cumulative              aten  ok
    faults at aten: 70 of 80 (87.5%) ...

``--held-out`` runs the models that nobody looks at while anything is mended, and prints counts alone; ``--open`` the others.
`make bench-strangers` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import locate
import trueup
from locate import LEVELS, Outcome
from strange import PLAIN, STRANGERS, Altered, Steps, Stranger
from trueup import simdev
from trueup.simdev import injection

FAULTS = 4
"""Faults of the simulated device for each model and precision; which ones, turns with the model."""
REORDERED = "reordered-reductions"
PRECISIONS = ("float32", "bfloat16")


def build(one: Stranger, form: str, precision: str, device: str = "cpu") -> Steps:
    """Build a training; in bfloat16 the forward of each module runs under autocast, the loss outside of modules does not."""
    torch.manual_seed(0)
    training = one.build(form, device)
    torch.manual_seed(1)
    if precision == "bfloat16":
        for module in training.model.modules():
            module.forward = torch.autocast(device, torch.bfloat16)(module.forward)
    return training


def run(one: Stranger, form: str, precision: str, into: Path, device: str = "cpu") -> None:
    """Train a stranger for its steps under capture."""
    shutil.rmtree(into, ignore_errors=True)
    training = build(one, form, precision, device)
    around = Altered() if device == "cpu" else contextlib.nullcontext()
    with around, trueup.capture(into, model=training.model, detail="stats") as capture:
        for _ in range(one.steps):
            training.step()
            capture.step()


def executed(one: Stranger, precision: str) -> set[str]:
    """Train a step and return which of the operators that can be broken it executes."""
    with Altered():
        return locate.executed(lambda: build(one, PLAIN, precision).step())


def firing(one: Stranger, precision: str) -> Iterator[str]:
    """Yield the faults that change a bit of the first steps, from another row of the table for each stranger."""
    operators, names = executed(one, precision), list(simdev.FAULTS)
    start = 7 * list(STRANGERS).index(one.name) % len(names)
    for fault in names[start:] + names[:start]:
        if operators.isdisjoint(simdev.FAULTS[fault].ops):
            continue
        with simdev.inject(fault), Altered():
            training = build(one, PLAIN, precision)
            fires = any(simdev.fired() for _ in range(one.steps) if training.step() is not None)
        if fires:
            yield fault


def run_broken(one: Stranger, fault: str, precision: str, into: Path) -> list[tuple[int, int]]:
    """Train on the broken CPU; return ``(step, seq)`` of the calls whose bits the fault changed, in order."""
    noting = injection._fired = locate._Noting()
    try:
        with simdev.inject(fault):
            noting.truth.clear()
            run(one, PLAIN, precision, into)
    finally:
        injection._fired = []
        simdev.heal()
    return noting.truth


def check_wrong(one: Stranger, wrong: str, baseline: Path, candidate: Path) -> Iterator[Outcome]:
    """Compare with a run of a wrong formula: the first culprit must be the place where it shows first."""
    place = one.wrongs[wrong]
    for level, compared in LEVELS.items():
        result = trueup.compare(baseline, candidate, level=compared)
        first = result.culprit
        word = locate.verdict_on(result, first is not None and place.holds(first))
        if first is None:
            said = result.sentence.splitlines()[0]
        else:
            said = f"{first.name} {first.level} {first.op} {first.kind} {first.error_out:.1e} of {first.expected:.1e}"
        yield Outcome(one.name, wrong, level, word, str(place), said)


def sound(one: Stranger, precision: str, work: Path, gpu: str | None) -> Iterator[Outcome]:
    """Compare with what must be aligned."""
    baseline, candidate = work / "plain", work / "sound"
    if gpu:
        run(one, PLAIN, precision, candidate, gpu)
        yield from locate.check_sound(one.name, f"on {gpu}", baseline, candidate)
        return
    for form in one.rights:
        run(one, form, precision, candidate)
        yield from locate.check_sound(one.name, form, baseline, candidate)
    devices = ["cpu", "npu"] if one.dense and precision == "float32" else ["cpu"]
    for device in devices:
        with simdev.noise(REORDERED):
            run(one, PLAIN, precision, candidate, device)
        yield from locate.check_sound(one.name, f"{REORDERED} on {device}", baseline, candidate)


def table(one: Stranger, precision: str, work: Path, gpu: str | None = None) -> Iterator[Outcome]:
    """Yield the cells of a stranger in a precision; with a GPU what is compared with the CPU's run is trained there."""
    simdev.heal()
    baseline, candidate = work / "plain", work / "broken"
    run(one, PLAIN, precision, baseline)
    yield from sound(one, precision, work, gpu)
    for wrong in one.wrongs:
        run(one, wrong, precision, candidate, gpu or "cpu")
        yield from check_wrong(one, wrong, baseline, candidate)
    for fault in islice(firing(one, precision), 0 if gpu else FAULTS):
        truth = run_broken(one, fault, precision, candidate)
        if truth:
            yield from locate.check(one.name, fault, baseline, candidate, truth)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(STRANGERS), default=list(STRANGERS), metavar="NAME")
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=PRECISIONS)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--held-out", action="store_true", help="run the held-out models alone, and print counts alone")
    which.add_argument("--open", action="store_true", help="leave the held-out models out")
    parser.add_argument("--gpu", metavar="DEVICE", help="cuda: train there what is compared with the CPU's run; no planted kernels")
    parser.add_argument("--counts", action="store_true", help="print no cells, only the counts")
    parser.add_argument("--json", type=Path, help="write every cell there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.gpu:  # beside it autograd has another accelerator
        simdev.install()
    started, cells = time.perf_counter(), []
    chosen = [STRANGERS[name] for name in options.only]
    if options.held_out or options.open:
        chosen = [one for one in chosen if one.held_out == options.held_out]
    with tempfile.TemporaryDirectory() as work:
        for one in chosen:
            for precision in options.precisions:
                for outcome in table(one, precision, Path(work), options.gpu):
                    cells.append((precision, one.held_out, outcome))
                    if options.held_out or options.counts:
                        continue
                    line = f"{outcome.model:14} {precision:9} {outcome.what:36} {outcome.level:5} {outcome.word:12}"
                    detail = "" if outcome.word in ("ok", "aligned") else f" truth: {outcome.truth}; said: {outcome.said}"
                    print(line + detail, flush=True)
    for precision in options.precisions:
        for name, (right, total) in locate.rates(outcome for p, _, outcome in cells if p == precision).items():
            print(f"{precision}, {name}: {right} of {total} ({right / max(total, 1):.1%})")
    print(f"{time.perf_counter() - started:.0f} s")
    if options.json:
        rows = [asdict(outcome) | {"precision": precision, "held_out": held_out} for precision, held_out, outcome in cells]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
