"""Parameters and buffers of a module are those that PyTorch names, found a shorter way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trueup.recording.adapters.torch.session import _buffers, _parameters


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)


class Renamed(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield f"clean.{name}", parameter


class Empty(nn.Module):
    pass


MODULES = [
    nn.Linear(2, 3), nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    nn.LSTM(2, 3, num_layers=2), nn.MultiheadAttention(4, 2), Twice(), Renamed(2, 2), Empty(), nn.ReLU(),
    nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_names(module: nn.Module) -> None:
    for short, long in (
        (_parameters(module), module.named_parameters(recurse=False)),
        (_buffers(module), module.named_buffers(recurse=False)),
    ):
        assert [(name, id(tensor)) for name, tensor in short] == [(name, id(tensor)) for name, tensor in long]
