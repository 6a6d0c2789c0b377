"""What an operator keeps for its own backward, in bytes that are not all written, is no number to compare."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

import trueup
from trueup.foundation.store import open_capture


def litter() -> None:
    """Leave numbers in what the allocator hands out next."""
    for tensor in [torch.empty(9_999) for _ in range(20)]:
        tensor.normal_()


def run(path: Path) -> list[tuple[str, str, str | None]]:
    trueup.seed_all(3)
    model, x = nn.LSTM(6, 5, num_layers=2, batch_first=True), torch.randn(4, 7, 6)
    litter()
    with trueup.capture(path, model=model, level="aten", on_error="stop"):
        for _ in range(3):
            model(x)[0].square().sum().backward()
            litter()
    table = open_capture(path).records()
    return list(zip(*[table[name].to_pylist() for name in ("op", "slot", "digest")], strict=True))


def test_the_workspace_of_a_recurrent_layer_is_not_compared(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a"), run(tmp_path / "b")
    layers = [row for row in first if row[0] == "aten::mkldnn_rnn_layer"]
    assert [slot for _, slot, _ in layers if slot.startswith("output")][:3] == ["output.0", "output.1", "output.2"]
    assert all(digest for _, slot, digest in layers if slot.startswith("output"))
    assert first == second


def test_memory_that_a_copy_of_a_buffer_is_given_is_no_result(tmp_path: Path) -> None:
    """An average of weights begins with ``copy.deepcopy``, which puts new storages behind buffers before it fills them."""
    model = nn.BatchNorm1d(4)
    litter()
    with trueup.capture(tmp_path / "a", level="aten", on_error="stop"):
        average = copy.deepcopy(model)
        average.running_mean.mul_(2.0)
    table = open_capture(tmp_path / "a").records()
    ops = table["op"].to_pylist()
    assert "aten::set_" not in ops
    assert {"aten::clone", "aten::mul_"} <= set(ops)
