"""Python functions as operations, gradients written by hand, constants in the code: recorded, and named where wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from recording import Record, slots

import trueup

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2, 0, 1])
CASES = (
    ("numpy", "eager"), ("numpy", "function"), ("python", "function under a tape"), ("python", "fit"), ("plain", "fit"),
)  # fmt: skip
"""Each mode, and each kind in one whose gradient is in the graph, too."""
PYTHON = {"numpy": "tf.raw_ops.PyFunc", "python": "tf.raw_ops.EagerPyFunc"}


class Tanh(keras.layers.Layer):
    """Tanh with a gradient of its own, each times a number that may be wrong."""

    def __init__(self, kind: str, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.kind, self.forward, self.backward = kind, forward, backward

    def call(self, x: Any) -> Any:
        run = {"numpy": tf.numpy_function, "python": tf.py_function, "plain": lambda f, given, _: f(*given)}[self.kind]
        tanh = np.tanh if self.kind == "numpy" else tf.tanh

        def shaped(y: Any) -> Any:
            return y if tf.executing_eagerly() else tf.ensure_shape(y, x.shape)

        @tf.custom_gradient
        def function(x: Any) -> Any:
            y = shaped(run(lambda x: tanh(x) * np.float32(self.forward), [x], tf.float32))

            def gradient(g: Any) -> Any:
                return shaped(run(lambda g, y: g * (1 - y * y) * np.float32(self.backward), [g, y], tf.float32))

            return y, gradient

        return function(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def train(into: Path, mode: str, *args: Any) -> None:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(16), Tanh(*args), keras.layers.Dense(16), Tanh(*args), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.build((None, 8))
    optimizer, loss_of = keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def forward(x: Any, y: Any) -> Any:
        return loss_of(y, model(x, training=True))

    inner = tf.function(forward) if mode == "function under a tape" else forward

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = inner(x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with trueup.capture(into, model=model, level=["module", "api"]):
        if mode == "fit":
            model.compile(optimizer, loss_of)
            model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
            return
        run = tf.function(step) if mode == "function" else step
        for _ in range(2):
            run(tf.constant(X), tf.constant(Y))


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_the_wrong_one_is_named(kind: str, mode: str, tmp_path: Path) -> None:
    train(tmp_path / "base", mode, kind)
    for name, numbers in (("healthy", (1.0, 1.0)), ("forward", (0.9, 1.0)), ("backward", (1.0, 0.8))):
        train(tmp_path / name, mode, kind, *numbers)
        result = trueup.compare(tmp_path / "base", tmp_path / name)
        found = [(c.scope, c.phase, c.op, c.kind, c.step) for c in result.culprits]
        if name == "healthy":
            assert (result.verdict, found) == ("aligned", [])
            continue
        of = ("tf.raw_ops.Mul", "argument") if kind == "plain" else (PYTHON[kind], "operator")
        assert found == [("tanh" if name == "forward" else "tanh_1", name, *of, 0)]
        source = result.culprits[0].source
        assert source is not None
        assert "check_python_functions.py" in source
        if kind == "plain":
            assert "input.1 differs: 1.0 in the baseline, 0." in result.culprits[0].sentence


def once(function: Callable[[Any], Any]) -> Callable[[], Any]:
    def run() -> Any:
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x * 2.0))
        return tape.gradient(loss, x)

    return run


@pytest.mark.parametrize("graph", [False, True])
def test_what_a_python_function_gets_and_makes(record: Record, graph: bool) -> None:
    def twice(x: Any) -> Any:
        halves = tf.numpy_function(lambda x, n: [x / n, x - x / n], [x, np.float32(2)], [tf.float32, tf.float32])
        return tf.py_function(lambda a, b: tf.tanh(a) + b, halves, tf.float32)

    def run() -> None:
        twice(tf.constant(X) * 2.0)

    rows = record(tf.function(run) if graph else run, level="api")
    halved, added = slots(rows, "PyFunc"), slots(rows, "EagerPyFunc")
    assert {"input.0", "output.0", "output.1"} <= set(halved)
    assert halved["output.0"]["l2"] == pytest.approx(np.linalg.norm(X))
    assert halved["input.0"]["producer_seq"] == slots(rows, "Mul")["output.0"]["seq"]
    assert added["input.1"]["producer_seq"] == halved["output.1"]["seq"]
    assert not [row["op"] for row in rows if row["op"].endswith("Tanh")], "what it executes is given copies"


@pytest.mark.parametrize("graph", [False, True])
def test_the_gradient_of_a_python_function(record: Record, graph: bool) -> None:
    run = once(lambda x: tf.py_function(tf.tanh, [x], tf.float32))
    rows = record(tf.function(run) if graph else run, level="api", detail="tensor")
    gradient = slots(rows, "EagerPyFunc", "backward")
    assert gradient["grad_input.0"]["l2"] == pytest.approx(np.linalg.norm(1 - np.tanh(2 * X) ** 2))
    assert gradient["grad_input.0"]["forward_seq"] == slots(rows, "EagerPyFunc")["output.0"]["seq"]
    assert sum(row["op"] == "tf.GradientTape.gradient" for row in rows) == 1, "the tape inside differentiates no loss"


@pytest.mark.parametrize("graph", [False, True])
def test_what_a_gradient_by_hand_executes_is_inside(record: Record, graph: bool) -> None:
    @tf.custom_gradient
    def tripled(x: Any) -> Any:
        return 3 * x, lambda g: tf.negative(g * 3.0)

    run = once(tripled)
    rows = record(tf.function(run) if graph else run, level="api")
    outer, inner = slots(rows, "tf.custom_gradient", "backward"), slots(rows, "Neg", "backward")
    assert set(outer) == {"grad_output.0", "grad_input.0"}
    assert outer["grad_input.0"]["l2"] == pytest.approx(3 * 8)
    assert inner["output.0"]["parent"] == outer["grad_input.0"]["seq"]
    assert slots(rows, "Mul", "backward")["arguments"]["value"].endswith('"input.1": 3.0}')


def test_results_in_python_functions_are_those_without_capture(record: Record) -> None:
    run = once(lambda x: tf.py_function(tf.tanh, [tf.nn.silu(x)], tf.float32))
    plain, seen = run(), []
    record(lambda: seen.append(run()))
    assert np.array_equal(plain, seen[0])
