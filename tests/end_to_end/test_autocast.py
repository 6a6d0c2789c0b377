"""Mixed precision: two devices cast other tensors, in another order, and neither is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trueup
import zoo
from trueup import simdev

MODELS = ("bert", "gpt2-eager", "vit")


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


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the runs on the CPU, by model."""
    torch.set_num_threads(1)
    simdev.install()
    folder = tmp_path_factory.mktemp("cpu")
    for model in MODELS:
        run(model, "cpu", folder / model)
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_autocast_on_a_healthy_device_is_aligned(model: str, baselines: Path, tmp_path: Path) -> None:
    run(model, "npu", tmp_path / "npu")
    for level in (None, ["module", "api"]):
        result = trueup.compare(baselines / model, tmp_path / "npu", level=level)
        assert result.verdict == "aligned", (level, result.sentence)


def test_a_fault_under_autocast_is_found(baselines: Path, tmp_path: Path) -> None:
    with simdev.inject("layer-norm-epsilon"):
        run("bert", "npu", tmp_path / "npu")
    culprit = trueup.compare(baselines / "bert", tmp_path / "npu").culprit
    assert culprit is not None
    assert (culprit.phase, culprit.op) == ("forward", "aten::native_layer_norm")
