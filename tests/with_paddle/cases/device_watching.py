"""Loss scaling as a watch and a report see it: `paddle.amp.GradScaler` works on devices only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest
from recording import bits, rows_of

import trueup
from models import build
from trueup.foundation.store.series import SeriesReader

FLOAT32 = {"linear", "matmul", "matmul_v2", "conv2d", "bmm", "mul", "addmm"}
"""What auto_cast would run in float16, for which this device has no kernels."""


@pytest.fixture(autouse=True)
def _floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle 3.3's GradScaler prints ``float`` of a tensor of shape [1], which NumPy 2.4 refuses."""
    monkeypatch.setattr(paddle.Tensor, "__float__", lambda tensor: tensor.item())


def train(name: str, scale: float, steps: int = 6) -> tuple[list[bool], list[Any]]:
    """Train with a loss scale; return which steps changed nothing, and the weights."""
    paddle.set_device("host:0")
    training, scaler = build(name), paddle.amp.GradScaler(init_loss_scaling=scale)
    skipped = []
    for k in range(steps):
        before = bits(training.model.parameters())
        with paddle.amp.auto_cast(dtype="float16", custom_black_list=FLOAT32):
            loss = (training.loss(k) - 1.5) * 1000.0  # whose gradients overflow where it hardly does
            scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.clear_grad()
        skipped.append(bits(training.model.parameters()) == before)
    return skipped, bits([*training.model.state_dict().values()])


def test_steps_that_a_scaler_skips_are_no_hits(tmp_path: Path) -> None:
    skipped, plain = train("lstm", 2.0**120)
    assert skipped == [True, True, *[False] * 4]
    with trueup.watch(None, tmp_path / "watch") as watch:
        again, watched = train("lstm", 2.0**120)
    assert (again, watched) == (skipped, plain)
    assert watch.hits == []
    scale = watch._session.report()["watch"]["loss_scale"]
    assert (scale["changes"][0], "2 of 6 steps skipped" in scale["said"]) == ((0, 2.0**120, True), True)


def test_a_capture_tells_the_scale_and_overflow_takes_skipped_steps_for_healthy(tmp_path: Path) -> None:
    with trueup.capture(tmp_path / "capture"):
        train("lstm", 2.0**120)
    rows = rows_of(tmp_path / "capture")
    steps = [row["max"] for row in rows if row["op"] == "paddle.amp.GradScaler.step" and row["slot"] == "input.scale"]
    assert steps == [2.0**120, 2.0**119, *[2.0**118] * 4]
    updates = [row["max"] for row in rows if row["op"] == "paddle.amp.GradScaler.update" and row["slot"] == "output.scale"]
    assert updates == [*steps[1:], steps[-1]]
    result = trueup.overflow(tmp_path / "capture")
    assert (result.exit_code, [one.skipped for one in result.scale]) == (0, [True, True, *[False] * 4])


def test_a_scale_that_falls_to_one_is_a_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = paddle._C_ops.tanh

    def broken(x: paddle.Tensor, *args: Any) -> paddle.Tensor:
        return original(x, *args) / 0.0

    monkeypatch.setattr(paddle.nn.functional, "tanh", broken)
    with trueup.watch(None, tmp_path / "watch") as watch:
        train("lstm", 2.0, steps=3)
    assert watch.hits
    assert watch.hits[0].kind == "loss_scale"
    assert "what overflowed" in watch.hits[0].said


def test_a_monitor_tells_the_scale_and_the_skipped_steps(tmp_path: Path) -> None:
    plain = train("lstm", 2.0**120)
    with trueup.monitor(None, None, tmp_path / "m", every=1) as monitor:
        assert train("lstm", 2.0**120) == plain
    read = SeriesReader(tmp_path / "m")
    assert monitor.failure is None
    assert read.column(0, "skipped").tolist() == [1, 1, 0, 0, 0, 0]
    assert read.column(0, "loss_scale").tolist() == [2.0**120, 2.0**119, *[2.0**118] * 4]
    assert (read.column(0, "loss") < 1e5).all()
