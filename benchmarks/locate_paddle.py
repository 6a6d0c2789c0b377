"""The planted-fault table for Paddle: every fault on every model in which its operator occurs, from statistics alone.

Prints whether the first culprit is the operator, and its forward or backward, whose result the fault changed first. It runs in the
environment that holds Paddle: ``python benchmarks/locate_paddle.py``.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "with_paddle" / "cases"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "text_recogniser"))

import faulty
import paddle

import models
import trueup

STEPS = 2


def recogniser() -> models.Training:
    """The example's text recogniser with its recurrent neck, on rendered words."""
    from recogniser_paddle import Recogniser, losses
    from words import batches

    model = Recogniser("lstm", dropout=0.1)
    given = list(itertools.islice(batches(4, 1234), STEPS))

    def loss(number: int) -> paddle.Tensor:
        batch = {name: paddle.to_tensor(values) for name, values in given[number].items()}
        return losses(model(batch["image"], batch["given"]), batch)["loss"]

    clip = paddle.nn.ClipGradByGlobalNorm(5.0)
    return models.Training(model, paddle.optimizer.AdamW(2e-3, parameters=model.parameters(), grad_clip=clip), loss)


MODELS = {**models.MODELS, "recogniser": recogniser}


@dataclass
class Outcome:
    """One cell: ``word`` is ok, wrong, missed, aligned or false."""

    model: str
    fault: str
    word: str
    truth: str
    said: str


def run(model: str, into: Path) -> None:
    """Train a model for `STEPS` steps under capture."""
    shutil.rmtree(into, ignore_errors=True)
    paddle.seed(7)
    training = MODELS[model]()
    with trueup.capture(into, model=training.model, level=["module", "api"]):
        for number in range(STEPS):
            training.step(number)


def check(model: str, fault: str, baseline: Path, candidate: Path, fired: list[faulty.Fired]) -> Outcome:
    """Compare, and tell whether the first culprit is the call that the fault changed first."""
    truth = fired[0]
    columns = ["seq", "op", "scope", "phase", "forward_seq"]
    rows = trueup.open_capture(candidate).records(columns=columns, step=truth.step).to_pylist()
    by_seq = {row["seq"]: row for row in rows}
    true = by_seq[truth.seq]
    result = trueup.compare(baseline, candidate)
    first = result.culprit
    if first is None:
        word, said = "missed", result.sentence.splitlines()[0]
    else:
        row = by_seq.get(first.seq[1], {})
        seq = row.get("forward_seq") if truth.phase == "backward" and row.get("phase") == "backward" else first.seq[1]
        right = seq == truth.seq and (row.get("phase") == "backward") == (truth.phase == "backward")
        word = "ok" if right and first.step == truth.step else "wrong"
        said = f"{first.name} {first.level} {first.op} {first.kind} {first.error_out:.1e} of {first.expected:.1e}"
    return Outcome(model, fault, word, f"{true['scope']} {truth.phase} {true['op']} step {truth.step}", said)


def table(names: Iterable[str], faults: Iterable[str], work: Path) -> Iterator[Outcome]:
    """Yield the cells of the table, model by model."""
    for model in names:
        baseline, candidate = work / f"{model}-healthy", work / f"{model}-other"
        run(model, baseline)
        run(model, candidate)
        result = trueup.compare(baseline, candidate)
        equal = result.counts["equal"] == result.counts["compared"] and not result.unmatched
        yield Outcome(model, "healthy", "aligned" if equal else "false", "nothing", result.sentence.splitlines()[0])
        for fault in faults:
            with faulty.inject(fault) as injection:
                run(model, candidate)
            if injection.fired:
                yield check(model, fault, baseline, candidate, injection.fired)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--faults", nargs="*", default=list(faulty.FAULTS))
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    started = time.perf_counter()
    outcomes = []
    with tempfile.TemporaryDirectory() as work:
        for outcome in table(options.models, options.faults, Path(work)):
            outcomes.append(outcome)
            detail = "" if outcome.word in ("ok", "aligned") else f" truth: {outcome.truth}; said: {outcome.said}"
            print(f"{outcome.model:12} {outcome.fault:36} {outcome.word:8}{detail}", flush=True)
    faults = [outcome for outcome in outcomes if outcome.truth != "nothing"]
    right = sum(outcome.word == "ok" for outcome in faults)
    print(f"{right} of {len(faults)} first culprits right; {time.perf_counter() - started:.0f} s")
    if options.markdown:
        options.markdown.write_text(markdown(outcomes))


def markdown(outcomes: list[Outcome]) -> str:
    """Lay the cells out: a row per fault, a column per model."""
    names = list(dict.fromkeys(outcome.model for outcome in outcomes))
    cells = {(o.fault, o.model): o.word if o.word in ("ok", "aligned") else f"**{o.word}**" for o in outcomes}
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        lines.append(f"| {fault} | {' | '.join(cells.get((fault, name), '') for name in names)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
