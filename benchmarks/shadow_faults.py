"""The planted-fault table through a shadow run: no baseline, no second run; each call is judged by itself.

A cell is ok where the first culprit is the first call that the fault made wrong by more than 2e-6 (32 units of float32), and every
culprit is a call that the fault changed. Under noise, and on the healthy device, there must be no culprit at all.

    model        fault                                word   culprits  truth
    lstm_tagger  lstm-backward-cell-gate              ok     54        rnn backward aten::_thnn_fused_lstm_cell_backward_impl step 0
    faults: 161 of 161 (100.0%); noise and healthy rows without blame: 45 of 45

`make bench-shadow` runs it; tests/rerun/test_shadow_faults.py holds a part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import locate
import trueup
import zoo
from trueup import simdev
from trueup.recording.execution.shadow import ShadowResult
from trueup.simdev import injection

STEPS = 2
VISIBLE = 2e-6
"""Relative error from which a fault counts: the least that a comparison of two runs is asked to find, too."""

Place = tuple[int, int]


@dataclass
class Cell:
    """A model with a fault, a noise row, or neither. ``word``: ok, wrong, missed, invisible, aligned, false."""

    model: str
    what: str
    word: str
    culprits: int
    truth: str
    said: str


def shadowed(model: str, fault: str | None = None, noise: str | None = None, **options: Any) -> tuple[ShadowResult, list[Place]]:
    """Train a zoo model in the shadow of the CPU; return what was found and the calls whose bits the fault changed."""
    simdev.heal()
    noting = injection._fired = locate._Noting()
    with contextlib.ExitStack() as stack:
        training = zoo.build(model, "npu")
        if noise is not None:
            stack.enter_context(simdev.noise(noise))
        if fault is not None:
            stack.enter_context(simdev.inject(fault))
        noting.truth.clear()
        with trueup.shadow(training.model, quiet=True, **options) as shadow:
            for _ in range(STEPS):
                training.step()
                shadow.step()
    injection._fired = []
    return shadow.result, noting.truth


def check(model: str, fault: str) -> Cell | None:
    """Return the cell of a fault; None where the model does not execute what is broken."""
    result, fired = shadowed(model, fault)
    if not fired:
        return None
    errors: dict[Place, float] = {}
    names: dict[Place, str] = {}
    for row in result.calls.to_pylist():
        if row["state"] != "not judged":
            place = row["step"], row["seq"]
            error = float("inf") if row["excess"] == float("inf") else row["error"] or 0.0
            errors[place] = max(errors.get(place, 0.0), error)
            names[place] = f"{row['scope']} {row['phase']} {row['op']} step {row['step']}"
    visible = [place for place in fired if errors.get(place, 0.0) > VISIBLE]
    truth = names.get(visible[0] if visible else fired[0], "a call that was not judged")
    named = [(b.step, b.seq) for b in result.culprits]
    strangers = [names[place] for place in named if place not in fired]
    first = named[0] if named else None
    said = "" if first is None else f"{names[first]} {result.culprits[0].error:.1e}"
    if not visible and not strangers:
        word = "invisible"
    elif first is None:
        word = "missed"
    else:
        word = "ok" if first in fired and first <= visible[0] and not strangers else "wrong"
    return Cell(model, fault, word, len(named), truth, said + (f" strangers: {strangers[:3]}" if strangers else ""))


def check_sound(model: str, noise: str | None) -> Cell:
    """Return the cell of a device that does nothing wrong."""
    result, _ = shadowed(model, noise=noise)
    said = "; ".join(f"{b.name} {b.op} {b.slot} {b.excess:.1f} x {b.reason}" for b in result.culprits[:3])
    return Cell(model, noise or "healthy", "false" if result.culprits else "aligned", len(result.culprits), "nothing", said)


def table(models: Iterable[str], faults: Iterable[str], noise: Iterable[str]) -> Iterator[Cell]:
    """Yield the cells, model by model."""
    for model in models:
        result, _ = shadowed(model)
        executed = set(result.calls["op"].to_pylist())
        for row in (None, *noise):
            yield check_sound(model, row)
        for fault in faults:
            if {op.partition(".")[0] for op in simdev.FAULTS[fault].ops} & executed and (cell := check(model, fault)):
                yield cell


def main() -> None:
    """Print the table and the rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(zoo.MODELS))
    parser.add_argument("--faults", nargs="*", default=list(simdev.FAULTS))
    parser.add_argument("--noise", nargs="*", default=list(simdev.NOISE))
    parser.add_argument("--json", type=Path, help="write every cell there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    simdev.install()
    began, cells = time.perf_counter(), []
    for cell in table(options.models, options.faults, options.noise):
        cells.append(cell)
        detail = "" if cell.word in ("ok", "aligned") else f"  said: {cell.said}"
        print(f"{cell.model:12} {cell.what:36} {cell.word:9} {cell.culprits:5}  {cell.truth}{detail}", flush=True)
    faults = [c for c in cells if c.truth != "nothing" and c.word != "invisible"]
    sound = [c for c in cells if c.truth == "nothing"]
    right, quiet = sum(c.word == "ok" for c in faults), sum(c.word == "aligned" for c in sound)
    print(f"faults: {right} of {len(faults)} ({right / max(1, len(faults)):.1%}; "
          f"{sum(c.word == 'invisible' for c in cells)} more are invisible, below {VISIBLE:g} in every call)")  # fmt: skip
    print(f"noise and healthy rows without blame: {quiet} of {len(sound)}")
    print(f"{time.perf_counter() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(c) for c in cells], indent=1))


if __name__ == "__main__":
    main()
