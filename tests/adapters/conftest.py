from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trueup import simdev
from trueup.foundation.store import open_capture

Rows = list[dict[str, Any]]


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    torch.set_num_threads(1)
    simdev.install()


@pytest.fixture(autouse=True)
def _healthy() -> Iterator[None]:
    simdev.heal()
    yield
    simdev.heal()


@pytest.fixture(params=["cpu", "npu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "capture"


@pytest.fixture
def rows(path: Path) -> Callable[..., Rows]:
    """Read the capture: rows as dicts, in order, filtered by column."""

    def read(**where: Any) -> Rows:
        return open_capture(path).records(**where).to_pylist()

    return read


@pytest.fixture
def calls(rows: Callable[..., Rows]) -> Callable[..., Rows]:
    """Read the capture: the first row of each call."""

    def read(**where: Any) -> Rows:
        found: dict[int, dict[str, Any]] = {}
        for row in rows(**where):
            found.setdefault(row["seq"], row)
        return list(found.values())

    return read


@pytest.fixture
def notes(path: Path) -> Callable[[], list[str]]:
    return lambda: open_capture(path).ranks[0]["notes"]
