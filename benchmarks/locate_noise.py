"""Faults under noise: the planted-fault table with products in HF32 and reductions in another order on the candidate as well.

A pair of model and fault counts where the fault's own error is at least ten times what the noise alone makes of the same call; the
first culprit must then be a call that the fault changed. Whatever is named besides must not be the noise's.

    model        fault                               level  local   noise   word   named besides
    bert         layer-norm-backward                 aten   3.1e-1  8.2e-4  ok     0
    counted at aten: 61 pairs, first culprit right in 58 (95.1%)

`make bench-noise` runs it; tests/verdict/test_cases_noise.py holds a part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import locate
import trueup
import zoo
from locate import LEVELS
from trueup import simdev
from trueup.foundation.model import Finding, Result

NOISE = ("hf32-matmul", "reordered-reductions")
ABOVE = 10.0
"""How many times the noise a fault's own error must be for its pair to count."""
TARGET = 0.85

Place = tuple[int, int]
"""Step and execution number of a call; the same call has the same in every run of a model on the device."""
Errors = dict[Place, tuple[float, float]]
"""Relative L2 error of a call's inputs and outputs."""


@dataclass
class Pair:
    """A fault in a model, at one level.

    ``local`` is the error that the fault makes of a call whose inputs are right, ``noise`` what the noise alone makes of that
    call, its inputs' errors included. ``word`` is ok, wrong, missed, or uncounted where the noise is too near. ``strangers``
    are certain culprits that the fault never changed.
    """

    model: str
    fault: str
    level: str
    local: float
    noise: float
    word: str
    truth: str
    said: str
    strangers: list[str]


@dataclass
class Sound:
    """A model under noise alone: what is certain there is false."""

    model: str
    level: str
    verdict: str
    named: list[str]


def noisy(stack: contextlib.ExitStack) -> None:
    """Switch the noise on until the stack is left."""
    for name in NOISE:
        stack.enter_context(simdev.noise(name))


def errors(result: Result) -> Errors:
    """Return the errors of all matched calls."""
    columns = ["step", "seq_candidate", "error_in", "error_out"]
    rows = result.matched.select(columns).to_pylist()
    return {(r["step"], r["seq_candidate"]): (r["error_in"], r["error_out"]) for r in rows}


def first_above(
    fired: Iterable[Place], calls: Calls, level: str, alone: Errors, noise: Errors
) -> tuple[Place, float, float] | None:
    """Return the first call whose own error from the fault is `ABOVE` times the noise, with both, or None.

    At level ``api`` it is the error of the function around the operator, for the function may not return what went wrong. At level
    ``aten`` too, where the other device runs other operators.
    """
    for fault in fired:
        places = [p for p in calls.outwards(fault) if p in alone and p in noise and calls.level(p) in (level, "api")]
        if not places:
            continue
        error_in, error_out = alone[places[0]]
        around = noise[places[0]][1]
        if error_out > 2e-6 and error_in <= error_out / ABOVE and error_out >= ABOVE * around:
            return places[0], error_out, around
    return None


class Calls:
    """The calls of a capture by their place, and which function is around which operator."""

    def __init__(self, capture: Path) -> None:
        columns = ["step", "seq", "parent", "op", "scope", "phase", "level", "forward_seq"]
        self._rows = {(r["step"], r["seq"]): r for r in trueup.open_capture(capture).records(columns=columns).to_pylist()}

    def level(self, place: Place) -> str:
        return str(self._rows[place]["level"])

    def describe(self, place: Place) -> str:
        row = self._rows[place]
        return f"{row['scope']} {row['phase']} {row['op']} step {place[0]}"

    def around(self, places: Iterable[Place]) -> set[Place]:
        """Return the calls and the functions around them."""
        return {outer for place in places for outer in self.outwards(place)}

    def outwards(self, place: Place) -> Iterator[Place]:
        """Yield a call and the functions around it, innermost first."""
        yield place
        parent = self._rows.get((place[0], self._rows[place]["parent"]))
        while parent is not None and parent["level"] == "api":
            yield place[0], parent["seq"]
            parent = self._rows.get((place[0], parent["parent"]))

    def holds(self, finding: Finding, places: set[Place]) -> bool:
        """Tell whether a finding is one of the calls, or the backward of a function that is."""
        seq = finding.seq[1]
        saved = self._rows.get((finding.step, seq), {}).get("forward_seq") if finding.level == "api" else None
        return bool({(finding.step, seq), (finding.step, saved)} & places)


