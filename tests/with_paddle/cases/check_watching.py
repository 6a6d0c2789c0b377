"""Watching a training in Paddle: silence while all is well, and the first bad call with what led to it when it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F
from recording import bits, rows_of

import trueup
from models import MODELS, build
from trueup.foundation.model import TrueupError
from trueup.recording.recorder.options import WatchStopped

STEPS = 4


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_training_is_left_alone_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    steps = 2 if name == "resnet" else STEPS

    def trained(into: Path | None) -> Any:
        training = build(name)
        if into is None:
            found = [training.step(k) for k in range(steps)]
        else:
            with trueup.watch(training.model, into) as watch:
                found = [training.step(k) for k in range(steps)]
            assert watch.hits == []
        return bits([*found, *training.model.state_dict().values(), paddle.rand([2])])

    assert trained(None) == trained(tmp_path / "watch")
    assert not (tmp_path / "watch").exists()


def test_a_causal_mask_is_no_hit(tmp_path: Path) -> None:
    paddle.seed(1)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    mask = paddle.triu(paddle.full([5, 5], -np.inf), 1)
    optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    with trueup.watch(model, tmp_path / "watch", stop_after=1) as watch:
        for k in range(3):
            x = paddle.to_tensor(np.random.default_rng(k).standard_normal((2, 5, 16)).astype("float32"))
            model(x, src_mask=mask).pow(2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
    assert watch.hits == []


class Energy(nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.log(paddle.exp(x).sum(-1))


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.energy = nn.Linear(4, 8), Energy()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.energy(self.dense(x) * 40)


def loop(batch: Callable[[int], float], path: Path, **options: Any) -> Any:
    paddle.seed(0)
    net = Net()
    optimizer = paddle.optimizer.SGD(1e-3, parameters=net.parameters())
    with trueup.watch(net, path, **options) as watch:
        for step in range(STEPS):
            net(paddle.ones([2, 4]) * batch(step)).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
    return watch


def test_the_first_bad_call_is_named_and_saved_with_what_led_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = loop(lambda step: 9.0 if step == 2 else 1.0, tmp_path / "watch")
    hit, *more = watch.hits
    assert (hit.step, hit.kind, hit.name) == (2, "overflow", "energy/paddle._C_ops.exp, forward")
    assert hit.source.endswith(f"check_watching.py:{Energy.forward.__code__.co_firstlineno + 1} in forward")
    assert "--steps 2:3 --detail tensor --stop" in hit.tensors
    assert {one.kind for one in more} == {"follows"}, "its weights are bad from there on"
    told = capsys.readouterr().err
    assert f"trueup overflow {tmp_path / 'watch' / 'step-000002'}" in told
    rows = rows_of(tmp_path / "watch" / "step-000002")
    assert {"dense", "energy"} <= {row["scope"] for row in rows if row["step"] == 2}
    found = trueup.overflow(tmp_path / "watch" / "step-000002").first
    assert found is not None
    assert (found.place.op, found.place.step) == ("paddle._C_ops.exp", 2)


def test_a_run_is_stopped_before_the_optimizer_writes_the_weights(tmp_path: Path) -> None:
    weights: list[Any] = []

    def batch(step: int) -> float:
        weights.append(step)
        return 9.0 if step == 1 else 1.0

    with pytest.raises(WatchStopped) as stopped:
        loop(batch, tmp_path / "watch", stop_after=1)
    assert stopped.value.code == 3
    assert weights == [0, 1]
    assert (tmp_path / "watch" / "stop").exists()


def test_a_bad_gradient_is_named_by_the_backward_that_makes_it(tmp_path: Path) -> None:
    weight = paddle.to_tensor([0.0, 1.0], stop_gradient=False)
    optimizer = paddle.optimizer.SGD(0.1, parameters=[weight])
    with trueup.watch(None, tmp_path / "watch", stop_after="never") as watch:
        F.relu(paddle.sqrt(weight)).sum().backward()
        optimizer.step()
    (hit,) = watch.hits
    assert hit.name == "paddle._C_ops.sqrt, backward"


def test_one_at_a_time(tmp_path: Path) -> None:
    with (
        trueup.capture(tmp_path / "capture"),
        pytest.raises(TrueupError, match="already running"),
        trueup.watch(None, tmp_path / "watch"),
    ):
        pass
