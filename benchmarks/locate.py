"""The planted-fault table: every fault on every model in which its operator occurs, from statistics alone.

Prints, per level, whether the first culprit is the call whose result the fault changed first, and whether the healthy device
and every noise row come out aligned. `make bench-locate` runs it; tests/verdict/test_planted_faults.py asserts its rates.

    fault                        centernet  bert  gpt2 ...
    lstm-backward-cell-gate      ok / ok    -     -
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import trueup
import zoo
from trueup import simdev
from trueup.recording.adapters.torch import session as capturing
from trueup.simdev import injection
from trueup.simdev.tensor import Plan, interceptors

STEPS = 3
LEVELS = {"aten": None, "api": ["module", "api"]}


@dataclass
class Outcome:
    """One cell of the table: ``word`` is ok, wrong, missed, aligned, false or inconclusive."""

    model: str
    what: str
    level: str
    word: str
    truth: str
    said: str


class _Noting(list[Any]):
    """The simulator's list of fired faults, noting the execution number of each: the true culprits."""

    def __init__(self) -> None:
        super().__init__()
        self.truth: list[tuple[int, int]] = []

    def append(self, fired: Any) -> None:
        current = capturing.running.session
        if current is not None and not current.threads.state.busy and len(self.truth) < 500:
            self.truth.append((current.recorder.step, current.recorder._last))
        super().append(fired)


def run(model: str, device: str, into: Path) -> None:
    """Train a zoo model for `STEPS` steps under capture."""
    shutil.rmtree(into, ignore_errors=True)
    training = zoo.build(model, device)
    with trueup.capture(into, model=training.model, detail="stats") as capture:
        for _ in range(STEPS):
            training.step()
            capture.step()


