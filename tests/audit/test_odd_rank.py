"""A rank that computes something else once: its call is executed again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trueup


class Bit(TorchDispatchMode):
    """Flips a bit in the first product, below what is recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            out.view(torch.int32)[0, 1] ^= 1 << 12
        return out


@pytest.mark.parametrize(("detail", "suspect"), [("tensor", True), ("stats", False)])
def test_hardware_is_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detail: str, suspect: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        with trueup.capture(tmp_path / str(rank), model=model, level=("module", "api"), detail=detail) as running:
            if rank == 1:
                with Bit():
                    model(x)
            else:
                model(x)
            running.step()
    for rank in (1, 2):
        shutil.move(tmp_path / str(rank) / f"rank-{rank:05}", tmp_path / "0")
    ranks = trueup.check(tmp_path / "0", replicas=True).ranks
    assert ranks is not None
    said = [odd.said for odd in ranks.found]
    assert any("rank 1 is odd, the other 2 agree" in one for one in said), said
    assert ("executed again, its call gives the others' bits: suspect the hardware of rank 1" in ranks.sentence) == suspect, said