def check(model: str, fault: str, folder: Path, baseline: Path, noise: Errors) -> Iterator[Pair]:
    """Run a fault alone and under noise; compare the latter at each level."""
    fired = locate.run_broken(model, fault, folder / "alone")
    if not fired:
        return
    alone = errors(trueup.compare(baseline, folder / "alone"))
    with contextlib.ExitStack() as stack:
        # `run_broken` heals the device before it breaks it, so the noise comes on with the model.
        stack.enter_context(replaced(lambda: noisy(stack)))
        changed = locate.run_broken(model, fault, folder / "both")
    calls = Calls(folder / "both")
    right = calls.around(set(fired) | set(changed))
    for level, compared in LEVELS.items():
        counted = first_above(fired, calls, level, alone, noise)
        result = trueup.compare(baseline, folder / "both", level=compared)
        first = result.culprit
        word = "missed" if first is None else "ok" if calls.holds(first, right) else "wrong"
        strangers = [f"{c.name} {c.op} ({c.ratio:.0f} x)" for c in result.culprits if not calls.holds(c, right)]
        said = result.sentence.splitlines()[0] if first is None else f"{first.name} {first.op} {first.kind} {first.ratio:.0f} x"
        place, local, around = counted or (fired[0], alone.get(fired[0], (0, 0))[1], noise.get(fired[0], (0, 0))[1])
        yield Pair(
            model, fault, level, local, around, word if counted else "uncounted", calls.describe(place), said, strangers
        )


@contextlib.contextmanager
def replaced(before: Callable[[], None]) -> Iterator[None]:
    """Call something before each training that `locate` runs, after it has healed the device."""
    run = locate.run

    def after_healing(*arguments: Any) -> None:
        before()
        run(*arguments)

    locate.run = after_healing
    try:
        yield
    finally:
        locate.run = run


def table(models: Iterable[str], faults: Iterable[str], work: Path) -> Iterator[Pair | Sound]:
    """Yield the sound rows and the pairs, model by model."""
    for model in models:
        baseline, candidate = work / f"{model}-cpu", work / f"{model}-noise"
        simdev.heal()
        locate.run(model, "cpu", baseline)
        with contextlib.ExitStack() as stack:
            noisy(stack)
            locate.run(model, "npu", candidate)
        results = {level: trueup.compare(baseline, candidate, level=compared) for level, compared in LEVELS.items()}
        for level, result in results.items():
            named = [f"{c.name} {c.op} ({c.ratio:.0f} x)" for c in result.culprits if c.confidence == "high"]
            yield Sound(model, level, result.verdict, named)
        noise = errors(results["aten"])
        for fault in faults:
            yield from check(model, fault, work, baseline, noise)


def shares(found: Iterable[Pair | Sound]) -> dict[str, tuple[int, int]]:
    """Return (right, counted) by level."""
    cells = {level: [0, 0] for level in LEVELS}
    for one in found:
        if isinstance(one, Pair) and one.word != "uncounted":
            cells[one.level][0] += one.word == "ok"
            cells[one.level][1] += 1
    return {level: (right, counted) for level, (right, counted) in cells.items()}


def strangers(found: Iterable[Pair | Sound]) -> list[str]:
    """Return what was named with certainty though only noise had changed it."""
    told = []
    for one in found:
        what = "noise alone" if isinstance(one, Sound) else one.fault
        told += [f"{one.model} {what} {one.level}: {name}" for name in (one.named if isinstance(one, Sound) else one.strangers)]
    return told


def line(one: Pair | Sound) -> str:
    if isinstance(one, Sound):
        return f"{one.model:12} {'(noise alone)':36} {one.level:5} {one.verdict} {', '.join(one.named[:3])}"
    detail = "" if one.word == "ok" and not one.strangers else f"truth: {one.truth}; said: {one.said}; {one.strangers[:3]}"
    numbers = f"{one.local:8.1e} {one.noise:8.1e} {one.word:10} {len(one.strangers):3}"
    return f"{one.model:12} {one.fault:36} {one.level:5} {numbers} {detail}"


def main() -> None:
    """Print the table and the share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(zoo.MODELS))
    parser.add_argument("--faults", nargs="*", default=list(simdev.FAULTS))
    parser.add_argument("--json", type=Path, help="write every row there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    simdev.install()
    started = time.perf_counter()
    found = []
    with tempfile.TemporaryDirectory() as work:
        for one in table(options.models, options.faults, Path(work)):
            found.append(one)
            print(line(one), flush=True)
    for level, (right, counted) in shares(found).items():
        share = right / max(1, counted)
        print(f"counted at {level}: {counted} pairs, first culprit right in {right} ({share:.1%}; target {TARGET:.0%})")
    told = strangers(found)
    print(f"noise named with certainty: {len(told)} times (target 0)")
    print(f"{time.perf_counter() - started:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
