"""Without a kernel of its own a device computes the numbers of the host's kernel, by the first way that gives the right ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adapters.tensors import TENSORS
from trueup import simdev
from trueup.foundation import kernels
from trueup.foundation.kernels import sketch
from trueup.foundation.model import NUMBERS, PACKED
from trueup.recording.adapters.torch import buffers, device_statistics, modes
from trueup.recording.adapters.torch.buffers import to_numpy
from trueup.recording.adapters.torch.device_row import WIDTH, reals
from trueup.recording.recorder import Statistics

FREE = ("view", "unbind", "slice", "select", "unsqueeze", "detach", "expand")
"""Operators that only look at memory in another way."""

COUNTS = [k for k, number in enumerate(NUMBERS) if number.startswith("n_")]


@pytest.fixture
def undecided() -> Iterator[None]:
    """Choose anew, in the test and after it."""
    device_statistics._forget()
    yield
    device_statistics._forget()


def expected(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    out = np.empty(PACKED)
    kernels.summarize(to_numpy(tensor), out)
    return out


def measured(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    stats = buffers.on_device(tensor, "stats")
    assert isinstance(stats.values, device_statistics.Pending)
    buffers.resolve([stats])
    assert (stats.values.shape, stats.values.dtype) == ((PACKED,), np.float64)
    return stats.values


def assert_same(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], rtol: float = 1e-12) -> None:
    assert got[COUNTS].tolist() == want[COUNTS].tolist()
    size = np.abs(want[np.isfinite(want)]).max(initial=0.0)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * size)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_operators_agree_with_the_kernel(name: str, autocast: bool, device: str) -> None:
    torch.manual_seed(3)
    there = TENSORS[name]().to(device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast), torch.no_grad():
        got = measured(there)
    assert_same(got, expected(there.cpu()))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 511, 512, 513, 700, 1537, 1543])
def test_blocks_join_without_a_seam(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_statistics, "BLOCK", sketch.GROUP)
    monkeypatch.setattr(device_statistics, "_TABLES", {})
    monkeypatch.setattr(device_statistics, "REMEMBERED", 2)  # the third block's tables are made anew
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    x[size // 2] = float("nan")
    row = torch.empty(WIDTH, dtype=torch.float64)
    for _ in range(2):
        device_statistics.fill(x, row)
        ring = device_statistics.Ring(x.device, WIDTH, torch.float64)
        pending = device_statistics._enqueue(x, device_statistics.fill, ring)
        assert_same(device_statistics.bring([pending])[0], expected(x))


def test_tables_are_those_of_the_sketch() -> None:
    groups = device_statistics.BLOCK // sketch.GROUP
    sign, source = device_statistics._make_tables(5, torch.device("cpu"))
    assert np.array_equal(sign.numpy().reshape(-1), sketch.signs(5 * groups * 8, groups * 8))
    assert np.array_equal(source.numpy(), sketch.lanes(5 * groups, groups))


def test_a_row_takes_about_25_operators(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += not any(word in str(func) for word in FREE)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3000, device=device)
    measured(x)
    with Count() as count:
        buffers.on_device(x, "stats")
    assert count.seen <= 28


def test_no_gradient_is_recorded(device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    pending = buffers.on_device(x, "stats").values
    assert not pending.row.values.requires_grad
    assert pending.row.values._version >= 0


def test_inference_mode_first_and_training_after(device: str, undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_statistics, "_TABLES", {})
    with torch.inference_mode():
        inside = buffers.on_device(torch.ones(100, device=device), "stats")
    outside = buffers.on_device(torch.ones(100, device=device), "stats")
    buffers.resolve([inside, outside])
    assert np.array_equal(inside.values, outside.values)


def test_inside_torch_func(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(buffers.KERNELS, "cpu")
    x = torch.arange(6.0).view(2, 3)
    found: list[Statistics] = []

    def measured_inside(v: torch.Tensor) -> torch.Tensor:
        found.append(buffers.measure(x, "stats"))
        found.append(buffers.measure(modes.below(v), "stats"))
        return v.exp().sum()

    for transform in (torch.func.grad, torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(f))):
        transform(measured_inside)(x)
    buffers.resolve([stats for stats in found if stats.values is not None])
    assert [stats.values[1] for stats in found[::2]] == [5.0] * 3
    assert all(isinstance(stats.values, np.ndarray) for stats in found)


def test_one_transfer_for_many_and_each_gets_its_own(device: str) -> None:
    tensors = [torch.full((k + 1,), float(k), device=device) for k in range(20)]
    batch = [buffers.on_device(x, "stats") for x in tensors]
    ring = batch[0].values.ring
    before = ring.fetches
    shared = [batch[3], batch[3], Statistics(digest=1), Statistics(values=np.zeros(PACKED))]
    buffers.resolve([*batch, *shared])
    buffers.resolve(batch)  # what is at the host already does not travel again
    assert ring.fetches - before == 1
    assert [(stats.values[0], stats.values[3]) for stats in batch] == [
        (float(k), pytest.approx(k * (k + 1) ** 0.5)) for k in range(20)
    ]
    assert all(stats.values.base is None for stats in batch)


# ---------------------------------------------------------------- which way
CPU = torch.device("cpu")


def fails(*_: Any) -> Any:
    raise RuntimeError("no float64 here\nand more")


def test_operators_where_there_is_no_triton(undecided: None) -> None:
    measured(torch.ones(3))
    assert device_statistics.descriptions() == {"cpu": "PyTorch operators, sums in float64; no Triton kernel for device type cpu"}


def test_triton_is_left_out_when_asked(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEUP_TRITON", "0")
    measured(torch.ones(3))
    assert device_statistics.descriptions()["cpu"].endswith("; Triton is off (TRUEUP_TRITON=0)")


def test_a_driver_for_another_device_is_not_used(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace as Named

    active = Named(get_current_target=lambda: Named(backend="cuda"))
    triton = Named(runtime=Named(driver=Named(active=active)))
    monkeypatch.setattr(device_statistics.importlib, "import_module", lambda name: triton)
    measured(torch.ones(3, device="npu"))
    assert "Triton compiles for cuda, not for npu" in device_statistics.descriptions()["npu:0"]


def test_the_host_where_a_device_cannot_add(undecided: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_statistics, "fill", fails)
    x = torch.randn(50, device=device)
    stats = buffers.on_device(x, "stats")
    assert np.array_equal(np.frombuffer(bytes(stats.values)), expected(x.cpu()))
    said = device_statistics.descriptions()[str(x.device)]
    assert said.startswith("copied to the host, waiting for the device at each tensor; ")
    assert said.endswith("; no float64 here")


def test_a_device_that_adds_wrongly_does_not_measure_itself(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = device_statistics.fill

    def slightly_wrong(tensor: torch.Tensor, row: torch.Tensor) -> None:
        original(tensor, row)
        row[30] += 1e-4

    monkeypatch.setattr(device_statistics, "fill", slightly_wrong)
    assert not isinstance(buffers.on_device(torch.ones(3), "stats").values, device_statistics.Pending)
    assert device_statistics.descriptions()["cpu"].endswith("PyTorch operators, sums in float64 gave wrong numbers")


def test_a_kernel_that_does_not_compile_is_a_note(
    undecided: None, path: Any, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trueup

    monkeypatch.delitem(buffers.KERNELS, "npu")
    measured(torch.ones(3, device="npu"))

    class CompilationError(Exception):
        pass

    def broken(tensor: torch.Tensor, row: torch.Tensor) -> None:
        raise CompilationError("at 12:8: no such operation\n^")

    way = device_statistics._WAYS[torch.device("npu", 0)]
    device_statistics._WAYS[torch.device("npu", 0)] = device_statistics.Way(way.description, broken, way.ring)
    x = torch.ones(3, device="npu")
    with trueup.capture(path, level="api", on_error="stop"):
        torch.exp(x)
    assert notes() == ["no statistics for NPUTensor on npu:0: the kernel for torch.float32 failed: at 12:8: no such operation"]


def test_the_way_is_in_the_manifest(undecided: None, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import trueup
    from trueup.foundation.store import open_capture

    monkeypatch.delitem(buffers.KERNELS, "npu")
    x = torch.ones(3, device="npu")
    with trueup.capture(path, level="api", on_error="stop"):
        torch.exp(x)
    assert open_capture(path).ranks[0]["environment"]["statistics.npu:0"].startswith("PyTorch operators")


def test_reals_are_in_logical_order() -> None:
    x = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    assert reals(x).tolist() == list(range(24))
    assert simdev.raw(reals(x.npu())).tolist() == list(range(24))


def test_what_the_triton_kernel_does_not_read_is_left_to_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(VERSION="0", takes=lambda *_: False, fill=None)
    monkeypatch.setitem(sys.modules, "trueup.recording.adapters.torch.triton_statistics", kernel)
    way = device_statistics.triton_way(torch.device("cpu"), torch.float64)
    tensor = torch.randn(100)
    pending = device_statistics._enqueue(tensor, way.fill, way.ring)
    assert_same(device_statistics.bring([pending])[0], expected(tensor))
