"""Faults planted in TensorFlow's kernels, under the capture: the first culprit is the call that they changed first."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

import models
import trueup
from trueup.simdev.tensorflow_faults import inject


def capture(into: Path, name: str) -> None:
    training = models.build(name)
    with trueup.capture(into, model=training.model, level="api"):
        for _ in range(2):
            training.step()


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baselines")
    for name in ("transformer", "recurrent"):
        capture(folder / name, name)
    return folder


@pytest.mark.parametrize(
    ("model", "fault"),
    [("transformer", "softmax-backward"), ("transformer", "matmul-weight-grad-last-row"),
     ("transformer", "optimizer-root-of-wrong-moment"), ("recurrent", "sigmoid-table-lookup"),
     ("recurrent", "stale-buffer-reuse")],
)  # fmt: skip
def test_the_culprit_is_named(tmp_path: Path, baselines: Path, model: str, fault: str) -> None:
    with inject(fault) as injection:
        capture(tmp_path / "broken", model)
    assert injection.fired, "the fault changed nothing"
    first, result = injection.fired[0], trueup.compare(baselines / model, tmp_path / "broken")
    culprit = result.culprit
    assert culprit is not None
    assert (culprit.step, culprit.phase, culprit.scope, culprit.op) == (first.step, first.phase, first.scope, first.op)
    assert not [other.op for other in result.culprits if "Variable" in other.op], "what a variable holds, others wrote"


def test_two_healthy_runs_are_aligned(tmp_path: Path, baselines: Path) -> None:
    capture(tmp_path / "again", "transformer")
    assert trueup.compare(baselines / "transformer", tmp_path / "again").verdict == "aligned"


def test_nobody_is_blamed_for_what_variables_lists_and_loops_hold(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).integers(0, 50, (4, 6)), np.array([0, 1, 2, 1])
    for name, rate in (("slow", 0.1), ("fast", 0.2)):
        keras.utils.set_random_seed(0)
        with trueup.capture(tmp_path / name, level=["module", "api"]):
            model = keras.Sequential([keras.layers.Embedding(50, 8), keras.layers.LSTM(8), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            for _ in range(3):
                model.train_on_batch(x, y)
    result = trueup.compare(tmp_path / "slow", tmp_path / "fast")
    assert result.verdict == "deviates"
    assert [(found.op, found.kind, found.step) for found in result.culprits] == [("tf.raw_ops.AssignVariableOp", "input", 0)]
