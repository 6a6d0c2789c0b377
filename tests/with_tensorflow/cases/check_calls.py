"""What calls a capture has: levels, scopes, phases, slots, producers; their gradients; where steps end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from recording import Record, Row, notes_of, rows_of, slots

import models
import trueup
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.tensorflow.session import Session
from trueup.recording.recorder import CaptureOptions

A = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)


WEIGHT = tf.Variable(A, name="weight")


def product() -> None:
    weight = WEIGHT
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.relu(tf.matmul(tf.constant(A), weight, transpose_b=True)))
    tape.gradient(loss, weight)


@pytest.mark.parametrize("function", [False, True])
def test_an_operation_and_its_backward(record: Record, function: bool) -> None:
    rows = record(tf.function(product) if function else product, level="api", detail="tensor")
    forward, backward = slots(rows, "raw_ops.MatMul"), slots(rows, "raw_ops.MatMul", "backward")
    assert forward["arguments"]["value"] is not None
    assert '"transpose_b": true' in forward["arguments"]["value"]
    assert forward["output.0"]["l2"] == pytest.approx(np.linalg.norm(A @ A.T))
    mask = (A @ A.T > 0).astype(np.float32)
    assert backward["grad_output.0"]["l2"] == pytest.approx(np.linalg.norm(mask))
    assert backward["grad_input.1"]["l2"] == pytest.approx(np.linalg.norm(mask.T @ A))
    assert backward["grad_input.1"]["forward_seq"] == forward["output.0"]["seq"]
    relu = slots(rows, "raw_ops.Relu")
    assert relu["input.0"]["producer_seq"] == forward["output.0"]["seq"]
    loss = slots(rows, "GradientTape.gradient")["input.0"]
    assert loss["max"] == loss["min"] == (A @ A.T * mask).sum()


def test_both_modes_record_the_same_calls(record: Record) -> None:
    def calls(rows: list[Row]) -> dict[tuple[str, ...], float]:
        left_out = ("AddN", "Identity", "Reshape", "Tile", "Fill", "Cast", "ReadVariableOp", "StridedSlice")
        chosen = [row for row in rows if row["shape"] and not row["op"].endswith(left_out) and row["phase"] != "optimizer"]
        return {(row["phase"], row["scope"], row["op"], str(row["ordinal"]), row["slot"]): row["l2"] for row in chosen}

    eager, graph = models.build("transformer"), models.build("transformer")
    one, two = calls(record(eager.step)), calls(record(tf.function(graph.step)))
    both = one.keys() & two.keys()
    assert len(both) > 150
    assert len(both) > 0.95 * len(one), sorted(one.keys() - two.keys())[:5]
    for key in both:
        assert one[key] == pytest.approx(two[key], rel=1e-3, abs=1e-6), key


def test_scopes_do_not_depend_on_what_was_built_before(record: Record) -> None:
    def scopes() -> set[str]:
        return {row["scope"] for row in record(models.build("transformer").step, level="module")}

    first = scopes()
    assert {"attention", "attention.norms.0", "attention.feed.dense_1", "attention.attention.query_dense"} <= first
    assert scopes() == first


def test_a_layer_its_weights_and_its_gradients(record: Record) -> None:
    training = models.build("convolutional")
    rows = record(training.step, detail="tensor", level="module")
    forward, backward = slots(rows, "BatchNormalization"), slots(rows, "BatchNormalization", "backward")
    assert set(forward) >= {"input.0", "param.gamma", "param.moving_mean", "output.0", "output.buffer.moving_mean"}
    assert forward["param.moving_mean"]["digest"] != forward["output.buffer.moving_mean"]["digest"]
    assert set(backward) == {"grad_output.0", "grad_input.0"}
    added = slots(rows, "Add", "backward")
    assert {"grad_output.0", "grad_input.0.0", "grad_input.0.1"} <= set(added)


def test_what_an_optimizer_is_given(record: Record) -> None:
    rows = record(models.build("recurrent").step)
    given = slots(rows, "SGD.apply", "optimizer")
    assert {"input.lstm.cell.recurrent_kernel", "input.embedding.embeddings.values", "input.dense.bias"} <= set(given)
    assert all(row["producer_seq"] is not None for name, row in given.items() if name.startswith("input.dense"))
    assert {row["phase"] for row in rows if row["op"].endswith("AssignAddVariableOp")} == {"optimizer"}


@pytest.mark.parametrize("how", ["eager", "function", "fit", "by hand"])
def test_where_steps_end(tmp_path: Path, how: str) -> None:
    training = models.build("recurrent")
    into = tmp_path / "capture"
    with trueup.capture(into, level="api", steps="1:") as capture:
        if how == "fit":
            training.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            training.model.fit(training.inputs, training.labels, batch_size=2, epochs=2, verbose=0)
        step = tf.function(training.step) if how == "function" else training.step
        for _ in range(0 if how == "fit" else 4):
            step()
            if how == "by hand":
                capture.step()
    assert {row["step"] for row in rows_of(into) if row["phase"] == "backward"} == {1, 2, 3}


def test_filters_and_phases(record: Record) -> None:
    rows = record(models.build("transformer").step, level="api", include="attention.feed.*", phase="backward", detail="digest")
    chosen = [row for row in rows if row["op"] != "tf.GradientTape.gradient"]
    assert {row["phase"] for row in chosen} == {"backward"}
    assert {row["scope"].rpartition(".")[0] for row in chosen} == {"attention.feed"}
    assert all(row["l2"] is None and row["digest"] for row in chosen)


def test_what_was_traced_before_the_capture_counts_steps_too(tmp_path: Path) -> None:
    training = models.build("recurrent")
    step = tf.function(training.step)
    step()
    with trueup.capture(tmp_path / "capture", level="api", steps="2:"):
        for _ in range(4):
            step()
    assert {row["step"] for row in rows_of(tmp_path / "capture") if row["phase"] == "backward"} == {2, 3}


def test_what_was_traced_before_the_capture_is_seen(record: Record) -> None:
    function = tf.function(lambda x: tf.nn.softplus(x))
    function(tf.constant(A))
    assert any(row["op"].endswith("Softplus") for row in record(lambda: function(tf.constant(A))))


def test_loops_and_branches(record: Record) -> None:
    @tf.function
    def loop(x: Any) -> Any:
        for _ in tf.range(3):
            x = tf.sin(x)
        return tf.cos(x) if tf.reduce_sum(x) > 100 else tf.exp(x)

    rows = record(lambda: loop(tf.constant(A)))
    sines = [row["l2"] for row in rows if row["op"].endswith("Sin") and row["slot"] == "output.0"]
    x, expected = A, []
    for _ in range(3):
        x = np.sin(x)
        expected.append(np.linalg.norm(x))
    assert sines == pytest.approx(expected)
    assert any(row["op"].endswith("Exp") for row in rows)
    assert not any(row["op"].endswith("Cos") for row in rows)


def test_what_xla_compiles_is_seen_from_outside(tmp_path: Path) -> None:
    function = tf.function(lambda x: tf.exp(x) * 2, jit_compile=True)
    with trueup.capture(tmp_path / "capture"):
        function(tf.constant(A))
    rows = rows_of(tmp_path / "capture")
    assert [row["slot"] for row in rows] == ["input.0", "output.0"]
    assert any("compiled by XLA" in note for note in notes_of(tmp_path / "capture"))


def test_pipelines_of_data_get_no_taps(record: Record) -> None:
    def read() -> None:
        data = tf.data.Dataset.from_tensor_slices(A).map(lambda row: tf.exp(row)).batch(2)
        for batch in data:
            tf.reduce_sum(batch)

    rows = record(read)
    assert not any(row["op"].endswith("Exp") for row in rows)
    assert any(row["phase"] == "data" for row in rows)


def test_bfloat16_and_what_has_no_elements(record: Record) -> None:
    rows = record(lambda: tf.cast(tf.constant(A), tf.bfloat16) * 2 + tf.zeros([], tf.bfloat16), detail="tensor")
    scaled = slots(rows, "raw_ops.Mul")["output.0"]
    assert (scaled["dtype"], scaled["l2"]) == ("bfloat16", pytest.approx(2 * np.linalg.norm(A)))
    empty = record(lambda: tf.zeros([0, 3]) + 1.0)
    assert slots(empty, "raw_ops.AddV2")["output.0"]["numel"] == 0


def test_it_refuses_what_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    with pytest.raises(TrueupError, match="level aten is not there for TensorFlow"):
        trueup.capture(tmp_path / "aten", level="aten")
    monkeypatch.setitem(sys.modules, "paddle", sys)
    with pytest.raises(TrueupError, match="PaddlePaddle and TensorFlow are both loaded"):
        Session(tmp_path / "both", CaptureOptions.of(), {})
