"""Small steps compared at once: the same verdict, findings, table and norms as one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from trueup.comparison.result.comparing import compare
from trueup.foundation.model import Result
from trueup.foundation.store import read_ahead
from trueup.foundation.store.read_ahead import Place, places
from verdict.cases import broken, noisy, trained

STEPS = 5
LEVELS = {"level": ["module", "api", "aten"], "steps": STEPS}


class Held:
    """What `places` asks of a capture."""

    def __init__(self, sizes: dict[tuple[int, int], int], *, imported: bool = False) -> None:
        self.sizes, self.imported = sizes, imported


def grouped(*captures: Any, ranks: int = 1, steps: int = 5) -> list[tuple[int, tuple[int, ...]]]:
    return [(place.rank, place.steps) for place in places(captures, range(ranks), range(steps))]


def sizes(*rows: int, rank: int = 0) -> dict[tuple[int, int], int]:
    return {(rank, step): count for step, count in enumerate(rows) if count}


def test_the_first_step_stands_alone() -> None:
    side = Held(sizes(10, 10, 10, 10, 10))
    assert grouped(side, side) == [(0, (0,)), (0, (1, 2, 3, 4))]


def test_no_more_rows_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "ROWS", 20)
    assert grouped(Held(sizes(5, 10, 10, 10, 90)), Held(sizes(5, 10, 10, 11, 9))) == [(0, (0,)), (0, (1, 2)), (0, (3,)), (0, (4,))]


def test_a_step_that_one_run_lacks_stands_alone() -> None:
    other = Held(sizes(10, 10, 0, 10, 10))
    assert grouped(Held(sizes(10, 10, 10, 10, 10)), other) == [(0, (0,)), (0, (1,)), (0, (2,)), (0, (3, 4))]


def test_imported_steps_stand_alone() -> None:
    found = grouped(Held(sizes(9, 9, 9)), Held(sizes(9, 9, 9), imported=True), steps=3)
    assert found == [(0, (0,)), (0, (1,)), (0, (2,))]


def test_ranks_take_turns() -> None:
    side = Held(sizes(9, 9, 9) | sizes(9, 9, 9, rank=1))
    assert grouped(side, side, ranks=2, steps=3) == [(0, (0,)), (1, (0,)), (0, (1, 2)), (1, (1, 2))]
    assert Place(0, (1, 2)) in places([side, side], [0, 1], [0, 1, 2])  # type: ignore[list-item]


def rounded(training: Any) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(1 + 2.0**-23)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("ahead") / "baseline", **LEVELS)


def fault(nth: int) -> Any:
    """Break the ``nth`` softmax backward: two a step."""
    return lambda training: broken("aten::_softmax_backward_data", noisy(1e-2), nth)


CASES = {"rounding": rounded, "in the middle": fault(5), "at the end": fault(2 * STEPS - 1)}


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_at_once_or_one_by_one(change: Any, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = trained(tmp_path / "candidate", alter=change, **LEVELS)
    at_once = compare(baseline, candidate)
    monkeypatch.setattr(read_ahead, "ROWS", 0)
    one_by_one = compare(baseline, candidate)
    assert at_once.verdict == ("aligned" if change is rounded else "deviates"), at_once.sentence
    assert comparable(at_once) == comparable(one_by_one)
    assert at_once.calls.equals(one_by_one.calls)


def comparable(result: Result) -> dict[str, Any]:
    return {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "calls"}


def test_quiet_steps_are_not_looked_at_one_by_one(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setitem(compare.__globals__, "same_runs", lambda *_: None)  # else no step is looked at
    comparison = compare.__globals__["Comparison"]
    part = comparison._part
    monkeypatch.setattr(comparison, "_part", lambda self, *place: seen.extend(place[0].steps) or part(self, *place))
    assert compare(baseline, baseline).verdict == "aligned"
    assert seen == [0]


def test_a_part_that_is_damaged_meanwhile_gives_no_rows_of_any_column() -> None:
    def more(columns: Any) -> pa.Table:
        return pa.table({name: [1.0] for name in columns})

    records = read_ahead.Records(pa.table({"seq": [1, 2], "mean": [0.5, 1.5]}), {"seq", "mean", "min"}, more)
    assert records(["mean", "seq"]).num_rows == 2
    assert records(["min", "mean"]).to_pydict() == {"min": [], "mean": []}
    assert records(["mean", "invocation"])["invocation"].to_pylist() == [None, None]  # a column that the capture has not


def test_what_a_place_asked_for_is_read_ahead_once_the_next_begins() -> None:
    asked: list[tuple[tuple[int, ...], tuple[str, ...]]] = []

    class Told(Held):
        names = frozenset({"seq", "mean", "min"})

        def records(self, *, columns: list[str], rank: int, step: tuple[int, ...], level: None) -> pa.Table:
            asked.append((step, tuple(columns)))
            return pa.table({name: [1.0] for name in columns})

    steps: Any = [Place(0, (step,)) for step in range(4)]
    with read_ahead.Ahead([Told({})], None, steps, ["seq"], (), sketches=False) as ahead:  # type: ignore[list-item]
        ahead.reads(0)[0](["min", "invocation"])  # the second is no column of this capture
        for at in (1, 2, 3):
            ahead.reads(at)
    assert sorted(asked) == [((0,), ("min",)), ((0,), ("seq",)), ((1,), ("seq",)), ((2,), ("seq", "min")), ((3,), ("seq",))]
