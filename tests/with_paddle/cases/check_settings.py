"""What a Paddle training is set to, and that it is named where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import trueup


def train(path: Path, *, lr: float = 0.01, epsilon: float = 1e-5, gamma: float = 0.5) -> Path:
    paddle.seed(0)
    net = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.LayerNorm(16, epsilon=epsilon), paddle.nn.Linear(16, 2))
    rate = paddle.optimizer.lr.StepDecay(lr, step_size=2, gamma=gamma)
    optimizer = paddle.optimizer.AdamW(rate, parameters=net.parameters(), weight_decay=0.01)
    numbers = np.random.RandomState(0)
    with trueup.capture(path, model=net):
        for _ in range(4):
            net(paddle.to_tensor(numbers.randn(4, 8).astype("float32"))).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            rate.step()
    return path


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.011}, "AdamW lr: 0.01 in the baseline, 0.011 in the candidate"),
    ({"epsilon": 1e-4}, "epsilon of 1 (LayerNorm): 1e-05 in the baseline, 0.0001 in the candidate"),
    ({"gamma": 0.25}, "AdamW lr: 0.005 in the baseline, 0.0025 in the candidate (from step 2)"),
]


@pytest.mark.parametrize(("changed", "said"), CHANGED)
def test_the_setting_is_named_first(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    sides = train(tmp_path / "baseline"), train(tmp_path / "candidate", **changed)
    assert trueup.preflight(*sides).sentence == said
    assert trueup.compare(*sides).sentence.splitlines()[0] == f"DEVIATES  {said}"


def test_equal_settings_are_clear(tmp_path: Path) -> None:
    found = trueup.preflight(train(tmp_path / "baseline"), train(tmp_path / "candidate"))
    assert (found.verdict, found.settings, found.odd) == ("clear", (), ())
