"""The planted-fault table through `trueup replay`: which calls are found wrong when each gets the baseline's own inputs.

Each model trains two steps on the CPU, recorded with all tensors; every call is executed again on the simulated device: healthy,
with each row of noise, with each fault. A cell counts where the fault changed the result of a replayed call by more than rounding:

    ok       the worst call, and the first in the order of execution, are calls that the fault changed while they were replayed
    wrong    a call is blamed that the fault did not change
    missed   no call is blamed, though the fault changed one beyond what is explained

`make bench-replay` prints it, with the rate in calls a second and what `trueup verify-capture` says of each capture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import trueup
import zoo
from trueup import simdev
from trueup.recording.adapters.torch.executing import Replayer
from trueup.recording.adapters.torch.recorded_call import Place
from trueup.recording.execution.judging import BLAMED, Outcome, Result, same_bytes, worse
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls
from trueup.simdev import injection

STEPS = 2
CHANGED = 2e-6
"""Relative error of a result from which a fault is more than rounding: 32 units of float32, as in locate.py."""


@dataclass
class Cell:
    """One cell of the table."""

    model: str
    what: str
    word: str
    changed: int
    """Replayed calls that the fault changed."""
    blamed: int
    beside: int
    """Blamed calls that it did not change."""
    said: str
    doubted: int = 0
    """Suspicious calls that it did not change."""


def capture(model: str, into: Path, detail: str = "tensor") -> None:
    """Record a model's first steps on the CPU, as a rule with all tensors."""
    shutil.rmtree(into, ignore_errors=True)
    training = zoo.build(model, "cpu")
    with trueup.capture(into, model=training.model, detail=detail, level=["api", "aten"]) as running:
        for _ in range(STEPS):
            training.step()
            running.step()


def distinct(calls: RecordedCalls) -> list[RecordedCall]:
    """Return the calls to replay: two of each signature, for a fault may show in the second call of a shape only."""
    found: dict[object, list[RecordedCall]] = {}
    for step in calls.capture.steps:
        for call in calls.of_step(0, step):
            if call.outputs:
                found.setdefault(call.signature(), []).append(call)
    return sorted((call for same in found.values() for call in same[:2]), key=lambda call: call.seq)


class Remembering(Replayer):
    """A replayer that computes each truth once, and judges again only what came out otherwise than on the healthy device."""

    def __init__(self, calls: RecordedCalls, device: str) -> None:
        super().__init__(calls, device)
        self._truths: dict[int, Result] = {}
        self._healthy: dict[int, tuple[Result | None, Outcome]] = {}

    def execute(self, call: RecordedCall, place: Place) -> Result:
        """Execute a call, the truth once."""
        if place is not self.truth:
            return super().execute(call, place)
        if call.seq not in self._truths:
            self._truths[call.seq] = super().execute(call, place)
        return self._truths[call.seq]

    def again(self, call: RecordedCall) -> Outcome:
        """Replay a call; where it gives the healthy device's bits, the outcome is known."""
        try:
            result: Result | None = self.execute(call, self.target)
        except NotReplayable:
            result = None
        if call.seq in self._healthy:
            before, known = self._healthy[call.seq]
            if result is None or before is None:
                same = result is before
            else:
                same = all(same_bytes(a, before.arrays[s]) for s, a in result.arrays.items())
            return known if same else self.replay(call, result)
        found = self.replay(call, result)
        self._healthy[call.seq] = result, found
        return found


def row(model: str, what: str, replayer: Remembering, chosen: Iterable[RecordedCall], fault: bool) -> Cell | None:
    """Replay the calls of a model under one row; None where a fault changes none of them."""
    outcomes: list[Outcome] = []
    changed: set[int] = set()
    for call in chosen:
        injection._fired.clear()
        outcomes.append(replayer.again(call))
        if injection._fired:
            changed.add(call.seq)
    blamed = [o for o in outcomes if o.verdict in BLAMED]
    doubted = [o for o in outcomes if o.verdict == "suspicious" and o.seq not in changed]
    beside = [o for o in blamed if o.seq not in changed]
    said = "; ".join(f"{o.kind} {o.shapes[:40]}: {o.sentence}" for o in sorted(beside or blamed, key=worse)[:2])
    if not fault:
        word = "sound" if not blamed else "false"
        return Cell(model, what, word, 0, len(blamed), len(blamed), said, len(doubted))
    felt = [o for o in outcomes if o.seq in changed and (o.error > CHANGED or o.verdict in BLAMED)]
    if not felt:
        return None
    word = "wrong" if beside else "ok" if blamed else "missed"
    if word == "missed":
        said = "; ".join(f"{o.verdict} {o.kind}: {o.sentence}" for o in sorted(felt, key=worse)[:2])
    return Cell(model, what, word, len(changed), len(blamed), len(beside), said, len(doubted))


def table(
    models: Iterable[str], faults: Iterable[str], noise: Iterable[str], work: Path, detail: str = "tensor"
) -> Iterator[Cell]:  # fmt: skip
    """Yield the cells of the table, model by model."""
    for model in models:
        into = work / model
        capture(model, into, detail)
        calls = RecordedCalls(trueup.open_capture(into))
        chosen = distinct(calls)
        simdev.heal()
        replayer = Remembering(calls, "npu")
        cells = [row(model, "healthy", replayer, chosen, fault=False)]
        for name in noise:
            with simdev.noise(name):
                cells.append(row(model, name, replayer, chosen, fault=False))
        for name in faults:
            with simdev.inject(name):
                cells.append(row(model, name, replayer, chosen, fault=True))
        yield from (cell for cell in cells if cell is not None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(zoo.MODELS))
    parser.add_argument("--faults", nargs="*", default=list(simdev.FAULTS))
    parser.add_argument("--noise", nargs="*", default=list(simdev.NOISE))
    parser.add_argument("--detail", choices=("tensor", "stats"), default="tensor", help="stats: inputs are drawn")
    parser.add_argument("--json", type=Path, help="write every cell there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    simdev.install()
    cells = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        for cell in table(options.models, options.faults, options.noise, Path(work), options.detail):
            cells.append(cell)
            if cell.word not in ("ok", "sound") or cell.doubted:
                print(f"{cell.model:12} {cell.what:34} {cell.word:7} {cell.changed:3} changed, {cell.blamed:3} blamed, "
                      f"{cell.beside} beside, {cell.doubted} doubted: {cell.said[:300]}", flush=True)  # fmt: skip
    broken = [c for c in cells if c.word in ("ok", "wrong", "missed")]
    sound = [c for c in cells if c.word in ("sound", "false")]
    right = sum(c.word == "ok" for c in broken)
    print(f"faults: {right} of {len(broken)} cells right ({right / max(len(broken), 1):.1%}), "
          f"{len({c.what for c in broken})} of {len(options.faults)} faults felt")  # fmt: skip
    print(f"healthy and noise: {sum(c.word == 'sound' for c in sound)} of {len(sound)} without blame, "
          f"{sum(c.doubted for c in sound)} calls suspicious; {time.perf_counter() - started:.0f} s")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps([asdict(c) for c in cells], indent=1))


if __name__ == "__main__":
    main()
