"""Checkpoints of Paddle: repaired, and loaded by Paddle without a missing or an unexpected name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from safetensors.numpy import load_file

from trueup.migration.checkpoint import open_checkpoint, repair


def test_a_training_state_of_paddle_is_repaired_and_loads(tmp_path: Path) -> None:
    def net() -> nn.Layer:
        return nn.Sequential(nn.Conv2D(1, 2, 3), nn.BatchNorm2D(2), nn.Flatten(), nn.Linear(2, 3))

    model = net()
    optimizer = paddle.optimizer.Adam(parameters=model.parameters())
    model(paddle.ones([2, 1, 3, 3])).sum().backward()
    optimizer.step()
    state = model.state_dict()
    paddle.save(state, str(tmp_path / "like.pdparams"))
    student = {f"Student.backbone.{name}": tensor for name, tensor in state.items()}
    paddle.save({"state_dict": student, "epoch": 3, "optimizer": optimizer.state_dict()}, str(tmp_path / "all.pdparams"))
    found = repair(tmp_path / "all.pdparams", tmp_path / "fixed.safetensors", like=tmp_path / "like.pdparams")
    assert (found.exit_code, len(found.renamed)) == (0, len(state))
    again = net()
    assert again.set_state_dict(load_file(tmp_path / "fixed.safetensors")) == ([], [])
    assert all(np.array_equal(tensor.numpy(), state[name].numpy()) for name, tensor in again.state_dict().items())
    assert any(name.endswith("moment1_0") for name in open_checkpoint(tmp_path / "all.pdparams").part("optimizer"))
