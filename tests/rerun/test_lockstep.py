"""Two models in lockstep part at the module that computes something else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import trueup
import zoo
from trueup import simdev
from trueup.model import TrueupError


def pair(model: str) -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    one, two = zoo.build(model, "cpu"), zoo.build(model, "npu")
    names = one.model.forward.__code__.co_varnames
    batch = {name: tensor for name, tensor in one.batches[0].items() if name in names}
    return one.model.eval() if model != "resnet" else one.model, two.model.eval() if model != "resnet" else two.model, batch


@pytest.mark.parametrize("model", ["bert", "gpt2-eager", "resnet"])
def test_a_healthy_device_agrees(model: str) -> None:
    one, two, batch = pair(model)
    result = trueup.lockstep(one, two, batch)
    assert result.verdict == "sound", result.sentence
    assert result.compared["forward"] > 20
    assert result.compared["backward"] > 20


@pytest.mark.parametrize(
    ("model", "fault", "scope", "phase"),
    [
        ("bert", "layer-norm-epsilon", "bert.embeddings.LayerNorm", "forward"),
        ("bert", "gelu-backward", "bert.encoder.layer.1.intermediate.intermediate_act_fn", "backward"),
        ("gpt2-eager", "softmax-backward", "transformer.h.1.attn", "backward"),
        ("resnet", "batch-norm-backward", "stages.2.shortcut.2", "backward"),
        ("resnet", "conv-padding-replicates-edge", "stem.0", "forward"),
    ],
)
def test_the_first_module_that_differs_is_named(model: str, fault: str, scope: str, phase: str) -> None:
    one, two, batch = pair(model)
    with simdev.inject(fault):
        result = trueup.lockstep(one, two, batch)
    assert result.culprit is not None, result.sentence
    assert (result.culprit.scope, result.culprit.phase) == (scope, phase)
    assert result.sentence.startswith(f"WRONG  first: {scope}, {phase}")


def test_bfloat16_beside_float32() -> None:
    one, _, batch = pair("bert")
    result = trueup.lockstep(one, copy.deepcopy(one).bfloat16(), batch)
    assert result.verdict == "sound", result.sentence
    broken = copy.deepcopy(one).bfloat16().to("npu")
    with simdev.inject("layer-norm-backward"):
        result = trueup.lockstep(one, broken, batch)
    assert result.culprit is not None
    assert (result.culprit.module, result.culprit.phase) == ("LayerNorm", "backward")


def test_gradients_buffers_and_random_state_are_put_back() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    two, x = copy.deepcopy(one), torch.randn(8, 4)
    before = [t.clone() for t in (*one.state_dict().values(), *two.state_dict().values())]
    kept = one[0].weight.grad = torch.ones(4, 4)
    result = trueup.lockstep(one, two, x)
    assert result.verdict == "sound", result.sentence  # one kind of device: the same numbers are drawn on both
    assert all(torch.equal(a, b) for a, b in zip(before, (*one.state_dict().values(), *two.state_dict().values()), strict=True))
    assert one[0].weight.grad is kept
    assert two[0].weight.grad is None


def test_other_weights_are_told_first() -> None:
    one = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    two = copy.deepcopy(one)
    with torch.no_grad():
        two[0].bias += 1
    result = trueup.lockstep(one, two, torch.randn(2, 4))
    assert result.culprit is not None
    assert result.culprit.slot == "param.bias"
    assert "the weights differ before anything runs" in result.sentence


def test_random_numbers_of_two_devices_are_not_compared() -> None:
    one = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    result = trueup.lockstep(one, copy.deepcopy(one).to("npu"), torch.randn(2, 4))
    assert (result.verdict, result.exit_code) == ("could not tell", 2)
    assert "random numbers were drawn" in result.sentence
    assert "eval()" in result.sentence


def test_models_that_do_not_line_up_are_refused() -> None:
    with pytest.raises(TrueupError, match="the second has no module '1'"):
        trueup.lockstep(nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Sequential(nn.Tanh()), torch.ones(1))
