"""Two whole trainings, as users port them: plain captures of each, no map, no agreed levels; and the setting that the port lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
import torch.nn.functional as tf
from paddle import nn as pnn
from paddle.nn import functional as pf
from torch import nn

import trueup

STEPS, WIDTH = 3, 16


class Reader(nn.Module):
    """One attention with packed projections, of whose bias a third has no gradient but rounding, behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.bn, self.qkv = nn.Embedding(11, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.fc = nn.Linear(WIDTH, 5)

    def forward(self, x: Any) -> Any:
        y = self.bn(self.emb(x).transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(y).split(WIDTH, -1)
        return self.fc((torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v).mean(1))


class PaddleReader(pnn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.bn = pnn.Embedding(11, WIDTH), pnn.BatchNorm1D(WIDTH)
        self.qkv, self.fc = pnn.Linear(WIDTH, 3 * WIDTH), pnn.Linear(WIDTH, 5)

    def forward(self, x: Any) -> Any:
        y = self.bn(self.emb(x).transpose([0, 2, 1])).transpose([0, 2, 1])
        q, k, v = self.qkv(y).split(3, -1)
        return self.fc((pf.softmax(q @ k.transpose([0, 2, 1]) / 4, -1) @ v).mean(1))


def batches() -> Any:
    for step in range(STEPS):
        random = np.random.default_rng(step)
        yield random.integers(0, 11, (6, 7)), random.integers(0, 5, 6)


def record(into: Path, model: Any, step: Callable[[Any, Any], None], detail: str) -> Path:
    with trueup.capture(into, model=model, steps=range(STEPS), detail=detail):
        for x, y in batches():
            step(x, y)
    return into


def in_torch(into: Path, weights: Path, detail: str) -> Path:
    torch.manual_seed(0)
    model = Reader()
    np.savez(weights, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)

    def step(x: Any, y: Any) -> None:
        loss = tf.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return record(into, model, step, detail)


def in_paddle(
    into: Path, weights: Path, detail: str, *, rate: float = 0.01, clip: Any = pnn.ClipGradByGlobalNorm, smooth: float = 0.1,
    cleared: bool = True,
) -> Path:  # fmt: skip
    model = PaddleReader()
    held = np.load(weights)
    for name, tensor in model.state_dict().items():
        own = name.replace("_mean", "running_mean").replace("_variance", "running_var")
        tensor.set_value(held[own].T if own in ("qkv.weight", "fc.weight") else held[own])
    optimizer = paddle.optimizer.AdamW(rate, parameters=model.parameters(), weight_decay=0.1, grad_clip=clip(1.0))

    def step(x: Any, y: Any) -> None:
        target = pf.one_hot(paddle.to_tensor(y), 5) * (1 - smooth) + smooth / 5
        pf.cross_entropy(model(paddle.to_tensor(x)), target, soft_label=True).backward()
        optimizer.step()
        if cleared:
            optimizer.clear_grad()

    return record(into, model, step, detail)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("baseline")
    return in_torch(folder / "run", folder / "weights.npz", "stats"), folder / "weights.npz"


def test_a_right_port_is_aligned(tmp_path: Path) -> None:
    weights = tmp_path / "weights.npz"
    runs = in_torch(tmp_path / "torch", weights, "tensor"), in_paddle(tmp_path / "paddle", weights, "tensor")
    result = trueup.compare(*runs)
    assert result.verdict == "aligned", result
    norms = [dict(run.gradient_norms) for run in (result.baseline, result.candidate)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_by_statistics_alone_a_gradient_of_rounding_leaves_it_open(tmp_path: Path, baseline: tuple[Path, Path]) -> None:
    result = trueup.compare(baseline[0], in_paddle(tmp_path / "run", baseline[1], "stats"))
    assert result.verdict != "deviates", result
    assert result.verdict == "aligned" or "--detail tensor" in str(result)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({"rate": 0.02}, "AdamW lr: 0.01 in the baseline, 0.02 in the candidate"),
        ({"clip": pnn.ClipGradByNorm}, "clipping: norm at 1 in the baseline, norm of each gradient at 1 in the candidate"),
    ],
)
def test_a_setting_that_the_port_lost_is_the_cause(
    lost: dict[str, Any], said: str, tmp_path: Path, baseline: tuple[Path, Path]
) -> None:
    result = trueup.compare(baseline[0], in_paddle(tmp_path / "run", baseline[1], "stats", **lost))
    assert said in str(result).splitlines()[0], result


def test_a_wrong_gradient_leaves_no_doubt_of_a_loss_that_is_hardly_off(tmp_path: Path, baseline: tuple[Path, Path]) -> None:
    result = trueup.compare(baseline[0], in_paddle(tmp_path / "run", baseline[1], "stats", smooth=0.0))
    assert result.verdict == "deviates", result
    assert "cross_entropy" in str(result).splitlines()[0]


def test_gradients_that_add_up_are_found_in_the_step_in_which_they_do(tmp_path: Path, baseline: tuple[Path, Path]) -> None:
    result = trueup.compare(baseline[0], in_paddle(tmp_path / "run", baseline[1], "stats", cleared=False))
    assert result.verdict == "deviates", result
    assert result.culprits[0].step == 1


def test_a_dropout_behind_a_layer_of_the_framework_s_own_form(tmp_path: Path) -> None:
    """Paddle's LSTM hands on a view of what its kernel makes; the layer is compared as a whole, and so what the dropout reads."""
    there, here = nn.LSTM(8, 8, batch_first=True), pnn.LSTM(8, 8)
    trueup.convert_weights(there, here)
    torch.manual_seed(0)
    head, drop = torch.rand(8, 8), pnn.Dropout(0.5)
    ahead = paddle.to_tensor(head.numpy())
    x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    with trueup.capture(tmp_path / "torch", model=there):
        (there(torch.from_numpy(x))[0] @ head).mean().backward()
    with trueup.capture(tmp_path / "paddle", model=here):
        (drop(here(paddle.to_tensor(x))[0]) @ ahead).mean().backward()
    result = trueup.compare(tmp_path / "torch", tmp_path / "paddle")
    assert str(result).startswith("DEVIATES  only the candidate runs paddle._C_ops.dropout"), result
