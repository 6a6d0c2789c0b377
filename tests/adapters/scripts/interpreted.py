"""Checks of the Triton kernel that `test_triton` runs in a process with TRITON_INTERPRET=1: ``interpreted.py PART``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trueup
from adapters.tensors import TENSORS
from trueup.foundation import kernels
from trueup.foundation.model import NUMBERS, PACKED
from trueup.foundation.store import open_capture
from trueup.recording.adapters.torch import buffers, device_statistics, triton_statistics
from trueup.recording.adapters.torch.buffers import to_numpy

CPU = torch.device("cpu")
COUNTS = [k for k, number in enumerate(NUMBERS) if number.startswith("n_")]
PAIRED = ("float32", "int32", "complex64", "every float8_e4m3fn", "every bfloat16", "empty", "nan and inf", "huge float32")
"""Tensors for the pairs, cut short: the interpreter adds those in a Python loop."""


def expected(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    out = np.empty(PACKED)
    kernels.summarize(to_numpy(tensor), out)
    return out


def measured(tensor: torch.Tensor, accumulator: torch.dtype) -> np.ndarray[Any, Any]:
    way = device_statistics.triton_way(CPU, accumulator)
    return device_statistics.bring([device_statistics._enqueue(tensor, way.fill, way.ring)])[0]


def check(name: str, tensor: torch.Tensor, accumulator: torch.dtype, rtol: float) -> None:
    got, want = measured(tensor, accumulator), expected(tensor)
    assert got[COUNTS].tolist() == want[COUNTS].tolist(), (name, got[COUNTS], want[COUNTS])
    finite = np.abs(want[np.isfinite(want)])
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * finite.max(initial=0.0), err_msg=name)


def values() -> None:
    """Every tensor, sums in float64, bit for bit the same a second time."""
    for name, make in TENSORS.items():
        torch.manual_seed(3)
        tensor = make()
        tensor = tensor[:5000] if name == "float64" else tensor
        check(name, tensor, torch.float64, 1e-14)
        if tensor.numel() < 10000:
            assert np.array_equal(measured(tensor, torch.float64), measured(tensor, torch.float64), equal_nan=True), name


def pairs() -> None:
    """Sums in pairs of float32; integers beyond 2**24 have rounded bounds and squares there."""
    for name in PAIRED:
        torch.manual_seed(3)
        tensor = TENSORS[name]()
        check(name, tensor.flatten()[:520] if tensor.dim() == 1 else tensor, torch.float32, 1e-7 if name == "int32" else 1e-13)


def programs() -> None:
    """Sizes around the seams of groups and programs, and a pair of programs whose rows are merged."""
    for size in (1, 63, 65, 511, 512, 513, 4096, 4097, 8193):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size)) + 0.25
        x[size // 2] = float("-inf")
        check(f"size {size}", x, torch.float64, 1e-14)
    x = torch.randn(4200, generator=torch.Generator().manual_seed(1)) + 1000.0
    check("merged pairs", x, torch.float32, 1e-13)
    triton_statistics.MAX_PROGRAMS = 3  # several turns, and a last one without work for some
    x = torch.randn(9000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check("turns", x, torch.float64, 1e-14)


def captures() -> None:
    """A training step captured through the kernel has the numbers of one captured through the host's."""
    rows = []
    for through_triton in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        if through_triton:
            del buffers.KERNELS["cpu"]
            device_statistics._WAYS[CPU] = device_statistics.triton_way(CPU, torch.float64)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "capture"
            with trueup.capture(path, model=model, on_error="stop"):
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
            rows.append(open_capture(path).records().to_pylist())
    host, device = rows
    assert len(host) == len(device) > 50
    for one, other in zip(host, device, strict=True):
        assert (one["op"], one["slot"], one["n_zero"]) == (other["op"], other["slot"], other["n_zero"])
        if one["l2"] is not None:
            np.testing.assert_allclose(other["sketch"], one["sketch"], rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(other["l2"], one["l2"], rtol=1e-14)


if __name__ == "__main__":
    torch.set_num_threads(1)
    part = sys.argv[1]
    {"values": values, "pairs": pairs, "programs": programs, "captures": captures}[part]()
    print(f"{part} passed")
