"""What runs on a GPU have and runs on the CPU do not: no digests, memory that nobody wrote, choices among equal values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trueup
from trueup.foundation.facts.operators import has, says
from trueup.foundation.store import call_columns


def trained(into: Path, *, foreach: bool = False) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    with trueup.capture(into, model=model) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            capture.step()
    return into


def test_without_digests_a_weight_is_known_by_its_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU measures its tensors itself and gives no digest: a foreach optimizer is the for-loop's all the same."""

    def none(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(column), np.uint64), np.zeros(len(column), bool)

    runs = trained(tmp_path / "loop"), trained(tmp_path / "foreach", foreach=True)
    monkeypatch.setattr(call_columns, "digests", none)
    result = trueup.compare(*runs)
    assert result.verdict == "aligned", str(result)
    assert "optimizer.step" in set(result.matched["op"].to_pylist())


class Choosing(TorchDispatchMode):
    """Top values of which others of the same value, or others, are chosen."""

    lowest = True

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **kwargs or {})
        return (result[0], (result[1] + self.by) % 8) if "topk" in str(func) else result


def routed(into: Path, by: int, *, read: bool) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with Choosing(by), trueup.capture(into, model=model) as capture:
        scores = model(torch.randn(4, 8))
        values, places = scores.detach().round().topk(3, dim=1)  # its backward would read the places
        (values.sum() + (scores.gather(1, places).sum() if read else scores.sum())).backward()
        capture.step()
    return into


@pytest.mark.parametrize("level", [None, ["module", "api"]])
@pytest.mark.parametrize(("read", "verdict"), [(True, "inconclusive"), (False, "aligned")])
def test_a_choice_among_equal_values_is_nobodys_fault(read: bool, verdict: str, level: list[str] | None, tmp_path: Path) -> None:
    """Whether the values tie cannot be told from statistics, so what reads the places keeps the runs from being called aligned."""
    runs = routed(tmp_path / "one", 0, read=read), routed(tmp_path / "other", 1, read=read)
    result = trueup.compare(*runs, level=level)
    assert result.verdict == verdict, str(result)
    assert not read or "where values tie the choice is open" in str(result)


@pytest.mark.parametrize(
    ("op", "slots"),
    [("_scaled_dot_product_efficient_attention", {"philox_seed", "philox_offset"}),
     ("_efficient_attention_forward", {"philox_seed", "philox_offset"}),
     ("_scaled_dot_product_flash_attention", {"rng_state", "unused", "debug_attn_mask"}),
     ("_scaled_dot_product_cudnn_attention", {"philox_seed", "philox_offset", "debug_attn_mask"}),
     ("_scaled_dot_product_fused_attention_overrideable", {"philox_seed", "philox_offset", "debug_attn_mask"})],
)  # fmt: skip
def test_where_a_fused_attention_starts_to_draw_is_not_recorded(op: str, slots: set[str]) -> None:
    """Nobody writes it where nothing is dropped: two equal runs differ there."""
    returned = getattr(torch.ops.aten, op).default._schema.returns
    named = says(f"aten::{op}", "unwritten")
    assert {returned[int(slot.rpartition(".")[2])].name for slot in named} == slots
    assert has(f"aten::{op}", "workspace")


class Garbage(TorchDispatchMode):
    """A CTC kernel that leaves something else in the part of its table that it does not write."""

    def __init__(self, left: float) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunction():  # else these count as calls of the program
            found = func(*args, **kwargs or {})
            if "_ctc_loss." in str(func):
                found[1].numpy()[0, :, 3:] = self.left  # behind the states of its one label; no version counts it
        return found


def spoken(into: Path, left: float) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    labels, lengths = torch.tensor([[1, 0, 0], [2, 3, 4]]), torch.tensor([1, 3])
    with Garbage(left), trueup.capture(into, model=model) as capture:
        scores = model(torch.randn(6, 2, 4)).log_softmax(-1)
        nn.functional.ctc_loss(scores, labels, torch.tensor([6, 6]), lengths).backward()
        capture.step()
    return into


def test_what_a_short_target_leaves_unwritten_differs_by_chance(tmp_path: Path) -> None:
    result = trueup.compare(spoken(tmp_path / "one", 0.0), spoken(tmp_path / "other", 4e30))
    assert result.verdict == "aligned", str(result)
    assert {"aten::_ctc_loss", "aten::_ctc_loss_backward"} <= set(result.matched["op"].to_pylist())
