"""Graphs whose optimizer takes away what would be fetched: they run all the same; and what switches such rewrites off."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from recording import notes_of, rows_of
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

import trueup
from trueup.foundation.facts.operators import named
from trueup.recording.adapters.tensorflow import switching
from trueup.recording.engine.replacing import Switching

EXAMPLE = Path(__file__).parents[3] / "examples" / "tensorflow_classifier"


@pytest.fixture(scope="module", autouse=True)
def graphs() -> None:
    """For good: nothing else of this process comes after the sessions."""
    tf.disable_eager_execution()


@pytest.fixture
def activations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("activations_of_the_example", EXAMPLE / "activations.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(activate: Any) -> list[float]:
    """Train a step of one layer and return its losses."""
    graph = tf.Graph()
    with graph.as_default():
        tf.set_random_seed(3)
        x = tf.placeholder(tf.float32, [16, 6])
        hidden = activate(tf.matmul(x, tf.get_variable("weight", [6, 8])))
        loss = tf.reduce_mean(tf.square(tf.matmul(hidden, tf.get_variable("head", [8, 3]))))
        train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            batches = [np.random.default_rng(k).standard_normal((16, 6)).astype(np.float32) for k in range(2)]
            return [float(session.run([loss, train], {x: batch})[0]) for batch in batches]


def test_values_that_the_optimizer_takes_away_are_not_fetched(activations: ModuleType, tmp_path: Path) -> None:
    for name, activate in (("selected", lambda x: activations.gelu(x, "wrong")), ("fused", lambda x: activations.silu(x, "wrong"))):
        plain = trained(activate)
        with trueup.capture(tmp_path / name):
            captured = trained(activate)
        assert captured == pytest.approx(plain, rel=1e-6)
        assert {row["op"] for row in rows_of(tmp_path / name)} >= {"tf.raw_ops.MatMul", "tf.Session.run"}
    assert any("some values of a session's graph are not recorded" in note for note in notes_of(tmp_path / "selected"))


def test_losses_alone_leave_the_graph_to_its_optimizer(activations: ModuleType, tmp_path: Path) -> None:
    plain = trained(lambda x: activations.gelu(x, "wrong"))
    with trueup.capture(tmp_path / "losses", include=named("loss")):
        captured = trained(lambda x: activations.gelu(x, "wrong"))
    assert captured == plain
    assert {row["op"] for row in rows_of(tmp_path / "losses")} == {"tf.Session.run"}
    assert not any("sessions fetch" in note for note in notes_of(tmp_path / "losses"))


def test_a_rewrite_is_switched_off_whatever_the_script_asks_for(activations: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = (trained(lambda x, fused=fused: activations.gelu(x, fused)) for fused in ("right", "wrong"))
    assert wrong != pytest.approx(right, rel=1e-4), "the planted fault is one"
    for name in ("_rewrites", "_optimizer", "_npu"):
        monkeypatch.setattr(switching, name, {})
    order = {"name": "selector", "framework": "tensorflow", "adapter": {"rewriter": {"implementation_selector": "OFF"}}}
    gone = {"name": "gone", "framework": "tensorflow", "adapter": {"rewriter": {"no_such_pass": "OFF"}}}
    told = Switching("tensorflow", [order, gone]).report()
    try:
        assert (told["off"], told["failed"]) == (["selector"], {"gone": "ValueError: RewriterConfig has no field no_such_pass"})
        assert trained(lambda x: activations.gelu(x, "wrong")) == pytest.approx(right, rel=1e-6)
    finally:
        while switching._standing:
            switching._standing.pop().remove()


def test_ascends_fusion_file_reaches_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching, "_npu", {"fusion_switch_file": "/tmp/switch.json"})
    monkeypatch.setattr(switching, "_rewrites", {"remapping": "OFF"})
    config = config_pb2.ConfigProto()
    for name in ("NpuOptimizer", "another"):
        config.graph_options.rewrite_options.custom_optimizers.add().name = name
    forced = switching.force(config).graph_options.rewrite_options
    assert forced.custom_optimizers[0].parameter_map["fusion_switch_file"].s == b"/tmp/switch.json"
    assert not forced.custom_optimizers[1].parameter_map
    assert forced.remapping == rewriter_config_pb2.RewriterConfig.OFF
