"""Each buffer is read once; without a kernel of its own a device computes the same numbers and sends them once per flush."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from adapters.subjects import build
from trueup import kernels, simdev
from trueup.adapters.torch import statistics
from trueup.adapters.torch.host import to_numpy
from trueup.adapters.torch.statistics import packed_on_device
from trueup.model import NUMBERS, PACKED
from trueup.recorder.recorder import Recorder
from trueup.store import open_capture

NAN, INF = float("nan"), float("inf")

TENSORS = {
    "float32": lambda: torch.randn(37, 53),
    "float16": lambda: torch.randn(600).half() * 1e-4,
    "bfloat16": lambda: torch.randn(3, 700).bfloat16(),
    "float64": lambda: torch.randn(70000, dtype=torch.float64),
    "int64": lambda: torch.randint(-9, 9, (11, 13)),
    "uint8": lambda: torch.arange(200, dtype=torch.uint8),
    "bool": lambda: torch.rand(100) > 0.5,
    "complex64": lambda: torch.randn(9, 9, dtype=torch.complex64),
    "float8": lambda: torch.randn(100).to(torch.float8_e4m3fn),
    "empty": lambda: torch.empty(0, 3),
    "0-d": lambda: torch.tensor(-2.5),
    "nan and inf": lambda: torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e-42, 3.4028235e38, 7.0]),
    "only nan": lambda: torch.full((5,), NAN),
    "saturated half": lambda: torch.tensor([65504.0, -65504.0, 6e-8]).half(),
    "not contiguous": lambda: torch.randn(20, 30).t()[3:, ::2],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.randn(8, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(8, dtype=torch.complex64).conj().imag,
}


def expected(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    out = np.empty(PACKED)
    kernels.summarize(to_numpy(tensor), out)
    return out


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_device_operators_agree_with_the_kernel(name: str, autocast: bool, device: str) -> None:
    torch.manual_seed(3)
    tensor = TENSORS[name]()
    there = tensor.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast), torch.no_grad():
        values = statistics.on_device(there, "stats").values
    assert (values.shape, values.dtype, values.device.type) == ((PACKED,), torch.float64, device)
    got, want = values.cpu().numpy(), expected(there.cpu())
    counts = [k for k, number in enumerate(NUMBERS) if number.startswith("n_")]
    assert got[counts].tolist() == want[counts].tolist()
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-9 * max(1.0, np.nan_to_num(np.abs(want)).max() * 1e-3))


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


def transfers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what leaves the simulated device, on every thread."""
    from trueup.simdev import tensor as tensors

    seen: Counter[str] = Counter()
    original = tensors.dispatch

    def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
        to_host = torch.device(kwargs.get("device") or "npu").type == "cpu"
        if to_host or "_local_scalar_dense" in str(func):
            seen[str(func)] += 1
        return original(func, args, kwargs)

    monkeypatch.setattr(tensors, "dispatch", dispatch)
    return seen


def test_statistics_travel_once_per_flush(path: Path, monkeypatch) -> None:
    training = build("in-place", "npu")
    training.step()
    monkeypatch.delitem(statistics.KERNELS, "npu")
    monkeypatch.setattr("trueup.recorder.recorder.FLUSH_SECONDS", 3600.0)
    writes: list[int] = []
    original = Recorder._write
    monkeypatch.setattr(Recorder, "_write", lambda self, batch: (writes.append(len(batch)), original(self, batch))[1])
    unobserved = transfers(monkeypatch)
    training.step()
    before = unobserved.total()
    with trueup.capture(path, model=training.model, on_error="stop"):
        training.step()
    assert len(writes) == 1
    assert unobserved.total() - before == before + 1  # what the training itself fetches, and one batch of statistics
    capture = open_capture(path)
    measured = [row for row in capture.records().to_pylist() if row["device"] == "npu:0"]
    assert all(row["l2"] is not None and row["sketch"] is not None for row in measured if row["slot"].startswith("output"))


def test_device_statistics_equal_those_of_the_kernel(path: Path, monkeypatch) -> None:
    def captured(directory: Path) -> list[dict[str, Any]]:
        training = build("autocast", "npu")
        with trueup.capture(directory, model=training.model, on_error="stop"):
            training.step()
        return open_capture(directory).records().to_pylist()

    with_kernel = captured(path)
    monkeypatch.delitem(statistics.KERNELS, "npu")
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
        assert reads(lambda: x.add_(1)) == 1
        assert reads(lambda: torch.exp(x)) == 1
        # Without the aten level a write to an alias cannot be told by version numbers, so the alias is read too.
        assert reads(lambda: x.data.mul_(3)) == (2 if level == "api" else 1)
        assert reads(lambda: torch.exp(x)) == 1


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


def test_packed_on_device_needs_no_gradient(device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    assert not statistics.on_device(x, "stats").values.requires_grad
    assert simdev.raw(packed_on_device(x.detach())).shape == (PACKED,)


@pytest.mark.filterwarnings("ignore")
def test_a_write_inside_a_trace_is_seen(path: Path, rows) -> None:
    x = torch.ones(4)
    with trueup.capture(path, level="aten", on_error="stop"):
        torch.exp(x)
        torch.jit.trace(lambda y: x.fill_(0.0) + y, torch.ones(4), check_trace=False)
        torch.exp(x)
    assert [row["max"] for row in rows(op="aten::exp") if row["slot"] == "input.0"] == [1.0, 0.0]
