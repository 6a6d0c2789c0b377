"""The planted-fault table for TensorFlow: every fault on every model in which its operation occurs, from statistics alone.

Prints whether the first culprit is the operation, and its forward or backward, whose result the fault changed first. It runs in the
environment that holds TensorFlow: ``python benchmarks/locate_tensorflow.py``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "with_tensorflow" / "cases"))

import keras
import kernels_graph
import numpy as np
import tensorflow as tf

import models
import trueup
from trueup.simdev import tensorflow_faults as faulty

STEPS = 2


def mobilenet() -> models.Training:
    """Make a training of ``keras.applications``' MobileNetV2 with random weights on small images."""
    keras.utils.set_random_seed(3)
    model = keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=3, classifier_activation=None)
    inputs = np.repeat(np.repeat(models.images(4), 3, axis=1), 3, axis=2)[:, :32, :32]
    model(tf.constant(inputs))
    return models.Training(model, keras.optimizers.SGD(0.05, momentum=0.9), inputs, np.array([0, 2, 1, 2]))


GRAPH = "tensorflow 1 graph"
"""Kernels in Python in a graph that a session runs: `kernels_graph`."""

BUILDERS = {**{name: (lambda name=name: models.build(name)) for name in models.MODELS}, "mobilenet": mobilenet}


@dataclass
class Outcome:
    """One cell: ``word`` is ok, wrong, missed, aligned or false."""

    model: str
    fault: str
    word: str
    truth: str
    said: str


def run(model: str, into: Path, fault: str = "") -> list[faulty.Fired]:
    """Train a model for `STEPS` steps under capture."""
    shutil.rmtree(into, ignore_errors=True)
    if model == GRAPH:
        with trueup.capture(into):
            return kernels_graph.run(fault)
    training = BUILDERS[model]()
    with trueup.capture(into, model=training.model, level=["module", "api"]):
        for _ in range(STEPS):
            training.step()
    return []


def check(model: str, fault: str, baseline: Path, candidate: Path, fired: list[faulty.Fired]) -> Outcome:
    """Compare, and tell whether the first culprit is of the call that the fault changed first."""
    truth = fired[0]
    result = trueup.compare(baseline, candidate)
    first = result.culprit
    if first is None:
        word, said = "missed", result.sentence.splitlines()[0]
    else:
        right = (first.step, first.phase, first.scope, first.op) == (truth.step, truth.phase, truth.scope, truth.op)
        word = "ok" if right else "wrong"
        said = f"{first.name} {first.level} {first.op} {first.kind} {first.error_out:.1e} of {first.expected:.1e}"
    return Outcome(model, fault, word, f"{truth.scope} {truth.phase} {truth.op} step {truth.step}", said)


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
                fired = run(model, candidate, fault) or injection.fired
            if fired:
                yield check(model, fault, baseline, candidate, fired)


def main() -> None:
    """Print the table, a line for each cell as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*BUILDERS, GRAPH], choices=[*BUILDERS, GRAPH])
    parser.add_argument("--faults", nargs="+", default=list(faulty.FAULTS), choices=list(faulty.FAULTS))
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory(prefix="trueup-locate-") as work:
        found = []
        for outcome in table(options.models, options.faults, Path(work)):
            found.append(outcome)
            more = "" if outcome.word in ("ok", "aligned") else f"\n    truth: {outcome.truth}\n    said:  {outcome.said}"
            print(f"{outcome.model:18} {outcome.fault:34} {outcome.word}{more}", flush=True)
    planted = [outcome for outcome in found if outcome.fault != "healthy"]
    print(f"\n{sum(outcome.word == 'ok' for outcome in planted)} of {len(planted)} faults: the first culprit is right")


if __name__ == "__main__":
    main()
