"""Two runs that are the same to the last bit: that is found without a reason, and without most of the comparison."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import trueup
from trueup.comparison import verdict
from trueup.comparison.graph.streams import Stream
from trueup.comparison.result.comparing import Assembly
from trueup.comparison.verdict.budget import Explanation
from trueup.comparison.verdict.compare import Comparison
from trueup.foundation.store.read_ahead import Ahead, Records

from .cases import trained

ROOMS = tuple(str(Path(verdict.__file__).parents[1] / room) for room in ("graph", "normalise", "measures", "verdict"))


@contextmanager
def entered() -> Iterator[set[str]]:
    """Collect the files of these rooms of which a function runs, on any thread."""
    files: set[str] = set()

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        code: CodeType = frame.f_code
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(ROOMS):  # 1: no body of a class
            files.add(code.co_filename)

    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("same")
    first, second = (trained(folder / name, level=["module", "api", "aten"], steps=2) for name in ("first", "second"))
    return first, second


def test_nothing_is_explained(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding would explain of equal bytes is asked by nobody; every call is counted all the same."""

    def explained(self: Explanation) -> None:
        raise AssertionError("what is the same was explained")

    monkeypatch.setattr(Explanation, "explain", explained)
    result = trueup.compare(*runs)
    assert (result.verdict, result.counts["equal"]) == ("aligned", result.counts["compared"])
    assert np.all(result.calls["error_out"].to_numpy() == 0)


def test_few_files_are_entered(runs: tuple[Path, Path]) -> None:
    with entered() as files:
        assert trueup.compare(*runs).verdict == "aligned"
    assert len(files) <= 25, sorted(files)


def test_a_comparison_leaves_nothing_to_the_collector(runs: tuple[Path, Path]) -> None:
    """What a large step takes is free when its comparison ends: the collector runs when many objects were made, not many bytes."""
    gc.collect()
    gc.disable()
    try:
        trueup.compare(*runs)
        left = [held for held in gc.get_objects() if isinstance(held, (Comparison, Assembly, Ahead, Records, Stream))]
    finally:
        gc.enable()
    assert not left