def executed(train: Callable[[], object]) -> set[str]:
    """Train on the healthy device and return which of the operators that faults and noise change that executes."""
    seen: set[str] = set()

    def note(plan: Plan, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.add(plan.name)
        return kernel(*args, **kwargs)

    simdev.heal()
    rows = [*simdev.FAULTS.values(), *simdev.NOISE.values()]
    interceptors.update({injection._operator(op): note for row in rows for op in row.ops})
    try:
        train()
    finally:
        simdev.heal()
    return seen


def trained(model: str) -> None:
    """Train a zoo model for `STEPS` steps on the device."""
    training = zoo.build(model, "npu")
    for _ in range(STEPS):
        training.step()


@cache
def operators(model: str) -> frozenset[str]:
    """Return which of the operators that faults and noise change the training of a zoo model executes."""
    return frozenset(executed(partial(trained, model)))


def fires(model: str, fault: str) -> bool:
    """Tell whether the fault changes a bit of the training; most do in its first step."""
    simdev.heal()
    with simdev.inject(fault):
        training = zoo.build(model, "npu")
        return any(simdev.fired() for _ in range(STEPS) if training.step() is not None)


def run_broken(model: str, fault: str, into: Path) -> list[tuple[int, int]]:
    """Train on the broken device; return ``(step, seq)`` of the calls whose bits the fault changed, in order."""
    simdev.heal()
    noting = injection._fired = _Noting()
    try:
        with simdev.inject(fault):
            noting.truth.clear()
            run(model, "npu", into)
    finally:
        injection._fired = []
    return noting.truth


def check(model: str, fault: str, baseline: Path, candidate: Path, fired: list[tuple[int, int]]) -> Iterator[Outcome]:
    """Compare at both levels and tell whether the first culprit is the true one, or the api call around it.

    The true one is the first call that the fault changed by more than rounding (relative L2 2e-6, 32 units of
    float32): epsilon inside the root changes the last bits of many calls before one that anybody could tell from rounding.
    """
    whole = trueup.compare(baseline, candidate)
    calls = whole.matched.select(["step", "seq_candidate", "error_out"]).to_pylist()
    errors = {(c["step"], c["seq_candidate"]): c["error_out"] for c in calls}
    truth = next((f for f in fired if errors.get(f, 1.0) > 2e-6), fired[0])
    columns = ["seq", "parent", "op", "scope", "phase", "level", "forward_seq"]
    rows = trueup.open_capture(candidate).records(columns=columns, step=truth[0]).to_pylist()
    by_seq = {r["seq"]: r for r in rows}
    true = by_seq[truth[1]]
    around = {truth[1]}
    parent = by_seq.get(true["parent"])
    while parent is not None and parent["level"] == "api":
        around.add(parent["seq"])
        parent = by_seq.get(parent["parent"])
    for level, compared in LEVELS.items():
        result = whole if compared is None else trueup.compare(baseline, candidate, level=compared)
        first = result.culprit
        if first is None:
            word, said = verdict_on(result, right=False), result.sentence.splitlines()[0]
        else:
            # A wrong result that the function does not return (the indices of a max-pool) shows in its backward only.
            saved = by_seq.get(first.seq[1], {}).get("forward_seq") if first.level == "api" else None
            word = verdict_on(result, right=first.step == truth[0] and bool({first.seq[1], saved} & around))
            said = f"{first.name} {first.level} {first.op} {first.kind} {first.error_out:.1e} of {first.expected:.1e}"
        yield Outcome(model, fault, level, word, f"{true['scope']} {true['phase']} {true['op']} step {truth[0]}", said)


def verdict_on(result: trueup.Result, right: bool) -> str:
    """Return the word for a fault: ok where the right place is named, missed if aligned, else wrong or inconclusive."""
    if right:
        return "ok"
    return {"aligned": "missed", "deviates": "wrong", "inconclusive": "inconclusive"}[result.verdict]


def check_sound(model: str, what: str, baseline: Path, candidate: Path) -> Iterator[Outcome]:
    """Compare a legitimate run: it must be aligned."""
    for level, compared in LEVELS.items():
        result = trueup.compare(baseline, candidate, level=compared)
        word = {"aligned": "aligned", "deviates": "false", "inconclusive": "inconclusive"}[result.verdict]
        yield Outcome(model, what, level, word, "nothing", " | ".join(result.sentence.splitlines()[:2]))


def table(models: Iterable[str], faults: Iterable[str], noise: Iterable[str], work: Path) -> Iterator[Outcome]:
    """Yield the cells of the table, model by model."""
    for model in models:
        baseline = work / f"{model}-cpu"
        run(model, "cpu", baseline)
        for what in ("healthy", *noise):
            simdev.heal()
            candidate = work / f"{model}-sound"
            if what == "healthy":
                run(model, "npu", candidate)
            else:
                with simdev.noise(what):
                    run(model, "npu", candidate)
            yield from check_sound(model, what, baseline, candidate)
        for fault in faults:
            if operators(model).isdisjoint(simdev.FAULTS[fault].ops) or not fires(model, fault):
                continue  # a capture of it would be one of the healthy device
            candidate = work / f"{model}-broken"
            truth = run_broken(model, fault, candidate)
            if truth:
                yield from check(model, fault, baseline, candidate, truth)


def rates(outcomes: Iterable[Outcome]) -> dict[str, tuple[int, int]]:
    """Return (right, all) per level for faults, and for the sound rows."""
    found: dict[str, list[int]] = {}
    for o in outcomes:
        sound = o.truth == "nothing"
        cell = found.setdefault(f"{'sound' if sound else 'faults'} at {o.level}", [0, 0])
        cell[0] += o.word == ("aligned" if sound else "ok")
        cell[1] += 1
    return {k: (v[0], v[1]) for k, v in found.items()}


MARKS = {"ok": "ok", "aligned": "aligned", "wrong": "**wrong**", "missed": "**missed**", "false": "**false**"}


def markdown(outcomes: list[Outcome]) -> str:
    """Lay the cells out as a page: a row per fault or noise, a column per model, ``aten / api`` in each cell."""
    models = list(dict.fromkeys(o.model for o in outcomes))
    cells = {(o.what, o.model, o.level): MARKS.get(o.word, o.word) for o in outcomes}

    def line(what: str) -> str:
        row = []
        for model in models:
            both = [cells.get((what, model, level)) for level in LEVELS]
            row.append("" if both[0] is None else str(both[0]) if both[0] == both[1] else " / ".join(map(str, both)))
        return f"| {what} | {' | '.join(row)} |"

    sound = list(dict.fromkeys(o.what for o in outcomes if o.truth == "nothing"))
    broken = [f for f in simdev.FAULTS if any(o.what == f for o in outcomes)]
    head = [f"| | {' | '.join(models)} |", "| --- |" + " --- |" * len(models)]
    counted = [f"- {name}: {right} of {total} ({right / total:.1%})" for name, (right, total) in rates(outcomes).items()]
    return "\n".join([*counted, "", "Faults:", "", *head, *map(line, broken), "", "Sound runs:", "", *head, *map(line, sound), ""])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(zoo.MODELS))
    parser.add_argument("--faults", nargs="*", default=list(simdev.FAULTS))
    parser.add_argument("--noise", nargs="*", default=list(simdev.NOISE))
    parser.add_argument("--json", type=Path, help="write every cell there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    simdev.install()
    started = time.perf_counter()
    outcomes = []
    with tempfile.TemporaryDirectory() as work:
        for outcome in table(options.models, options.faults, options.noise, Path(work)):
            outcomes.append(outcome)
            line = f"{outcome.model:12} {outcome.what:36} {outcome.level:5} {outcome.word:12}"
            detail = "" if outcome.word in ("ok", "aligned") else f" truth: {outcome.truth}; said: {outcome.said}"
            print(line + detail, flush=True)
    for name, (right, total) in rates(outcomes).items():
        print(f"{name}: {right} of {total} ({right / max(total, 1):.1%})")
    print(f"{time.perf_counter() - started:.0f} s")
    if options.markdown:
        options.markdown.write_text(markdown(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))


if __name__ == "__main__":
    main()
