"""What TensorFlow's second debugger really writes is read, and compares with a capture of the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from recording import rows_of

import trueup


def train(function: bool) -> None:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    optimizer = keras.optimizers.SGD(0.1)
    x = np.random.default_rng(0).random((4, 8, 8, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(4))).batch(4)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if function else step
    for _ in range(2):
        for batch in data:
            run(*batch)


def dumped(folder: Path, function: bool, mode: str) -> trueup.exchange.readers.Imported:
    writer = tf.debugging.experimental.enable_dump_debug_info(str(folder / "dump"), tensor_debug_mode=mode, circular_buffer_size=-1)
    try:
        train(function)
        writer.FlushNonExecutionFiles()
        writer.FlushExecutionFiles()
    finally:
        tf.debugging.experimental.disable_dump_debug_info()
    return trueup.import_dump(folder / "dump", folder / "imported")


@pytest.mark.parametrize("function", [False, True])
def test_full_tensors_are_those_of_a_capture(tmp_path: Path, function: bool) -> None:
    found = dumped(tmp_path, function, "FULL_TENSOR")
    assert (found.tool, found.steps, found.lost) == ("tfdbg2 FULL_TENSOR", 2, [])
    with trueup.capture(tmp_path / "native"):
        train(function)
    result = trueup.compare(tmp_path / "native", found.path)
    assert not result.culprits, result.sentence
    assert result.counts["equal"] + result.counts["agrees"] > 10
    rows, native = rows_of(found.path), rows_of(tmp_path / "native")
    for op in ("tf.raw_ops.Conv2D", "tf.raw_ops.MatMul"):
        ours, theirs = (
            [(r["step"], r["slot"], r["l2"]) for r in of if r["op"] == op and r["phase"] == "forward" and r["slot"] != "arguments"]
            for of in (rows, native)
        )
        assert [one[:2] for one in ours] == [one[:2] for one in theirs]
        assert [one[2] for one in ours] == pytest.approx([one[2] for one in theirs], rel=1e-5)
    assert {r["phase"] for r in rows} >= {"forward", "backward", "optimizer"}
    sites = trueup.open_capture(found.path).sites(0)
    lines = {sites[r["site"]][0][0] for r in rows if r["op"] == "tf.raw_ops.Conv2D"}
    assert all("check_dumps.py" in line and "in step" in line for line in lines)


def test_full_health_counts(tmp_path: Path) -> None:
    found = dumped(tmp_path, True, "FULL_HEALTH")
    assert (found.tool, found.tensors, found.lost) == ("tfdbg2 FULL_HEALTH", 0, [])
    relu = [r for r in rows_of(found.path) if (r["op"], r["slot"]) == ("tf.raw_ops.Relu", "output.0")]
    assert [r["n_zero"] > 0 for r in relu] == [True, True]
    assert trueup.compare(found.path, found.path).verdict == "inconclusive"
