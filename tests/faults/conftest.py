"""A small disk, and what must hold of any capture, however it ended."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nursery import Nursery

from .readable import steps_trained


@pytest.fixture(scope="session")
def losses(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The first steps of the training without a capture, as it prints them."""
    log = tmp_path_factory.mktemp("plain") / "log"
    child = nursery.start("plain", log, steps=400)
    assert child.wait() == 0
    return steps_trained(child.said)


@pytest.fixture(scope="session")
def complete(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of three steps to which nothing happened."""
    out = tmp_path_factory.mktemp("complete") / "capture"
    assert nursery.start("train", out.with_name("log"), out=out, steps=3).wait() == 0
    return out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB, which only root may mount."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "trueup-test", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root; test_a_file_that_cannot_grow needs nothing")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
