"""What a monitor takes of a Keras training is what it says, eagerly and in functions, and the training is bitwise the same."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from recording import WARM

import trueup
from trueup.analysis.invariants.relations import learn, save
from trueup.analysis.monitor.kinds import OTHER, kind_of
from trueup.doors.cli import main
from trueup.foundation.store.series import SeriesReader

WORDS = 20


def model() -> Any:
    keras.utils.set_random_seed(3)
    words = keras.layers.Input((8,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 16, name="emb")(words)
    y = keras.layers.LayerNormalization(name="norm")(x)
    x = x + keras.layers.MultiHeadAttention(2, 8, dropout=0.1, name="attn")(y, y, use_causal_mask=True)
    routed = keras.layers.Activation("sigmoid", name="act")(keras.layers.Dense(4, name="router")(x))
    return keras.Model(words, keras.layers.Dense(WORDS, name="head")(x * keras.ops.mean(routed, -1, keepdims=True)))


def fit(directory: Path | None) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    made, losses = model(), []
    inner = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)  # a scale that overflows in float32 once
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127, dynamic_growth_steps=100)
    optimizer.build(made.trainable_variables)  # else all is traced twice
    made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).integers(0, WORDS, (8, 8)).astype("int32")
    told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    also = ("moments", "modules", "extremes", "updates", "inputs")
    monitor = None if directory is None else trueup.monitor(made, None, directory, every=2, alerts=False, also=also, step=20)
    made.fit(x, x, batch_size=2, verbose=0, shuffle=False, callbacks=[told])
    if monitor is not None:
        made.predict(x, verbose=0)  # no step
        monitor.close()
        assert monitor.failure is None
    return losses, [one.numpy() for one in made.weights]


def test_the_training_is_bitwise_the_same(tmp_path: Path) -> None:
    plain, monitored = fit(None), fit(tmp_path / "m")
    np.testing.assert_array_equal(plain[0], monitored[0])
    for one, other in zip(plain[1], monitored[1], strict=True):
        np.testing.assert_array_equal(one, other)
    read = SeriesReader(tmp_path / "m")
    assert (read.problems, read.steps(0).tolist()) == ([], [20, 21, 22, 23])
    assert list(read.capture.ranks[0]["dtypes"]) == ["float32"]
    running = np.cumsum(read.column(0, "loss"))[:3] / np.arange(1, 4)  # what Keras tells is a running mean
    np.testing.assert_allclose(running, plain[0][:3], rtol=1e-6)
    assert read.column(0, "tokens").tolist() == [16] * 4
    names = set(read.names(0))
    assert all(kind_of(name) is not OTHER for name in names)
    assert {"attention_largest_weight/attn", "router_token_entropy/router", "activation_kurtosis/head", "input_rms/head"} <= names
    assert json.loads((tmp_path / "m/rank-00000/modules.json").read_text())["head"]["class"] == "linear"
    assert {"attention_entropy/attn", "attention_largest_logit/attn", "router_load/router", "activation_saturated/act"} <= names
    assert {f"{kind}/head" for kind in ("update_ratio", "variance_norm", "gradient_momentum_cosine")} <= names
    assert np.isnan(read.column(0, "update_ratio/head")).tolist() == [False, True] * 2
    assert read.column(0, "skipped").any()
    assert read.column(0, "loss_scale")[0] == 2.0**127


@pytest.mark.parametrize("function", [False, True])
def test_numbers_are_those_of_the_definitions(tmp_path: Path, function: bool) -> None:
    def train(directory: Path | None) -> Any:
        keras.utils.set_random_seed(0)
        layer, act = keras.layers.Dense(3, use_bias=False, name="first"), keras.layers.ReLU(name="act")
        whole = keras.Sequential([keras.layers.Input((4,)), layer, act])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
        optimizer.build(whole.trainable_variables)

        def step(x: Any) -> Any:
            executed.append(directory)
            with tf.GradientTape() as tape:
                out = whole(x)
                loss = tf.reduce_sum(out)
            gradients = tape.gradient(loss, whole.trainable_variables)
            optimizer.apply_gradients(zip(gradients, whole.trainable_variables, strict=True))
            return out, gradients[0]

        run = tf.function(step) if function else step
        with contextlib.nullcontext() if directory is None else trueup.monitor(
            whole, None, directory, every=1, alerts=False, also=("moments", "spectrum", "inputs")
        ):
            for k in range(3):
                before, held = layer.kernel.numpy(), optimizer.momentums[0].numpy()
                out, gradient = run(tf.random.stateless_normal([5, 4], (k, 1)))
        return before, held, out.numpy(), gradient.numpy(), layer.kernel.numpy(), optimizer.momentums[0].numpy()

    executed: list[Path | None] = []
    plain, monitored = train(None), train(tmp_path / "m")
    assert len(executed) == (2 if function else 6), "what is monitored is traced once, too"
    for one, other in zip(plain, monitored, strict=True):
        np.testing.assert_array_equal(one, other)
    before, held, out, gradient, weight, momentum = monitored
    read = SeriesReader(tmp_path / "m")
    last = {name: read.column(0, name)[-1] for name in read.names(0)}
    norm = np.linalg.norm
    assert read.steps(0).tolist() == [0, 1, 2]
    assert last["loss"] == pytest.approx(out.sum(), rel=1e-6)
    assert last["lr/0"] == pytest.approx(0.1)
    given = tf.random.stateless_normal([5, 4], (2, 1)).numpy()
    assert last["input_rms/first"] == pytest.approx(norm(given) / np.sqrt(20), rel=1e-5)
    assert [last["input_min/first"], last["input_max/first"]] == [given.min(), given.max()]
    assert last["gradient_norm_before_clip"] == pytest.approx(norm(gradient), rel=1e-5)
    assert last["gradient_norm/first"] == pytest.approx(0.5, rel=1e-5)
    assert last["clip_ratio"] == pytest.approx(0.5 / norm(gradient), rel=1e-5)
    assert last["update_ratio/first"] == pytest.approx(norm(weight - before) / norm(weight), rel=1e-5)
    assert last["momentum_norm/first"] == pytest.approx(norm(momentum), rel=1e-5)
    assert last["gradient_momentum_cosine/first"] == pytest.approx((gradient * held).sum() / norm(gradient) / norm(held), abs=1e-5)
    assert last["activation_zeros/act"] == pytest.approx((out == 0).mean())
    singular = np.linalg.svd(weight, compute_uv=False)
    assert last["spectral_norm/first.kernel"] == pytest.approx(singular[0], rel=0.02)
    assert last["stable_rank/first.kernel"] == pytest.approx((singular**2).sum() / singular[0] ** 2, rel=0.04)
    assert last["activation_mean/act"] == pytest.approx(out.mean(), rel=1e-5)
    assert last["activation_rms/act"] == pytest.approx(norm(out) / np.sqrt(15), rel=1e-5)


SCRIPT = """
import keras, numpy as np, tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(2)  # refused once a device is in use
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")  # built while the first step is traced
x = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
model.fit(x, x[:, :1], batch_size=2, verbose=0)
"""


def test_the_command_needs_no_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["monitor", "-o", "m", "--", WARM, "train.py"]) == 0
    assert "series over 3 steps into" in capfd.readouterr().err
    read = SeriesReader("m")
    assert (read.steps(0).tolist(), read.capture.ranks[0]["framework"]) == ([0, 1, 2], "tensorflow")
    assert read.column(0, "loss_scale").tolist() == [2.0**15] * 3
    assert {"gradient_norm/dense", "gradient_norm/dense_1", "update_ratio/dense_1", "activation_zeros/dense"} <= set(read.names(0))


@pytest.mark.parametrize("eager", [True, False])
def test_steps_that_only_add_up_gradients_are_skipped(tmp_path: Path, eager: bool) -> None:
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="out")])
    made.compile(keras.optimizers.Adam(0.1, gradient_accumulation_steps=3), "mse", run_eagerly=eager, jit_compile=False)
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
    with trueup.monitor(made, None, tmp_path / "m", every=1) as monitor:
        made.fit(x, x[:, :2], batch_size=2, verbose=0)
    assert (monitor.failure, monitor.alerts) == (None, [])
    read = SeriesReader(tmp_path / "m")
    assert read.column(0, "skipped").tolist() == [1, 1, 0, 1, 1, 0]
    assert (read.column(0, "update_ratio/out") > 0).tolist() == [False, False, True, False, False, True]
    assert read.column(0, "momentum_to_variance/out")[:2].tolist() == [0, 0]


def test_what_xla_compiles_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", jit_compile=True)
    with trueup.monitor(made, None, tmp_path / "m") as monitor:
        made.fit(np.ones((2, 4), np.float32), np.ones((2, 1), np.float32), verbose=0)
    assert (monitor.count, monitor.failure) == (0, None)
    assert "is compiled by XLA (jit_compile=True): nothing inside is monitored" in capfd.readouterr().err


@pytest.mark.parametrize("eager", [True, False])
def test_invariants_are_learned_and_checked_while_it_runs(tmp_path: Path, eager: bool) -> None:
    def fit(count: int, seed: int, frozen: bool = False) -> None:
        keras.utils.set_random_seed(seed)
        made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eager, jit_compile=False)
        stop = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: (
            made.optimizer.learning_rate.assign(0.0) if frozen and batch == 5 else None
        ))  # fmt: skip
        x = np.random.default_rng(seed).normal(size=(2 * count, 4)).astype("float32")
        made.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[stop])

    with trueup.capture(tmp_path / "c", level=("module", "api"), detail="digest"):
        fit(6, 0)
    known = learn([tmp_path / "c"])
    assert all(known.kinds[name] for name in ("changes", "same", "arguments", "types", "shapes", "calls"))
    save(known, tmp_path / "known.json")
    for frozen in (False, True):
        monitor = trueup.monitor(None, None, tmp_path / f"m{frozen}", invariants=tmp_path / "known.json", check=5)
        fit(11, 7, frozen)
        monitor.close()
        said = [one.said for one in monitor.alerts if one.rule == "invariant"]
        assert (monitor.failure, len(said), monitor.count) == (None, int(frozen), 5), said
        assert not frozen or "is what it was in step 7; in the healthy run each step changes it" in said[0]
