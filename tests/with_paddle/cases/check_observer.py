"""Captured or not, a training computes the same bits, and nothing of the capture stays in Paddle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import _C_ops, nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from recording import bits

import models
import trueup


def train(name: str, into: Path | None, **options: Any) -> tuple[Any, ...]:
    """Train three steps; return losses, gradients of the last one, weights, and what the generator draws next."""
    training = models.build(name)
    losses = []

    def loop() -> list[paddle.Tensor]:
        for number in range(2):
            losses.append(training.step(number))
        losses.append(training.loss(2))
        losses[-1].backward()
        return [p.grad for p in training.model.parameters() if p.grad is not None]

    if into is None:
        gradients = loop()
    else:
        with trueup.capture(into, model=training.model, **options):
            gradients = loop()
    return bits(losses), bits(gradients), bits(training.model.parameters()), bits([paddle.rand([4])])


@pytest.mark.parametrize(
    ("level", "detail"), [(["module", "api"], "stats"), ("module", "digest"), ("api", "tensor"), (["module", "api"], "tensor")]
)
def test_a_captured_training_computes_the_same_bits(tmp_path: Path, level: Any, detail: str) -> None:
    plain = train("transformer", None)
    assert train("transformer", tmp_path / "capture", level=level, detail=detail) == plain


@pytest.mark.parametrize("name", ["ctc", "lstm"])
def test_models_with_recurrent_layers_too(tmp_path: Path, name: str) -> None:
    assert train(name, tmp_path / "capture") == train(name, None)


def mixed(reentrant: bool) -> list[paddle.Tensor]:
    """Scaled loss, autocast, accumulation, recomputation, second derivatives, user's hooks, in-place writes."""
    paddle.seed(3)
    first, block, last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.3)), nn.Linear(4, 1)
    parameters = [*first.parameters(), *block.parameters(), *last.parameters()]
    optimizer = paddle.optimizer.Momentum(0.1, parameters=parameters)
    scaler = paddle.amp.GradScaler(init_loss_scaling=128.0)
    made = []
    for number in range(4):
        x = paddle.randn([3, 4])
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            hidden = recompute(block, first(x), use_reentrant=reentrant)
            hidden.register_hook(lambda gradient: gradient * 2)
            loss = (last(hidden) ** 2).mean()
        scaler.scale(loss).backward()
        made += [loss, first.weight.grad.clone()]
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
    x = paddle.randn([5])
    x.stop_gradient = False
    (slope,) = paddle.grad((x**3).sum(), x, create_graph=True)
    (slope * slope).sum().backward()
    y = x.detach() * 2
    y.add_(x.detach())
    y[1:] = F.relu_(y[1:] * 1.0)
    return [*made, *parameters, x.grad, y]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["module", "api", "all"])
def test_what_else_trainings_do(tmp_path: Path, level: str, reentrant: bool) -> None:
    plain = bits(mixed(reentrant))
    with trueup.capture(tmp_path / "capture", level=level):
        captured = bits(mixed(reentrant))
    assert captured == plain


def test_nothing_stays_behind(tmp_path: Path) -> None:
    def state() -> list[int]:
        optimizers = paddle.optimizer.Optimizer.__subclasses__()
        kinds = (paddle.Tensor, nn.Layer, paddle.autograd.PyLayer, paddle.amp.GradScaler, *optimizers)
        return [id(value) for kind in kinds for _, value in sorted(vars(kind).items())] + [
            id(getattr(module, name))
            for module in (_C_ops, paddle, paddle.base.core.eager, F, paddle.tensor.math)
            for name in sorted(dir(module))
        ]

    before = state()
    layer = nn.LSTM(3, 4)
    with trueup.capture(tmp_path / "capture"):
        layer(paddle.ones([1, 2, 3]))[0].sum().backward()
        assert state() != before
    assert state() == before


def test_an_exception_of_ours_ends_the_capture_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trueup.recording.adapters.paddle import buffers

    plain = train("lstm", None)

    def broken(*_: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(buffers.Slots, "delivered", broken)
    assert train("lstm", tmp_path / "capture") == plain
    assert "The training goes on without it" in capsys.readouterr().err


def test_a_run_that_is_to_stop_stops_with_our_exception_and_not_with_one_from_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trueup.foundation.model import RunStopped
    from trueup.recording.adapters.paddle import buffers

    def broken(*_: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(buffers.Slots, "delivered", broken)
    with pytest.raises(RunStopped, match="not today"):
        train("lstm", tmp_path / "capture", on_error="stop")


def test_an_exception_of_the_users_is_the_users(tmp_path: Path) -> None:
    class Broken(nn.Layer):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            raise KeyError("mine")

    x = paddle.ones([2, 3])
    with trueup.capture(tmp_path / "capture"):
        with pytest.raises(KeyError, match="mine"):
            Broken()(x)
        with pytest.raises(ValueError, match="matmul"):
            paddle.matmul(x, x)
        after = (x + 1).sum()
    assert float(after) == 12
