"""What the cases share, a plugin (not a conftest, which the process with PyTorch would load): captures, and their rows."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest

import trueup

Row = dict[str, Any]
Record = Callable[..., list[Row]]
WARM = sys.executable
"""A Python with Paddle in it already, where `test_cases` runs this."""
COLD = os.environ.get("COLD", sys.executable)
"""One without."""


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Return a function that captures what a function executes and returns the rows, in order."""
    numbers = itertools.count()

    def run(function: Callable[[], Any], **options: Any) -> list[Row]:
        into = tmp_path / f"capture{next(numbers)}"
        with trueup.capture(into, **{"level": ["module", "api"], **options}):
            function()
        return rows_of(into)

    return run


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a capture."""
    rows: list[Row] = trueup.open_capture(path).records().to_pylist()
    return rows


def notes_of(path: Path) -> list[str]:
    """Return what a capture says of itself."""
    return [note for manifest in trueup.open_capture(path).ranks.values() for note in manifest.get("notes", [])]


def bits(tensors: list[paddle.Tensor]) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return tensors as what can be compared bit by bit."""
    return [(str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for t in tensors]
