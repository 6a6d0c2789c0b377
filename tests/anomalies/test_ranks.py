"""Which rank first: bad numbers that came through a collective are the doing of the rank that gave them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trueup
from distributed.running import joined
from nursery import Nursery
from verdict.captures import Recording


def test_overflow_on_rank_1_under_ddp(nursery: Nursery, tmp_path: Path) -> None:
    ends = joined(nursery, tmp_path, "anomalies.ranks.train", {}, out=tmp_path / "run")
    assert [code for code, _ in ends] == [0, 0], ends
    result = trueup.overflow(tmp_path / "run")
    first = result.first
    assert first is not None
    assert (first.place.rank, first.place.step, first.place.phase) == (1, 0, "backward"), result.sentence
    assert (first.kind, first.matters) == ("overflow", "accuracy-relevant")
    assert "through a collective it reached rank 0" in first.notes
    assert {one.place.rank for one in result.anomalies} == {1}, [one.sentence for one in result.anomalies]


def collective(given: tuple[float, float], got: float, ranks: tuple[int, ...] = (0, 1)) -> Recording:
    recording = Recording()
    for rank in ranks:
        x, made = np.ones(4, np.float16), np.full(4, given[rank], np.float16)
        y = np.full(4, got, np.float16)
        recording.call("aten::mul", [x], [made], phase="backward", rank=rank)
        recording.call("c10d::allreduce_", [made], [y], phase="collective", rank=rank, arguments={"ranks": "0-1"})
    return recording


@pytest.mark.parametrize(
    ("given", "ranks", "blamed", "note"),
    [
        ((1, np.inf), (0, 1), [(1, "aten::mul")], "through a collective it reached rank 0"),
        ((6e4, 6e4), (0, 1), [(0, "c10d::allreduce_"), (1, "c10d::allreduce_")], ""),
        ((1, np.inf), (0,), [(0, "c10d::allreduce_")], "1 of 2 ranks were not recorded: one of them may have given it"),
    ],
)
def test_rules(
    given: tuple[float, float], ranks: tuple[int, ...], blamed: list[tuple[int, str]], note: str, tmp_path: Path
) -> None:
    path = collective(given, np.inf, ranks).write(tmp_path / "run", world_size=2)
    result = trueup.overflow(path)
    assert [(one.place.rank, one.place.op) for one in result.anomalies] == blamed, result.sentence
    assert note in " ".join(result.anomalies[0].notes)
