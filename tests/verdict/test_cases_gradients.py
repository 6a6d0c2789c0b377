"""Gradients of weights that nobody in the capture reads, of calls that one side lacks: compared, or "could not tell"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup

WRONG = 1.1
"""What a gradient is multiplied by."""


class Own(torch.autograd.Function):
    """A linear layer whose gradient of the weight is wrong: the case that a custom kernel brings."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, WRONG * (gradient.T @ x), gradient.sum(0)


class Layer(nn.Linear):
    form = "linear"

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "own":
            out: Tensor = Own.apply(x, self.weight, self.bias)
            return out
        return F.linear(x, self.weight, self.bias) if self.form == "linear" else x @ self.weight.t() + self.bias


def record(path: Path, level: list[str], form: str, optimizer: bool) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(8, 8), nn.GELU(), Layer(8, 8))
    model[2].form = form.removesuffix("-hooked")
    if form.endswith("-hooked"):
        model[2].weight.register_hook(lambda gradient: gradient * WRONG)
    batch, trained = torch.randn(4, 8), torch.optim.SGD(model.parameters(), lr=0.1)
    with trueup.capture(path, model=model, level=level):
        model(batch).square().mean().backward()
        if optimizer:
            trained.step()
    return path


@pytest.mark.parametrize("level", [["api"], ["module", "api"]], ids="-".join)
@pytest.mark.parametrize("optimizer", [False, True], ids=["alone", "optimizer"])
@pytest.mark.parametrize(("form", "right"), [("parts", True), ("own", False), ("parts-hooked", False)])
def test_a_weights_gradient(tmp_path: Path, level: list[str], optimizer: bool, form: str, right: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sides = [record(tmp_path / name, level, one, optimizer) for name, one in (("a", "linear"), ("b", form))]
    torch.set_num_threads(threads)
    result = trueup.compare(*sides)
    assert (result.verdict == "aligned") == right, result.sentence
    assert result.culprit is None or result.culprit.phase == "backward"
    if level == ["api"] and optimizer and not right:
        assert result.verdict == "deviates"
