"""The planted-fault table for Paddle through `trueup replay`: which calls are found wrong when each gets the recorded inputs.

Both directions: the broken run is recorded and replayed on a healthy CPU (`recorded`), and the healthy run is recorded and replayed
on a CPU whose float32 kernels are broken (`device`); the float64 truth is healthy in both. A cell counts where the fault changed
the result of a call by more than rounding:

    ok       calls are blamed, all of them calls that the fault changed (or the backward of one whose forward it changed)
    wrong    a call is blamed that the fault did not change
    missed   no call is blamed

It runs in the environment that holds Paddle: ``python benchmarks/replay_paddle.py``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "with_paddle" / "cases"))

import faulty

import models
import trueup
from trueup.recording.adapters.paddle.executing import Replayer
from trueup.recording.execution.judging import BLAMED, Outcome
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls

STEPS = 2


@dataclass
class Cell:
    """One cell: ``word`` is ok, wrong, missed, or for a healthy run clean or false."""

    model: str
    fault: str
    direction: str
    word: str
    changed: int
    blamed: int
    said: str


def capture(model: str, into: Path, detail: str = "tensor", steps: int = STEPS) -> None:
    """Train a model for some steps under capture."""
    shutil.rmtree(into, ignore_errors=True)
    training = models.build(model)
    with trueup.capture(into, model=training.model, level=["module", "api"], detail=detail):
        for number in range(steps):
            training.step(number)


def replayed(
    path: Path, fault: str | None, *, recorded: bool, phases: tuple[str, ...] = ("forward", "recompute", "backward", "optimizer")
) -> tuple[list[Outcome], set[int]]:  # fmt: skip
    """Replay all calls in this process under a fault; return what was found, and the calls that the fault changed meanwhile."""
    calls = RecordedCalls(trueup.open_capture(path))
    replayer = Replayer(calls, "cpu", recorded=recorded)
    outcomes = []
    with ExitStack() as stack:
        injection = None if fault is None else stack.enter_context(faulty.inject(fault))
        stack.enter_context(replayer.undisturbed())
        for call in _chosen(calls, phases):
            if injection is not None:
                injection.replayed = call.seq
            outcomes.append(replayer.replay(call))
        return outcomes, set() if injection is None else {fired.seq for fired in injection.fired}


def _chosen(calls: RecordedCalls, phases: tuple[str, ...]) -> Iterator[RecordedCall]:
    for step in calls.capture.steps:
        yield from (call for call in calls.of_step(0, step, ("api",), phases) if call.computed)


def changed_in(path: Path, fired: Iterable[faulty.Fired]) -> set[int]:
    """Return the calls of a capture that a fault changed while it was taken, with the backward of forward ones."""
    rows = trueup.open_capture(path).records(columns=["seq", "phase", "forward_seq"]).to_pylist()
    backward = {(row["forward_seq"], row["seq"]) for row in rows if row["phase"] == "backward"}
    changed = {fault.seq for fault in fired if fault.phase == "forward"}
    return changed | {seq for forward, seq in backward if forward in {fault.seq for fault in fired}}


def cell(model: str, fault: str, direction: str, outcomes: list[Outcome], changed: set[int]) -> Cell:
    """Judge a replay under a fault."""
    blamed = [outcome for outcome in outcomes if outcome.verdict in BLAMED]
    beside = [outcome for outcome in blamed if outcome.seq not in changed]
    said = "; ".join(f"{o.seq} {o.scope} {o.kind} {o.sentence}" for o in (beside or blamed)[:3])
    word = "wrong" if beside else "ok" if blamed else "missed" if changed else "clean"
    if not changed and blamed:
        word = "false"
    return Cell(model, fault, direction, word, len(changed), len(blamed), said)


def table(names: Iterable[str], faults: Iterable[str], work: Path, detail: str) -> Iterator[Cell]:
    """Yield the cells, model by model."""
    for model in names:
        healthy, broken = work / f"{model}-healthy", work / f"{model}-broken"
        capture(model, healthy, detail)
        for direction, recorded in (("recorded", True), ("device", False)):
            yield cell(model, "healthy", direction, replayed(healthy, None, recorded=recorded)[0], set())
        for fault in faults:
            if detail == "tensor":
                with faulty.inject(fault) as injection:
                    capture(model, broken, detail)
                if injection.fired:
                    outcomes, _ = replayed(broken, None, recorded=True)
                    yield cell(model, fault, "recorded", outcomes, changed_in(broken, injection.fired))
            outcomes, changed = replayed(healthy, fault, recorded=False)
            if changed:
                yield cell(model, fault, "device", outcomes, changed)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(models.MODELS))
    parser.add_argument("--faults", nargs="*", default=list(faulty.FAULTS))
    parser.add_argument("--detail", default="tensor", help="of the captures: tensor, or stats with drawn inputs")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    started = time.perf_counter()
    cells = []
    with tempfile.TemporaryDirectory() as work:
        for found in table(options.models, options.faults, Path(work), options.detail):
            cells.append(found)
            detail = "" if found.word in ("ok", "clean") else f" {found.said}"
            print(f"{found.model:12} {found.fault:36} {found.direction:9} {found.word:7}"
                  f" {found.blamed:4} blamed of {found.changed:4} changed{detail}", flush=True)  # fmt: skip
    planted = [c.word for c in cells if c.fault != "healthy"]
    clean = [c.word for c in cells if c.fault == "healthy"]
    print(
        f"{planted.count('ok')} of {len(planted)} cells right, {planted.count('wrong')} with false blame; "
        f"{clean.count('clean')} of {len(clean)} healthy replays without blame; {time.perf_counter() - started:.0f} s"
    )
    if options.markdown:
        options.markdown.write_text(markdown(cells))


def markdown(cells: list[Cell]) -> str:
    """Lay the cells out: a row per fault, a column per model, both directions in a cell."""
    names = list(dict.fromkeys(c.model for c in cells))
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for fault in dict.fromkeys(c.fault for c in cells):
        row = [" / ".join(c.word for c in cells if (c.model, c.fault) == (name, fault)) for name in names]
        lines.append(f"| {fault} | {' | '.join(row)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
