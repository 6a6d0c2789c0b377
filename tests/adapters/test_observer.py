"""Observe, never change: a training run is bitwise the same with a capture on, whatever is captured and wherever it runs."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
import zoo
from adapters.subjects import SUBJECTS, build
from trueup import simdev
from trueup.foundation.model import LEVELS
from trueup.foundation.store import open_capture

STEPS = 3
ALL = "all"


def content(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]:
    """Everything a tensor holds, NaN payloads and the sign of zero included."""
    inner = simdev.raw(tensor.detach())
    return inner.dtype, tuple(inner.shape), inner.stride(), bytes(inner.contiguous().view(-1).view(torch.uint8).numpy())


def random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(), "numpy": [str(part) for part in np.random.get_state()],
        "torch": content(torch.get_rng_state()), "npu": content(torch.npu.get_rng_state()),
    }  # fmt: skip


def trained(name: str, device: str, directory: Path | None, **options: Any) -> dict[str, Any]:
    """Train three steps and return everything that must not depend on the capture."""
    training = build(name, device)
    trueup.seed_all(1)  # the first import of a library may draw random numbers
    if directory is None:
        losses = [training.step() for _ in range(STEPS)]
    else:
        with trueup.capture(directory, model=training.model, **options):
            losses = [training.step() for _ in range(STEPS)]
    state = training.model.state_dict(keep_vars=True)
    return random_states() | {
        "losses": [content(loss) for loss in losses],
        "state": {key: content(tensor) for key, tensor in state.items()},
        "gradients": {key: None if p.grad is None else content(p.grad) for key, p in training.model.named_parameters()},
        "optimizer": [
            content(value) for part in training.optimizer.state.values() for value in part.values() if torch.is_tensor(value)
        ],
    }


@functools.cache
def unobserved(name: str, device: str) -> dict[str, Any]:
    return trained(name, device, None)


def assert_unchanged(name: str, device: str, directory: Path, **options: Any) -> None:
    observed = trained(name, device, directory, on_error="stop", **options)
    expected = unobserved(name, device)
    assert [key for key in expected if observed[key] != expected[key]] == []
    capture = open_capture(directory)
    assert (capture.rows > 0, capture.problems) == (True, [])


ALONE = ("in-place", "checkpoint-reentrant", "custom")
"""In the others a level by itself takes no path that it does not take among all, or here."""
LEVELLED = [(name, device, ALL) for name in SUBJECTS for device in ("cpu", "npu")]
LEVELLED += [(name, "npu", level) for name in ALONE for level in LEVELS]


@pytest.mark.parametrize(("name", "device", "level"), LEVELLED)
def test_level_changes_nothing(name: str, level: str, device: str, path: Path) -> None:
    assert_unchanged(name, device, path, level=level)


CROSSED = ("in-place", "checkpoint", "tied")
DETAILED = [(name, *(("cpu", "digest"), ("npu", "tensor"))[k % 2]) for k, name in enumerate(SUBJECTS)]
DETAILED += [(name, *(("cpu", "tensor"), ("npu", "digest"))[k % 2]) for k, name in enumerate(CROSSED)]


@pytest.mark.parametrize(("name", "device", "detail"), DETAILED)
def test_detail_changes_nothing(name: str, detail: str, device: str, path: Path) -> None:
    assert_unchanged(name, device, path, detail=detail)


@pytest.mark.parametrize(("name", "device"), [(name, ("cpu", "npu")[k % 2]) for k, name in enumerate(zoo.MODELS)])
def test_zoo_is_unchanged(name: str, device: str, path: Path) -> None:
    assert_unchanged(name, device, path, steps=[0, 2])


@pytest.mark.parametrize("name", ["in-place", "checkpoint", "autocast"])
def test_device_without_a_kernel_is_unchanged(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trueup.recording.adapters.torch import buffers

    monkeypatch.delitem(buffers.KERNELS, "npu")
    assert_unchanged(name, "npu", path)


@pytest.mark.parametrize("options", [{"include": "*.norm"}, {"phase": "backward"}, {"ranks": [3]}])
def test_filters_change_nothing(options: dict[str, Any], device: str, path: Path) -> None:
    observed = trained("in-place", device, path, **options)
    assert observed == unobserved("in-place", device)
