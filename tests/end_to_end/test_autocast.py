"""Mixed precision: two devices cast other tensors, in another order, and neither is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trueup
import zoo
from trueup import simdev


def run(model: str, device: str, into: Path) -> None:
    training = zoo.build(model, device)
    plain = training.loss

    def loss(*arguments: Any) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return plain(*arguments)

    training.loss = loss
    with trueup.capture(into, model=training.model):
        for _ in range(2):
            training.step()


@pytest.mark.parametrize("model", ["bert", "gpt2-eager", "vit"])
def test_autocast_on_a_healthy_device_is_aligned(model: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    simdev.install()
    for device in ("cpu", "npu"):
        run(model, device, tmp_path / device)
    for level in (None, ["module", "api"]):
        result = trueup.compare(tmp_path / "cpu", tmp_path / "npu", level=level)
        assert result.verdict == "aligned", (level, result.sentence)


def test_a_fault_under_autocast_is_found(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    simdev.install()
    run("bert", "cpu", tmp_path / "cpu")
    with simdev.inject("layer-norm-epsilon"):
        run("bert", "npu", tmp_path / "npu")
    culprit = trueup.compare(tmp_path / "cpu", tmp_path / "npu").culprit
    assert culprit is not None
    assert (culprit.phase, culprit.op) == ("forward", "aten::native_layer_norm")
