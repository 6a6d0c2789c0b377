"""The scenarios, run once for all tests that look at what they left."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import run


@pytest.fixture(scope="session")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("operators")
    run(out, "operators", "overlap", "pipeline", "tensor_parallel", "faults")
    return out


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("training")
    run(out, "ddp", "fsdp")
    return out
