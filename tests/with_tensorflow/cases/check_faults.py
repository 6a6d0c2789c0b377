"""Faults planted in TensorFlow's kernels, under the capture: the first culprit is the call that they changed first."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

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


def in_graphs(into: Path, *, tape_inside: bool) -> None:
    """Two steps of a function, differentiated inside of it or as a whole."""
    random = np.random.default_rng(0)
    x, y = tf.constant(random.normal(size=(4, 8, 8, 2)), tf.float32), tf.constant([0, 1, 2, 1])
    shapes = ((3, 3, 2, 4), (32, 8), (8, 3))
    with trueup.capture(into, level="api"):
        weights = [tf.Variable(random.normal(size=shape) * 0.3, dtype=tf.float32) for shape in shapes]

        @tf.function
        def forward() -> tf.Tensor:
            hidden = tf.reshape(tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(x, weights[0], 1, "SAME")), [1]), [4, 32])
            chances = tf.nn.softmax(tf.matmul(tf.tanh(tf.matmul(hidden, weights[1])), weights[2]))
            return -tf.reduce_mean(tf.math.log(tf.gather(chances, y, batch_dims=1)))

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = forward()
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)

        run = tf.function(step) if tape_inside else step
        for _ in range(2):
            run()


@pytest.mark.parametrize("tape_inside", [True, False])
def test_the_culprit_in_a_graph_is_named(tmp_path: Path, tape_inside: bool) -> None:
    in_graphs(tmp_path / "healthy", tape_inside=tape_inside)
    for fault in ("tanh-backward-without-square", "conv-last-channel-stale"):
        with inject(fault) as injection:
            in_graphs(tmp_path / fault, tape_inside=tape_inside)
        first, result = injection.fired[0], trueup.compare(tmp_path / "healthy", tmp_path / fault)
        assert [(one.step, one.phase, one.op) for one in result.culprits] == [(first.step, first.phase, first.op)]


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
