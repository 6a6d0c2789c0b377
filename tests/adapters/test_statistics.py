"""Each buffer is read once; every detail of every tensor is that of its bytes; a device without a kernel gives the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from adapters.subjects import build
from adapters.tensors import TENSORS
from trueup.foundation import kernels
from trueup.foundation.store import open_capture
from trueup.recording.adapters.torch import buffers
from trueup.recording.adapters.torch.buffers import MOST_VIEWS, to_numpy


@pytest.mark.parametrize("name", TENSORS)
def test_every_detail_of_every_tensor(name: str, device: str, path: Path, rows) -> None:
    torch.manual_seed(3)
    tensor = TENSORS[name]()
    there = tensor.to(device)
    with trueup.capture(path, level="api", detail="tensor", on_error="stop"):
        torch.ops.aten.clone(there)
        torch.atleast_1d(there)
    row = next(row for row in rows() if row["slot"] == "input.0")
    assert (row["shape"], row["numel"]) == (list(tensor.shape), tensor.numel())
    host = to_numpy(there.cpu())
    assert row["digest"] == kernels.hexadecimal(kernels.digest(host))
    kept = open_capture(path).payload(0, row["payload_segment"], row["payload_key"])
    assert kept.tobytes() == np.ascontiguousarray(host).tobytes()


def test_device_statistics_equal_those_of_the_kernel(path: Path, monkeypatch) -> None:
    def captured(directory: Path) -> list[dict[str, Any]]:
        training = build("autocast", "npu")
        with trueup.capture(directory, model=training.model, on_error="stop"):
            training.step()
        return open_capture(directory).records().to_pylist()

    with_kernel = captured(path)
    monkeypatch.delitem(buffers.KERNELS, "npu")
    without = captured(path.with_name("without"))
    assert len(with_kernel) == len(without)
    for one, other in zip(with_kernel, without, strict=True):
        assert (one["op"], one["slot"]) == (other["op"], other["slot"])
        if one["l2"] is not None:
            assert other["l2"] == pytest.approx(one["l2"], rel=1e-12, nan_ok=True)
            assert other["sketch"] == pytest.approx(one["sketch"], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("level", ["api", "aten", "all"])
def test_an_unchanged_tensor_is_read_once(level: str, device: str, path: Path) -> None:
    x = torch.ones(100).to(device)
    capture = trueup.capture(path, level=level, on_error="stop")
    with capture:
        buffers = capture._session.buffers

        def reads(action: Any) -> int:
            before = buffers.reads
            action()
            return buffers.reads - before

        first = reads(lambda: torch.exp(x))
        again = reads(lambda: torch.exp(x))
        assert (first, again) == (2, 1)  # input and output, then the new output only
        assert reads(lambda: torch.exp(x.view(10, 10))) == 1
        heads = x.view(10, 10)[:, :6]
        torch.exp(heads)
        assert reads(lambda: torch.exp(heads.view(10, 2, 3))) == 1  # the same elements in the same order
        assert reads(lambda: torch.exp(heads.view(10, 2, 3).transpose(0, 1))) == 2
        assert reads(lambda: x.add_(1)) == 1
        assert reads(lambda: torch.exp(x)) == 1
        # Without the aten level a write to an alias cannot be told by version numbers, so the alias is read too.
        assert reads(lambda: x.data.mul_(3)) == (2 if level == "api" else 1)
        assert reads(lambda: torch.exp(x)) == 1


@pytest.mark.parametrize("level", ["api", "aten"])
def test_a_text_that_is_cut_anew_in_each_step_gathers_no_memory(level: str, device: str, path: Path) -> None:
    text = torch.arange(3000.0).to(device)
    capture = trueup.capture(path, level=level, on_error="stop")
    with capture:
        for k in range(2 * MOST_VIEWS):
            torch.exp(text[k : k + 7])
        known = [len(storage.known) for storage in capture._session.buffers.storages.values()]
        assert 1 < max(known) <= MOST_VIEWS


def test_a_write_through_data_is_seen(device: str, path: Path, rows) -> None:
    x = torch.ones(4).to(device)
    with trueup.capture(path, level="aten", on_error="stop"):
        torch.exp(x)
        x.data.fill_(0.0)
        torch.exp(x)
    assert [row["max"] for row in rows(op="aten::exp") if row["slot"] == "output.0"] == [pytest.approx(np.e), 1.0]


def test_memory_handed_out_is_read_again(path: Path, rows) -> None:
    x = torch.ones(4)
    with trueup.capture(path, level="api", on_error="stop"):
        torch.exp(x)
        x.numpy()[:] = 0.0
        torch.exp(x)
    assert [row["max"] for row in rows(op="torch.exp") if row["slot"] == "input.0"] == [1.0, 0.0]


def test_a_new_buffer_at_an_old_address_is_read(path: Path, rows) -> None:
    with trueup.capture(path, level="api", on_error="stop"):
        for k in range(50):
            torch.full((1000,), float(k)).exp_()
    maxima = [row["max"] for row in rows(op="torch.Tensor.exp_") if row["slot"] == "input.0"]
    assert maxima == [float(k) for k in range(50)]


@pytest.mark.filterwarnings("ignore")
def test_a_write_inside_a_trace_is_seen(path: Path, rows) -> None:
    x = torch.ones(4)
    with trueup.capture(path, level="aten", on_error="stop"):
        torch.exp(x)
        torch.jit.trace(lambda y: x.fill_(0.0) + y, torch.ones(4), check_trace=False)
        torch.exp(x)
    assert [row["max"] for row in rows(op="aten::exp") if row["slot"] == "input.0"] == [1.0, 0.0]
