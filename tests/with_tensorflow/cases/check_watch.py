"""`trueup.watch` names the operation where numbers begin to be bad, in eager loops and in functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trueup
from trueup.recording.recorder.options import WatchStopped


def training() -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(4, name="first")
    optimizer = keras.optimizers.SGD(0.1)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.log(tf.nn.relu(layer(x)) + 1.0) * x)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        return loss

    layer(tf.ones([2, 4]))
    layer.kernel.assign(np.ones((4, 4), np.float32))
    return layer, step


@pytest.mark.parametrize("function", [False, True])
def test_the_first_bad_call_is_named(tmp_path: Path, function: bool, capsys: pytest.CaptureFixture[str]) -> None:
    layer, step = training()
    run = tf.function(step) if function else step
    x = np.ones((2, 4), np.float32)
    with trueup.watch(layer, tmp_path / "watch") as watch:
        run(tf.constant(x))
        assert watch.hits == []
        run(tf.constant(np.full((2, 4), 3e38, np.float32)))
    assert [hit.step for hit in watch.hits] == [1]
    assert "tf.raw_ops.MatMul" in watch.hits[0].said
    saved = trueup.open_capture(tmp_path / "watch" / "step-000001")
    assert saved.rows > 0
    said = capsys.readouterr().err
    assert "check_watch.py" in said
    assert " in step: loss = tf.reduce_mean(" in said


def test_a_run_is_stopped_after_a_hit(tmp_path: Path) -> None:
    layer, step = training()
    bad = tf.constant(np.full((2, 4), np.inf, np.float32))
    with pytest.raises(WatchStopped), trueup.watch(layer, tmp_path / "watch", stop_after=1):
        for _ in range(3):
            step(bad)


@pytest.mark.parametrize("function", [False, True])
def test_a_step_that_keras_skips_is_a_step_and_no_hit(tmp_path: Path, function: bool) -> None:
    from trueup.analysis.audit.amp import amp

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(4, dtype="mixed_float16"), keras.layers.Dense(1, dtype="float32")]
    )
    inner = keras.optimizers.SGD(0.01)
    scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**24, dynamic_growth_steps=2)
    model.compile(optimizer=scaler, loss="mse", run_eagerly=not function, jit_compile=False)
    x, y = np.ones((12, 4), np.float32), np.full((12, 1), 9.0, np.float32)
    for begin in (trueup.watch(model, tmp_path / "watch"), trueup.capture(tmp_path / "run", level="api")):
        with begin as block:
            model.fit(x, y, batch_size=2, verbose=0, shuffle=False)
        assert not getattr(block, "hits", [])
    found = amp(tmp_path / "run")
    assert [step for step, _, _ in found.scale] == list(range(6))
    assert found.scale[0][1] > found.scale[-1][1] or not found.scale[0][2]
    assert all("missing" not in one.what for one in found.advice)
    (optimizer,) = trueup.open_capture(tmp_path / "run").ranks[0]["settings"]["optimizers"]
    assert optimizer["class"] == "SGD"
