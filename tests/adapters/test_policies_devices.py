"""Policies on the simulated accelerator: calls that move to the CPU and come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import trueup
import zoo
from adapters.test_policies import applying
from trueup import simdev


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    simdev.heal()


def trained(name: str, device: str, rule: dict[str, Any] | None) -> tuple[list[torch.Tensor], Any]:
    trueup.seed_all(1)
    training = zoo.build(name, device)
    handle = None if rule is None else applying(training.model, **rule)
    use = None
    try:
        losses = [training.step() for _ in range(2)]
    finally:
        if handle is not None:
            (use,) = handle.uses()
            handle.remove()
    held = [*losses, *training.model.state_dict().values()]
    assert {tensor.device.type for tensor in held} == {device}
    return [tensor.cpu() for tensor in held], use


@pytest.mark.parametrize("rule", [
    {"op": "torch.*", "device": "cpu"}, {"level": "module", "scope": "*", "device": "cpu"},
    {"level": "module", "op": "/^(Linear|LayerNorm|LSTM|Conv2d)$/", "device": "cpu", "dtype": "float64", "phase": "forward"},
    {"op": "torch.nn.functional.[lgec]*", "device": "cpu", "phase": "backward"},
], ids=["functions", "modules", "forward", "backward"])  # fmt: skip
@pytest.mark.parametrize("name", ["bert", "gpt2", "lstm_tagger", "resnet"])
def test_calls_move_to_the_host_and_back(name: str, rule: dict[str, Any]) -> None:
    plain, _ = trained(name, "cpu", None)
    moved, use = trained(name, "npu", rule)
    assert use.changed, str(use)
    for a, b in zip(plain, moved, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-3)


def test_autocast_on_the_device_is_off_inside_and_its_dtype_comes_back() -> None:
    x, w = torch.full((4, 300), 30.0).to("npu"), torch.full((4, 300), 30.0).to("npu").requires_grad_()
    found = []
    for rule in (None, {"op": "torch.nn.functional.linear", "dtype": "float32"}, {"op": "*linear", "device": "cpu"}):
        handle = None if rule is None else applying(**rule)
        with torch.autocast("npu", dtype=torch.float16):
            y = F.linear(x, w)
            found.append((y.dtype, y.device.type, F.softmax(y, -1).dtype))
        y.float().sum().backward()
        if handle is not None:
            assert handle.uses()[0].changed == 1
            handle.remove()
    assert found[1:] == found[:1] * 2


def test_a_padded_sequence_goes_to_the_host_as_a_whole() -> None:
    lstm = torch.nn.LSTM(4, 3).to("npu")
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4).to("npu"), torch.tensor([3, 5]), enforce_sorted=False)
    for rule in ({"level": "module", "op": "LSTM"}, {"op": "torch.lstm"}):
        with applying(lstm, device="cpu", **rule) as handle:
            result, (hidden, _) = lstm(packed)
            result.data.sum().backward()
            assert handle.uses()[0].changed == 1
        assert {result.data.device.type, hidden.device.type, lstm.weight_ih_l0.device.type} == {"npu"}
        assert result.batch_sizes.device.type == "cpu"
        assert lstm.weight_ih_l0.grad is not None
        assert lstm.weight_ih_l0.grad.device.type == "npu"
