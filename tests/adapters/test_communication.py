"""How ranks are written, how what is under way is found, and what a storage can still do after it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trueup
from trueup.foundation.words.wording import in_runs
from trueup.recording.adapters.torch.buffers import InFlight, Pending


@pytest.mark.parametrize(("ranks", "text"), [
    ([0, 1, 2, 3], "0-3"), ([0, 8, 16], "0,8,16"), ([5], "5"), ([4, 5, 0, 1], "4-5,0-1"), (list(range(512)), "0-511"),
])  # fmt: skip
def test_ranks_are_written_in_order_and_in_short(ranks: list[int], text: str) -> None:
    assert in_runs(ranks) == text


def test_a_buffer_under_way_is_found_by_its_bytes() -> None:
    """Buckets of one buffer are reduced one by one while the backward fills the next."""
    buffer = torch.zeros(100)
    first, second = (
        Pending([], [("output.0", buffer[a:b])], [], sync=False, task=-1) for a, b in ((0, 40), (40, 80))
    )
    flying = InFlight()
    flying.add(first)
    flying.add(second)
    assert flying.covering(buffer[80:]) == []
    assert flying.covering(buffer[39:41].view(2, 1)) == [first, second]
    flying.spoil(buffer[10:20])
    assert (first.spoiled, second.spoiled) == (True, False)
    assert not first.complete, "without a work to ask, nothing says so"


@pytest.mark.parametrize("detail", ["digest", "stats", "tensor"])
def test_a_measured_storage_can_still_be_resized(tmp_path: Path, detail: str) -> None:
    """FSDP frees parameters so; `Tensor.numpy` would forbid it."""
    x = torch.ones(1000)
    with trueup.capture(tmp_path / "capture", level=("api", "aten"), detail=detail):
        y = x * 2
        x.untyped_storage().resize_(0)
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(4000)
        z = y.view(10, 100)  # of memory that nobody has written
        y.fill_(3.0)
        z + 1
    table = trueup.foundation.store.open_capture(tmp_path / "capture").records(["op", "slot", "mean", "digest"], level="api")
    found = {(r["op"], r["slot"]): r["digest"] for r in table.to_pylist()}
    assert found["torch.Tensor.view", "input.0"] is None
    assert ("torch.Tensor.view", "output.0") not in found
    assert found["torch.Tensor.add", "input.0"] != found["torch.Tensor.mul", "output.0"]
    assert found["torch.Tensor.add", "input.0"] is not None
