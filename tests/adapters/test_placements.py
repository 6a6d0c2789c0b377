"""What Megatron and DeepSpeed write on parameters is recorded, and says how weights lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueup
from trueup.comparison.layout.pieces import REPLICATED, Way
from trueup.comparison.layout.stated import flat_order, stated_in
from trueup.foundation.settings import modules_of
from trueup.foundation.store import open_capture
from trueup.recording.engine.settings import placement


@dataclass
class Address:
    numel: int
    start: int


@dataclass
class Fragment:
    """As `deepspeed.utils.tensor_fragment` has it."""

    lp_fragment_address: Address
    hp_fragment_address: Address
    param_group_index: int = 0


def _as_megatron(weight: Any, parallel: bool, dim: int, stride: int) -> None:
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = parallel, dim, stride


def _captured(out: Path, model: nn.Module) -> dict[str, Any]:
    with trueup.capture(out, model=model, level=["module"]) as running:
        model(torch.ones(2, 4)).sum().backward()
        running.step()
    return open_capture(out).ranks[0]


def test_of_megatron(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    packed, norm, row = model
    for weight in (packed.weight, packed.bias):
        _as_megatron(weight, True, 0, 3)
    _as_megatron(row.weight, True, 1, 1)
    _as_megatron(row.bias, False, -1, 1)
    norm.weight.sequence_parallel = True  # norm.bias says nothing
    manifest = _captured(tmp_path / "run", model)
    assert modules_of(manifest)["0"]["weight.lies"] == "tensor_model_parallel partition_dim=0 partition_stride=3"
    rows = Way("sharded", 0, "interleaved", parts=(1, 1, 1))
    assert stated_in(manifest) == {
        "0.weight": rows, "0.bias": rows, "1.weight": REPLICATED, "2.weight": Way("sharded", 1), "2.bias": REPLICATED,
    }  # fmt: skip


def test_of_deepspeed(tmp_path: Path) -> None:
    """Flat buffers in another order than the model's: the second weight comes first, and the first lies on two ranks."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    first, second = (layer.weight for layer in model)
    second._hp_mapping = Fragment(Address(16, 0), Address(16, 0))
    first._hp_mapping = Fragment(Address(4, 0), Address(4, 16))
    other = {"settings": {"modules": {"0": {"weight.lies": "zero_flat=0:12 zero_weight=4:12 zero_group=0"}}}}
    manifest = _captured(tmp_path / "run", model)
    assert modules_of(manifest)["0"]["weight.lies"] == "zero_flat=16:4 zero_weight=0:4 zero_group=0"
    assert (flat_order({0: manifest, 1: other}), stated_in(manifest)) == (["1.weight", "0.weight"], {})


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({}, ""),
        ({"ds_id": 3, "ds_shape": torch.Size([41, 16]), "ds_tensor": torch.empty(328)}, "ds_shape=41x16 ds_part=328"),
        ({"ds_shape": torch.Size([2, 2]), "ds_tensor": None, "_hp_mapping": None}, "ds_shape=2x2"),
        ({"allreduce": False, "expert_tp": True, "partition_dim": "0"}, "expert_tp allreduce=False"),
    ],
)
def test_placement(held: dict[str, Any], said: str) -> None:
    weight = nn.Parameter(torch.empty(0))
    for name, value in held.items():
        setattr(weight, name, value)
    assert placement(weight) == said
