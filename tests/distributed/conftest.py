"""The scenarios, run once for all tests that look at what they left."""

from __future__ import annotations

from pathlib import Path

import pytest

from nursery import Nursery

from .running import run


@pytest.fixture(scope="session")
def operators(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("operators")
    run(nursery, out, "operators", "overlap", "pipeline", "tensor_parallel", "faults")
    return out


@pytest.fixture(scope="session")
def training(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("training")
    run(nursery, out, "ddp", "fsdp", "unlike")
    return out
