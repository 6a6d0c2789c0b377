"""Two runs that are the same to the last bit: that is found without a reason, and without most of the comparison.

Where nothing leaves a doubt the comparison is not entered at all (`result.same`), and says the same where it is."""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trueup
from trueup.comparison import verdict
from trueup.comparison.graph.streams import Stream
from trueup.comparison.result import comparing
from trueup.comparison.result.comparing import Assembly
from trueup.comparison.result.same import same_runs
from trueup.comparison.verdict.budget import Explanation
from trueup.comparison.verdict.compare import Comparison
from trueup.doors.report.document import document
from trueup.foundation.model import Result
from trueup.foundation.store.read_ahead import Ahead, Records

from .cases import record, trained

PACKAGE = str(Path(trueup.__file__).parent)
ROOMS = tuple(str(Path(verdict.__file__).parents[1] / room) for room in ("graph", "normalise", "measures", "verdict"))


@contextmanager
def entered(*folders: str) -> Iterator[set[str]]:
    """Collect the files in some folders of which a function runs, on any thread."""
    files: set[str] = set()

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        code: CodeType = frame.f_code
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(folders):  # 1: no body of a class
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


@pytest.fixture
def at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs that are the same judged, too."""
    monkeypatch.setattr(comparing, "same_runs", lambda *_: None)


@pytest.mark.usefixtures("at_length")
def test_nothing_is_explained(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding would explain of equal bytes is asked by nobody; every call is counted all the same."""

    def explained(self: Explanation) -> None:
        raise AssertionError("what is the same was explained")

    monkeypatch.setattr(Explanation, "explain", explained)
    result = trueup.compare(*runs)
    assert (result.verdict, result.counts["equal"]) == ("aligned", result.counts["compared"])
    assert np.all(result.calls["error_out"].to_numpy() == 0)


def test_few_files_are_entered(runs: tuple[Path, Path]) -> None:
    """Of the whole package, once all is loaded."""
    trueup.compare(*runs)
    with entered(PACKAGE) as files:
        assert trueup.compare(*runs).verdict == "aligned"
    assert len(files) <= 25, sorted(files)


@pytest.mark.usefixtures("at_length")
def test_few_files_are_entered_where_they_are_judged(runs: tuple[Path, Path]) -> None:
    with entered(*ROOMS) as files:
        assert trueup.compare(*runs).verdict == "aligned"
    assert len(files) <= 25, sorted(files)


class Odd(nn.Module):
    """Masks with infinities, drops out, has a weight that is not a number where asked for, and a part in 16 bits."""

    def __init__(self, *, bad: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 4)
        if bad:
            self.third.weight.data[0, 0] = math.nan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).masked_fill(torch.arange(8) > 5, -math.inf).softmax(-1)
        return self.third(nn.functional.dropout(self.second(x.bfloat16()).float(), 0.1))


def small(
    folder: Path, *, seed: int = 0, steps: int = 3, bad: bool = False, optimizer: bool = True, times: int = 1, **options: Any
) -> Path:
    torch.manual_seed(seed)
    model = Odd(bad=bad)
    moves = torch.optim.Adam(model.parameters())

    def step() -> None:
        for _ in range(times):
            model(torch.randn(4, 8)).square().mean().backward()
        if optimizer:
            moves.step()
            moves.zero_grad()

    return record(folder, step, model, steps=steps, **options)


def both_ways(monkeypatch: pytest.MonkeyPatch, *runs: Path, **options: Any) -> tuple[Result, bool]:
    """Compare at a glance if that can be, and at length, and want the same; return it, and whether a glance was enough."""
    found: list[Result | None] = []

    def noted(*given: Any) -> Result | None:
        found.append(same_runs(*given))
        return found[-1]

    monkeypatch.setattr(comparing, "same_runs", noted)
    at_a_glance = trueup.compare(*runs, **options)
    monkeypatch.setattr(comparing, "same_runs", lambda *_: None)
    at_length = trueup.compare(*runs, **options)
    assert document(at_a_glance) == document(at_length)
    assert at_a_glance.calls.equals(at_length.calls)
    return at_a_glance, found != [] and found[-1] is not None


OPTIONS: tuple[dict[str, Any], ...] = (
    {"level": ["module", "api", "aten"]},
    {"level": ["module"], "detail": "digest"},
    {"level": ["api"], "detail": "tensor"},
    {"level": ["module", "api"], "bad": True},
    {"level": ["api"], "optimizer": False},
    {"level": ["module", "api", "aten"], "times": 3},
    {"level": ["api"], "phase": ["forward"]},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_ways_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    runs = [small(tmp_path / name, **options) for name in ("first", "second")]
    result, at_a_glance = both_ways(monkeypatch, *runs)
    assert (result.verdict, at_a_glance) == ("aligned", True)
    assert result.counts["equal"] == result.counts["compared"] > 0
    assert any("NaN" in note for note in result.notes) == bool(options.get("bad"))


def test_what_leaves_a_doubt_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed, another number of steps, other levels, another criterion, a repeat, a part that is gone."""
    plain = small(tmp_path / "plain", level=["module", "api"])
    for name, options in {"later": {"seed": 1}, "longer": {"steps": 4}, "less": {"level": ["api"]}}.items():
        other = small(tmp_path / name, **{"level": ["module", "api"], **options})
        assert not both_ways(monkeypatch, plain, other)[1], name
    assert not both_ways(monkeypatch, plain, plain, level="api")[1]
    assert not both_ways(monkeypatch, plain, plain, criterion="ptdbg")[1]
    assert not both_ways(monkeypatch, plain, plain, repeat=[plain])[1]
    lost = small(tmp_path / "lost", level=["module", "api"])
    next(lost.glob("rank-00000/step-000001/*.parquet")).unlink()
    result, at_a_glance = both_ways(monkeypatch, lost, lost)
    assert (result.verdict, at_a_glance) == ("inconclusive", False)


def test_a_part_that_cannot_be_read_is_said_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(tmp_path / "run", level=["api"])
    part = next(run.glob("rank-00000/step-000001/*.parquet"))
    held = bytearray(part.read_bytes())
    held[100:400] = bytes(300)
    part.write_bytes(held)
    result, at_a_glance = both_ways(monkeypatch, run, run)
    assert (result.verdict, at_a_glance) == ("inconclusive", False)


def test_a_difference_before_the_last_step_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is asked first, and all others are asked."""
    plain, other = (small(tmp_path / name, level=["api"], optimizer=False) for name in ("plain", "other"))
    (part,) = other.glob("rank-00000/step-000000/*.parquet")
    small(tmp_path / "stranger", level=["api"], optimizer=False, seed=1)
    (strange,) = (tmp_path / "stranger").glob("rank-00000/step-000000/*.parquet")
    part.write_bytes(strange.read_bytes())
    assert not both_ways(monkeypatch, plain, other)[1]


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
