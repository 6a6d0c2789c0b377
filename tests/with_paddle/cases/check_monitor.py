"""What a monitor takes of a Paddle training is what it says, and the training is bitwise the one without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from recording import WARM

import trueup
from models import transformer
from trueup.analysis.invariants.relations import learn, save
from trueup.analysis.monitor.kinds import OTHER, kind_of
from trueup.doors.cli import main
from trueup.foundation.store.series import SeriesReader

ALSO = ("moments", "spectrum", "output-gradients", "modules", "extremes", "updates", "inputs", "micro-batches")


def train(directory: Path | None, steps: int = 4) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    paddle.seed(3)
    training = transformer()
    monitor = None
    if directory is not None:
        monitor = trueup.monitor(training.model, training.optimizer, directory, every=2, alerts=False, also=ALSO, step=20)
    losses = [float(training.step(k)) for k in range(steps)]
    if monitor is not None:
        monitor.close()
        assert monitor.failure is None
    return losses, [p.numpy() for p in training.model.parameters()]


def test_the_training_is_bitwise_the_same_and_its_loss_is_told(tmp_path: Path) -> None:
    plain, monitored = train(None), train(tmp_path / "m")
    assert plain[0] == monitored[0]
    assert all(np.array_equal(one, other) for one, other in zip(plain[1], monitored[1], strict=True))
    read = SeriesReader(tmp_path / "m")
    assert read.problems == []
    assert list(read.capture.ranks[0]["dtypes"]) == ["float32"]
    assert read.column(0, "loss").tolist() == plain[0]
    assert read.column(0, "tokens").tolist() == [32] * 4
    before, ratio = read.column(0, "gradient_norm_before_clip"), read.column(0, "clip_ratio")
    assert (before > 1).all()  # clipped to 1
    np.testing.assert_allclose(read.column(0, "gradient_norm"), np.minimum(1, before * ratio), rtol=1e-4)
    names = set(read.names(0))
    assert all(kind_of(name) is not OTHER for name in names)
    scope = "encoder.layers.1.self_attn"
    assert {f"attention_largest_logit/{scope}", f"attention_entropy/{scope}", f"activation_rms/{scope}.q_proj"} <= names
    assert {f"{kind}/head" for kind in ("update_ratio", "variance_norm", "gradient_momentum_cosine")} <= names
    assert np.isnan(read.column(0, "update_ratio/head")).tolist() == [False, True] * 2
    assert {f"{kind}/{scope}.q_proj" for kind in ("activation_kurtosis", "output_gradient_rms")} <= names
    assert f"attention_largest_weight/{scope}" in names
    assert json.loads((tmp_path / "m/rank-00000/modules.json").read_text())["head"]["class"] == "Linear"


def test_numbers_are_those_of_the_definitions(tmp_path: Path) -> None:
    paddle.seed(0)
    layer = paddle.nn.Linear(4, 3, bias_attr=False)
    model = paddle.nn.Sequential(layer, paddle.nn.ReLU(), paddle.nn.Sigmoid())
    optimizer = paddle.optimizer.Momentum(0.1, 0.9, parameters=model.parameters())
    seen: list[Any] = []
    with trueup.monitor(model, None, tmp_path / "m", every=1, alerts=False, also=ALSO):
        for step in range(3):
            before = layer.weight.numpy()
            x = paddle.randn([5, 4]) * (9.0 if step == 2 else 1.0)
            out = model(x)
            loss = out.sum()
            out.register_hook(seen.append)
            loss.backward()
            gradient, held = layer.weight.grad.numpy(), [v.numpy() for v in optimizer._accumulators.get("velocity", {}).values()]
            optimizer.step()
            optimizer.clear_grad()
    read = SeriesReader(tmp_path / "m")
    last = {name: read.column(0, name)[-1] for name in read.names(0)}
    weight, velocity = layer.weight.numpy(), optimizer._accumulators["velocity"][layer.weight.name].numpy()
    norm = np.linalg.norm
    assert last["loss"] == pytest.approx(float(loss))
    assert last["lr/0"] == pytest.approx(0.1)
    assert last["gradient_norm/0"] == pytest.approx(norm(gradient), rel=1e-5)
    assert last["update_ratio/0"] == pytest.approx(norm(weight - before) / norm(weight), rel=1e-5)
    assert last["accumulated_gradient_norm/0"] == pytest.approx(norm(gradient), rel=1e-5)
    assert last["input_rms/0"] == pytest.approx(norm(x.numpy()) / np.sqrt(20), rel=1e-5)
    assert [last["input_min/0"], last["input_max/0"]] == [x.numpy().min(), x.numpy().max()]
    assert last["momentum_norm/0"] == pytest.approx(norm(velocity), rel=1e-5)
    cosine = (gradient * held[0]).sum() / norm(gradient) / norm(held[0])
    assert last["gradient_momentum_cosine/0"] == pytest.approx(cosine, abs=1e-5)
    assert last["activation_saturated/2"] == pytest.approx(float((out.numpy() > 0.99).mean()))
    assert last["activation_rms/2"] == pytest.approx(norm(out.numpy()) / np.sqrt(15), rel=1e-5)
    assert last["activation_mean/2"] == pytest.approx(float(out.numpy().mean()), rel=1e-5)
    assert last["output_gradient_rms/2"] == pytest.approx(norm(seen[-1].numpy()) / np.sqrt(15), rel=1e-5)
    singular = np.linalg.svd(weight, compute_uv=False)
    assert last["spectral_norm/0.weight"] == pytest.approx(singular[0], rel=0.02)
    assert last["stable_rank/0.weight"] == pytest.approx((singular**2).sum() / singular[0] ** 2, rel=0.04)


SCRIPT = """
import paddle
paddle.seed(0)
model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 1))
optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
for step in range(3):
    model(paddle.randn([3, 4])).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()
"""


def test_the_command_needs_no_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["monitor", "-o", "m", "--", WARM, "train.py"]) == 0
    assert "series over 3 steps into" in capfd.readouterr().err
    read = SeriesReader("m")
    assert (read.steps(0).tolist(), read.capture.ranks[0]["framework"]) == ([0, 1, 2], "paddle")
    assert {"gradient_norm/0", "gradient_norm/2", "activation_zeros/1", "update_ratio/2"} <= set(read.names(0))
    assert main(["compare", "m", "m"]) == 0


def test_invariants_are_learned_and_checked_while_it_runs(tmp_path: Path) -> None:
    def steps(count: int, seed: int, forgets: bool = False) -> None:
        paddle.seed(seed)
        model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Dropout(0.2), paddle.nn.Linear(8, 1))
        optimizer = paddle.optimizer.Momentum(0.01, parameters=model.parameters())
        for step in range(count):
            model(paddle.randn([3, 4])).square().mean().backward()
            optimizer.step()
            if not (forgets and step >= 5):
                optimizer.clear_grad()

    with trueup.capture(tmp_path / "c", level=("module", "api"), detail="digest"):
        steps(6, 0)
    known = learn([tmp_path / "c"])
    assert all(known.kinds[name] for name in ("changes", "same", "arguments", "types", "shapes", "calls"))
    save(known, tmp_path / "known.json")
    for forgets in (False, True):
        monitor = trueup.monitor(None, None, tmp_path / f"m{forgets}", invariants=tmp_path / "known.json", check=5)
        steps(11, 7, forgets)
        monitor.close()
        said = [one.said for one in monitor.alerts if one.rule == "invariant"]
        assert monitor.failure is None
        assert len(said) == int(forgets), said
        assert not forgets or "as in the healthy run: it was changed or not cleared" in said[0]
