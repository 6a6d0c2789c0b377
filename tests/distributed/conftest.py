"""The scenarios, run once for all tests that look at what they left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nursery import Nursery
from nursery import nursery as start

from .running import run


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A process with FSDP, pipelines and the scenarios in it, which each of the ranks would import anew."""
    with start() as started:
        started.load("distributed.ranks", "distributed.layouts", "layout_faults")
        yield started


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
