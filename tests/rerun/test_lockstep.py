"""Two models in lockstep part at the module that computes something else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import trueup
import zoo
from trueup import simdev
from trueup.foundation.model import TrueupError


def pair(model: str) -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    one, two = zoo.build(model, "cpu"), zoo.build(model, "npu")
    names = one.model.forward.__code__.co_varnames
    batch = {name: tensor for name, tensor in one.batches[0].items() if name in names}
    return one.model.eval() if model != "resnet" else one.model, two.model.eval() if model != "resnet" else two.model, batch


@pytest.mark.parametrize(("model", "level"), [("bert", "api"), ("resnet", "api"), ("gpt2-eager", "module"), ("resnet", "module")])
def test_a_healthy_device_agrees(model: str, level: str) -> None:
    one, two, batch = pair(model)
    result = trueup.lockstep(one, two, batch, level=level)
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
@pytest.mark.parametrize("level", ["api", "module"])
def test_the_first_call_that_differs_is_named(model: str, fault: str, scope: str, phase: str, level: str) -> None:
    one, two, batch = pair(model)
    with simdev.inject(fault):
        result = trueup.lockstep(one, two, batch, level=level)
    assert result.culprit is not None, result.sentence
    assert (result.culprit.scope, result.culprit.phase) == (scope, phase)
    assert result.sentence.startswith(f"WRONG  first: {scope}, {phase}")


def test_bfloat16_beside_float32() -> None:
    one, _, batch = pair("bert")
    broken = copy.deepcopy(one).bfloat16().to("npu")
    for level, name in (("api", "torch.nn.functional.layer_norm"), ("module", "LayerNorm")):
        result = trueup.lockstep(one, copy.deepcopy(one).bfloat16(), batch, level=level)
        assert result.verdict == "sound", result.sentence
        with simdev.inject("layer-norm-backward"):
            result = trueup.lockstep(one, broken, batch, level=level)
        assert result.culprit is not None
        assert (result.culprit.module, result.culprit.phase) == (name, "backward")


def test_gradients_buffers_and_random_state_are_put_back() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    two, x = copy.deepcopy(one), torch.randn(8, 4)
    before = [t.clone() for t in (*one.state_dict().values(), *two.state_dict().values())]
    kept = one[0].weight.grad = torch.ones(4, 4)
    state = torch.get_rng_state()
    for level in ("api", "module"):
        result = trueup.lockstep(one, two, x, level=level)
        assert result.verdict == "sound", result.sentence  # one kind of device: the same numbers are drawn on both
        drawn, _ = torch.get_rng_state(), torch.set_rng_state(state)
        one(x), one[1].load_state_dict(two[1].state_dict())
        assert torch.equal(drawn, torch.get_rng_state())  # as one run of the model leaves it
        torch.set_rng_state(state)
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
    result = trueup.lockstep(one, copy.deepcopy(one).to("npu"), torch.randn(2, 4), level="module")
    assert (result.verdict, result.exit_code) == ("could not tell", 2)
    assert "random numbers were drawn" in result.sentence
    assert "eval()" in result.sentence


class Writing(nn.Module):
    """Views and writes in place, autocast, a buffer, a draw, a function that raises on the second device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.batch(self.first(x))
        y[:, ::2] *= 2
        y = torch.relu_(y)
        left, right = y.chunk(2, dim=1)
        with torch.autocast(x.device.type, torch.bfloat16):
            z = torch.nn.functional.linear(left, self.first.weight[:4, :4]) + right
        return nn.functional.dropout(z.float(), 0.5) + torch.arange(4, device=x.device)


def test_calls_that_write_and_draw_are_compared_and_the_graph_is_the_programs_own() -> None:
    torch.manual_seed(0)
    one, x = Writing(), torch.randn(8, 6)
    two = copy.deepcopy(one).to("npu")
    state = torch.get_rng_state()
    seen: list[torch.Tensor] = []
    result = trueup.lockstep(one, two, x, loss=lambda out: seen.append(out) or out.square().sum())
    assert result.verdict == "sound", result.sentence
    assert result.compared["backward"] >= 6
    one = copy.deepcopy(one)
    torch.set_rng_state(state)
    assert torch.equal(one(x), seen[0])
    with simdev.inject("dropout-no-rescale"):
        broken = trueup.lockstep(one, two, x)
    assert broken.culprit is not None  # the same numbers are drawn on both, so that the scale is compared
    assert (broken.culprit.module, broken.culprit.phase) == ("torch.nn.functional.dropout", "forward")


def test_calls_inside_transforms_are_counted() -> None:
    class Mapped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.func.vmap(torch.sin)(x).sum()

    result = trueup.lockstep(Mapped(3, 3), copy.deepcopy(Mapped(3, 3)), torch.ones(2, 3), backward=False)
    assert result.culprit is not None  # other weights
    one = Mapped(3, 3)
    result = trueup.lockstep(one, copy.deepcopy(one), torch.ones(2, 3), backward=False)
    assert result.verdict == "could not tell"
    assert "inside a torch.func transform" in result.sentence


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(TrueupError, match="level 'aten' of a lockstep is unknown: expected api or module"):
        trueup.lockstep(nn.Tanh(), nn.Tanh(), torch.ones(1), level="aten")


def test_models_that_do_not_line_up_are_refused() -> None:
    with pytest.raises(TrueupError, match="the second has no module '1'"):
        trueup.lockstep(nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Sequential(nn.Tanh()), torch.ones(1))


class Batch(dict[str, torch.Tensor]):
    """A dict of a class of its own, as tokenizers and models hand them on."""


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.linear(batch["x"])


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Reads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(Batch(x=x))


@pytest.mark.parametrize("level", ["api", "module"])
def test_the_first_model_s_own_dict_is_left_as_it_is(level: str) -> None:
    torch.manual_seed(0)
    one = Outer()
    result = trueup.lockstep(one, copy.deepcopy(one).double(), torch.randn(2, 4), level=level)
    assert (result.verdict, result.left) == ("sound", {}), result.sentence
