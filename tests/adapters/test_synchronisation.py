"""No wait inside a step: what a capture on a device makes of the training's own transfers is one more for each flush."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import trueup
from adapters.subjects import SUBJECTS, build
from trueup.foundation.model import LEVELS
from trueup.foundation.store import open_capture
from trueup.recording.adapters.torch import buffers
from trueup.recording.recorder.recorder import Recorder

WAITING = (
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "is_nonzero", "repeat_interleave.Tensor",
    "_assert_async", "bincount", "allclose",
)  # fmt: skip
"""Operators whose result or whose shape the host has to know; ``aten::eq`` is not one of them."""


class Waits(Counter[str]):
    """What made the host wait for the simulated device, by thread and operator."""

    def on_training_threads(self) -> int:
        return sum(count for name, count in self.items() if not name.startswith("trueup-writer"))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    from trueup.simdev import tensor as tensors

    seen = Waits()
    original = tensors.dispatch

    def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
        name = str(func)
        to_host = torch.device(kwargs.get("device") or "npu").type == "cpu"
        copied_out = "copy_" in name and len(args) > 1 and args[0].device.type == "cpu"
        by_mask = "index." in name and any(x is not None and x.dtype is torch.bool for x in args[1])
        if to_host or copied_out or by_mask or any(word in name.removeprefix("aten.") for word in WAITING):
            seen[f"{threading.current_thread().name} {name}"] += 1
        return original(func, args, kwargs)

    monkeypatch.setattr(tensors, "dispatch", dispatch)
    return seen


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statistics per flush; flushes happen when a test asks for them and at the end."""
    monkeypatch.delitem(buffers.KERNELS, "npu")
    monkeypatch.setattr("trueup.recording.recorder.flusher.FLUSH_SECONDS", 3600.0)
    buffers.on_device(torch.ones(3, device="npu"), "stats")  # the device's way is tried once
    sizes: list[int] = []
    original = Recorder._write
    monkeypatch.setattr(Recorder, "_write", lambda self, batch: (sizes.append(len(batch)), original(self, batch))[1])
    return sizes


ALONE = ("in-place", "checkpoint-reentrant", "custom")
"""In the others a level by itself takes no path that it does not take among all, or here."""


@pytest.mark.parametrize(
    ("name", "level"), [*((name, "all") for name in SUBJECTS), *((name, level) for name in ALONE for level in LEVELS)]
)
def test_a_step_never_waits(name: str, level: str, path: Path, waits: Waits, flushes: list[int]) -> None:
    training = build(name, "npu")
    training.step()
    waits.clear()
    training.step()
    own = waits.total()
    with trueup.capture(path, model=training.model, level=level, on_error="stop"):
        waits.clear()
        training.step()
        assert (waits.total(), flushes) == (own, [])
    assert len(flushes) == 1
    assert waits.total() == own + 1
    measured = [row for row in open_capture(path).records().to_pylist() if row["device"] == "npu:0"]
    assert any(row["l2"] is not None for row in measured)


def test_transfers_are_flushes_times_devices(path: Path, waits: Waits, flushes: list[int]) -> None:
    x = torch.randn(50, device="npu")
    ring = buffers.on_device(x, "stats").values.ring
    before = ring.fetches
    with trueup.capture(path, level="api", on_error="stop") as capture:
        waits.clear()
        for _ in range(4):
            for _ in range(10):
                torch.exp(x + 1)
            capture._session.recorder._flusher._flush()
        torch.exp(x)
    assert (len(flushes), waits.total(), ring.fetches - before) == (5, 5, 5)


def test_a_flush_with_nothing_on_a_device_transfers_nothing(path: Path, waits: Waits, flushes: list[int]) -> None:
    with trueup.capture(path, level="api", on_error="stop"):
        torch.exp(torch.ones(3))
    assert (len(flushes), waits.total()) == (1, 0)


def test_only_the_writer_waits(path: Path, waits: Waits, flushes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueup.recording.recorder.flusher.FLUSH_SECONDS", 0.01)
    x = torch.randn(50, device="npu")
    with trueup.capture(path, level="api", on_error="stop"):
        waits.clear()
        for _ in range(200):
            x = torch.tanh(x + 1)
        during = waits.on_training_threads()
    assert during == 0
    assert 0 < waits.total() <= len(flushes)  # a flush may catch nothing but what the one before has brought over


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("level", [*LEVELS, "all"])
@pytest.mark.parametrize("triton", ["1", "0"])
def test_cuda_agrees_that_a_step_never_waits(level: str, triton: str, tmp_path: Path) -> None:
    """In a process of its own: beside the simulated device autograd takes that one for the accelerator."""
    script = Path(__file__).parent / "scripts" / "never_waits.py"
    command = [sys.executable, "-W", "ignore", str(script), level, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "TRUEUP_TRITON": triton}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("rows, no wait\n")
