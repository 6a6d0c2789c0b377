"""What a Keras training is set to, and that it is named where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trueup
from trueup.recording.adapters.tensorflow.session import switches


def train(path: Path, *, lr: float = 0.01, epsilon: float = 1e-3, compiled: bool = False) -> Path:
    keras.utils.set_random_seed(0)
    norm = keras.layers.LayerNormalization(epsilon=epsilon, name="norm")
    net = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), norm, keras.layers.Dense(2)])
    optimizer = keras.optimizers.AdamW(lr)
    numbers = np.random.RandomState(0)

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)

    optimizer.build(net.trainable_variables)
    run = tf.function(step) if compiled else step
    with trueup.capture(path, model=net):
        for _ in range(3):
            run(tf.constant(numbers.randn(4, 8).astype("float32")))
    return path


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.011}, "AdamW lr: 0.01 in the baseline, 0.011 in the candidate"),
    ({"epsilon": 1e-4}, "epsilon of norm (LayerNormalization): 0.001 in the baseline, 0.0001 in the candidate"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("changed", "said"), CHANGED)
def test_the_setting_is_named_first(tmp_path: Path, changed: dict[str, Any], said: str, compiled: bool) -> None:
    sides = train(tmp_path / "baseline", compiled=compiled), train(tmp_path / "candidate", compiled=compiled, **changed)
    assert trueup.preflight(*sides).sentence == said
    result = trueup.compare(*sides)
    if "lr" in changed:  # a variable that was built before the capture began: no call tells where its value comes from
        assert result.verdict == "inconclusive"
        assert f"set differently: {said}" in result.sentence
    else:
        assert result.sentence.splitlines()[0] == f"DEVIATES  {said}"


def test_each_numeric_switch_is_read_whatever_this_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"op_determinism", "tensor_float_32", "jit", "functions_run_eagerly", "keras.dtype_policy"} <= switches().keys()
    monkeypatch.delattr(tf.config, "functions_run_eagerly")
    assert "functions_run_eagerly" not in switches()
    assert {"tensor_float_32", "keras.dtype_policy"} <= switches().keys()


def test_equal_settings_are_clear(tmp_path: Path) -> None:
    found = trueup.preflight(train(tmp_path / "baseline"), train(tmp_path / "candidate"))
    assert (found.verdict, found.settings, found.odd) == ("clear", (), ())


def test_losses_and_data_sets_are_read(tmp_path: Path) -> None:
    def held(smoothing: float, seed: int, *, drop: bool) -> dict[str, Any]:
        loss = keras.losses.CategoricalCrossentropy(label_smoothing=smoothing)
        data = tf.data.Dataset.range(6).shuffle(6, seed=seed).batch(4, drop_remainder=drop).prefetch(1)
        path = train(tmp_path / f"run-{seed}")
        assert loss is not None
        assert data is not None
        return dict(trueup.open_capture(path).ranks[0]["settings"])

    first, second = held(0.1, 0, drop=False), held(0.0, 5, drop=True)
    assert first["modules"]["CategoricalCrossentropy"]["label_smoothing"] == 0.1
    assert {"class": "ShuffleDataset", "buffer_size": 6, "seed": 0, "reshuffle_each_iteration": True} in first["data"]
    assert {"class": "BatchDataset", "batch_size": 4, "drop_remainder": True} in second["data"]
    assert {"class": "PrefetchDataset", "prefetch_factor": 1} in second["data"]
