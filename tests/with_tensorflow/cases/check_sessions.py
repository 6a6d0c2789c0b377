"""Sessions of TensorFlow 1: what a run computes is recorded, and the run computes what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graph
import kernels_graph
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from recording import Record, bits, notes_of, rows_of, slots

import trueup


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> None:
    """As a script of TensorFlow 1 begins; it cannot be undone, so these tests are the last of their process."""
    tf.disable_eager_execution()


def test_what_a_run_computes(record: Record) -> None:
    rows = record(lambda: graph.run(2), detail="tensor")
    trained = [row for row in rows if row["step"] == 1]
    product, backward = slots(trained, "raw_ops.MatMul"), slots(trained, "raw_ops.MatMul", "backward")
    assert {row["scope"] for row in trained if row["phase"] == "forward"} >= {"encoder", "head"}
    assert product["input.0"]["l2"] == pytest.approx(np.linalg.norm(graph.inputs(1)), rel=1e-6)
    assert backward["input.0"]["scope"] == "head"
    of_head = [row for row in trained if row["op"].endswith("MatMul") and row["phase"] == "forward" and row["scope"] == "head"]
    assert backward["input.0"]["forward_seq"] == of_head[0]["seq"]
    tanh = slots(trained, "raw_ops.Tanh")
    assert tanh["input.0"]["producer_seq"] == slots(trained, "raw_ops.BiasAdd")["output.0"]["seq"]
    assert any(row["op"].endswith("ResourceApplyAdam") and row["phase"] == "optimizer" for row in trained)
    assert {row["step"] for row in rows} >= {0, 1}


@pytest.mark.parametrize("monitored", [False, True])
def test_the_run_computes_the_same_bits_where_nothing_is_fused(tmp_path: Path, monitored: bool) -> None:
    plain = graph.run(3, monitored=monitored)
    with trueup.capture(tmp_path / "capture"):
        captured = graph.run(3, monitored=monitored)
    assert bits(captured) == bits(plain)
    losses = [value for _, value in trueup.compare(tmp_path / "capture", tmp_path / "capture").baseline.losses]
    assert losses == [float(value) for value in plain[:3]]
    assert any("sessions fetch what they compute" in note for note in notes_of(tmp_path / "capture"))


def test_steps_that_are_not_recorded_fetch_nothing(tmp_path: Path) -> None:
    with trueup.capture(tmp_path / "capture", steps="1:2"):
        graph.run(3)
    assert {row["step"] for row in rows_of(tmp_path / "capture")} == {1}


def loses_a_row(values: Any) -> Any:
    wrong = values.copy()
    wrong[-1] = 0
    return wrong


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_culprit_is_named(tmp_path: Path, phase: str) -> None:
    with trueup.capture(tmp_path / "healthy"):
        graph.run(2)
    with trueup.capture(tmp_path / "broken"):
        graph.run(2, **{phase: loses_a_row})
    result = trueup.compare(tmp_path / "healthy", tmp_path / "broken")
    assert result.culprit is not None
    assert (result.culprit.op, result.culprit.phase, result.culprit.step) == ("tf.raw_ops.PyFunc", phase, 0)
    assert "graph.py" in result.sentence


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("kernels") / "healthy"
    with trueup.capture(into):
        assert kernels_graph.run() == []
    return into


@pytest.mark.parametrize("fault", ["matmul-bf16-accumulation", "softmax-backward", "embedding-shifted-row", "stale-buffer-reuse"])
def test_the_broken_kernel_is_named(tmp_path: Path, healthy: Path, fault: str) -> None:
    with trueup.capture(tmp_path / "broken"):
        first = kernels_graph.run(fault)[0]
    culprit = trueup.compare(healthy, tmp_path / "broken").culprit
    assert culprit is not None
    assert (culprit.step, culprit.phase, culprit.scope, culprit.op) == (first.step, first.phase, first.scope, first.op)


def test_a_branch_is_seen_from_outside(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [2])
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.exp(x), lambda: tf.sin(x)) * 2
        with trueup.capture(tmp_path / "capture"):
            assert session.run(y, {x: [1.0, 2.0]}) == pytest.approx(2 * np.exp([1.0, 2.0]), rel=1e-6)
    assert any(row["op"].endswith("Mul") for row in rows_of(tmp_path / "capture"))


def with_plain_variables(folder: Path, factor: float) -> list[float]:
    """Train two layers whose weights are variables without a resource: a run that updates them may be asked for them meanwhile."""
    numbers = np.random.default_rng(0)
    with tf.Graph().as_default(), trueup.capture(folder):
        inputs, wanted = tf.placeholder(tf.float32, [8, 6]), tf.placeholder(tf.float32, [8, 3])
        weights = [tf.get_variable(name, shape, initializer=tf.ones_initializer(), use_resource=False) for name, shape in (
            ("first", [6, 5]), ("second", [5, 3]))]  # fmt: skip
        hidden = tf.tanh(tf.matmul(inputs, weights[0])) * factor
        loss = tf.reduce_mean(tf.square(tf.matmul(hidden, weights[1]) - wanted))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            drawn = [{inputs: numbers.normal(size=(8, 6)), wanted: numbers.normal(size=(8, 3))} for _ in range(3)]
            return [float(session.run([loss, train], feed)[0]) for feed in drawn]


def test_a_variable_that_a_run_writes_is_read_before(tmp_path: Path) -> None:
    with_plain_variables(tmp_path / "right", 1.0)
    with_plain_variables(tmp_path / "again", 1.0)
    with_plain_variables(tmp_path / "wrong", 1.01)
    rows = rows_of(tmp_path / "right")
    first = [row for row in rows if row["step"] == 0 and row["scope"] == "first" and row["slot"] == "output.0"]
    assert {round(row["l2"] ** 2, 3) for row in first if row["op"].endswith(("VariableV2", "Identity"))} == {30.0}
    assert trueup.compare(tmp_path / "right", tmp_path / "again").verdict == "aligned"
    found = trueup.compare(tmp_path / "right", tmp_path / "wrong")
    assert "DEVIATES  tf.raw_ops.Mul at " in str(found)
    assert "1.0 in the baseline, 1.0099" in str(found)
    assert "further culprit" not in str(found)
