"""Captured or not, a training computes the same bits, and nothing of the capture stays in TensorFlow."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from recording import bits, notes_of
from tensorflow.python.eager import backprop, execute
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import ops

import models
import trueup


def train(name: str, into: Path | None, *, function: bool = False, **options: Any) -> tuple[Any, ...]:
    """Train three steps; return losses, gradients, weights, and what the generators draw next."""
    training = models.build(name)
    step = tf.function(training.step) if function else training.step

    def loop() -> list[tuple[Any, list[Any]]]:
        return [step() for _ in range(3)]

    if into is None:
        made = loop()
    else:
        with trueup.capture(into, model=training.model, **options):
            made = loop()
    losses, gradients = [loss for loss, _ in made], [g for _, found in made for g in found]
    return bits(losses), bits(gradients), bits(training.model.get_weights()), bits([tf.random.uniform([4])])


@functools.cache
def plain(name: str) -> tuple[Any, ...]:
    """Train the same without a capture, eagerly."""
    return train(name, None)


@pytest.mark.parametrize(
    ("name", "level", "detail"),
    [("transformer", "all", "stats"), ("transformer", "module", "digest"), ("recurrent", "api", "tensor"),
     ("convolutional", "all", "tensor")],
)  # fmt: skip
def test_a_captured_training_computes_the_same_bits(tmp_path: Path, name: str, level: str, detail: str) -> None:
    assert train(name, tmp_path / "capture", level=level, detail=detail) == plain(name)


@pytest.fixture
def unfused() -> Any:
    """Switch TensorFlow's graph optimizer off: what it fuses, a tap keeps apart."""
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


@pytest.mark.parametrize(("name", "phase"), [("convolutional", None), ("recurrent", None)])
def test_functions_compute_the_same_bits_where_nothing_is_fused(tmp_path: Path, name: str, phase: Any, unfused: None) -> None:
    """Not the transformer, in whose backward four gradients are added in an order that buffers decide (docs/tensorflow.md)."""
    captured = train(name, tmp_path / "capture", function=True, phase=phase)
    assert captured == train(name, None, function=True)
    assert any("kernels that TensorFlow's graph optimizer would fuse" in note for note in notes_of(tmp_path / "capture"))


def test_nothing_stays_behind(tmp_path: Path) -> None:
    def state() -> list[Any]:
        places = ((keras.layers.Layer, "__call__"), (keras.optimizers.Optimizer, "apply"), (tf.GradientTape, "gradient"),
                  (ops, "get_gradient_function"), (execute, "record_gradient"), (execute, "execute"),
                  (backprop, "_gradient_function"), (polymorphic_function.Function, "__call__"))  # fmt: skip
        return [getattr(holder, name) for holder, name in places]

    before = state()
    with trueup.capture(tmp_path / "capture"):
        tf.function(lambda x: x + 1)(tf.ones([2]))
        assert state() != before
    assert state() == before


def test_an_exception_of_ours_ends_the_capture_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trueup.recording.adapters.tensorflow import gradients

    def broken(*_: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(gradients.Gradients, "_of_layers", broken)
    assert train("recurrent", tmp_path / "capture") == plain("recurrent")
    assert "The training goes on without it" in capsys.readouterr().err


def test_an_exception_of_the_users_is_the_users(tmp_path: Path) -> None:
    class Broken(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            raise KeyError("mine")

    with trueup.capture(tmp_path / "capture"):
        with pytest.raises(KeyError, match="mine"):
            Broken()(tf.ones([2, 3]))
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.matmul(tf.ones([2, 3]), tf.ones([2, 3]))
        assert float(tf.reduce_sum(tf.ones([2, 3]) + 1)) == 12


def test_what_is_saved_holds_no_tap(tmp_path: Path) -> None:
    module = tf.Module()
    module.weight = tf.Variable([2.0, 3.0])
    module.scale = tf.function(lambda x: x * module.weight, input_signature=[tf.TensorSpec([2], tf.float32)])
    with trueup.capture(tmp_path / "capture"):
        module.scale(tf.ones([2]))
        tf.saved_model.save(module, str(tmp_path / "saved"))
    assert b"PyFunc" not in (tmp_path / "saved" / "saved_model.pb").read_bytes()
    assert tf.saved_model.load(str(tmp_path / "saved")).scale(tf.ones([2])).numpy().tolist() == [2.0, 3.0]
