"""A difference that comes out of a collective is followed to the rank that put it in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.comparison.verdict.exchange import Exchange
from trueup.foundation.model import Result
from trueup.foundation.words.sentence import ranks_alike
from verdict.captures import Recording, changed, compared, normal

W = [normal(16, 16, seed=k) for k in range(4)]
F = np.float32


def told(**more: Any) -> dict[str, Any]:
    return {"group": "0", "ranks": "0-2"} | more


def product(run: Recording, rank: int, x: Any, k: int, wrong: bool, step: int = 0) -> Any:
    """Compute a layer on a rank, wrongly if asked to."""
    y = (x @ W[k]).astype(F)
    y = changed(y, 0.1) if wrong else y
    run.call("aten::mm", [x, W[k]], [y], rank=rank, step=step, scope=f"layer{k}")
    return y


def all_reduced(run: Recording, given: dict[int, Any], *, broken: bool = False) -> dict[int, Any]:
    total = sum(given.values()).astype(F)
    found = {rank: changed(total, 0.2) if broken else total.copy() for rank in given}
    for rank, mine in given.items():
        run.call("c10d::allreduce_", [mine], [found[rank]], phase="collective", rank=rank, arguments=told(reduce_op="SUM"))
    return found


def data_parallel(wrong: int | None = None, *, broken: bool = False, ranks: tuple[int, ...] = (0, 1, 2)) -> Recording:
    run = Recording()
    given = {rank: product(run, rank, normal(8, 16, seed=rank + 20), 0, wrong == rank) for rank in ranks}
    reduced = all_reduced(run, given, broken=broken)
    for rank in ranks:
        product(run, rank, reduced[rank], 1, wrong=False)
    return run


def passed_on(run: Recording, x: Any, sender: int, receiver: int, *, step: int = 0, late: int = 0, broken: bool = False) -> Any:
    got = changed(x, 0.3) if broken else x.copy()
    run.call("c10d::send", [x], phase="collective", rank=sender, step=step, arguments=told(dst=receiver, tag=0))
    received = told(src=sender, tag=0)
    run.call("c10d::recv_", [], [got], phase="collective", rank=receiver, step=step - late, arguments=received)
    return got


def pipeline(wrong: int | None = None, *, broken: int | None = None, late: int = 0, steps: int = 1) -> Recording:
    """Three stages; ``wrong`` is the rank whose product is, ``broken`` the rank whose receive is."""
    run = Recording()
    for step in range(steps):
        x = normal(8, 16, seed=40 + step)
        for rank in range(3):
            if rank:
                x = passed_on(run, x, rank - 1, rank, step=step + 1, late=late, broken=broken == rank)
            x = product(run, rank, x, rank, wrong == rank, step=step + 1)
    run.rows.sort(key=lambda row: (row["rank"], row["step"], row["seq"]))
    return run


def places(result: Result) -> list[tuple[int, str, int | None, int | None]]:
    return [(o.rank, o.op, o.sender, o.cause) for o in result.occurrences]


def test_an_all_reduce_brings_what_one_rank_gave(tmp_path: Path) -> None:
    result = compared(tmp_path, data_parallel(), data_parallel(wrong=1))
    first = result.culprit
    assert first is not None
    assert (first.rank, first.scope, len(result.culprits)) == (1, "layer0", 1)
    reduce = "c10d::allreduce_"
    assert places(result) == [(0, reduce, 1, 1), (1, "aten::mm", None, 1), (2, reduce, 1, 1)]
    assert "2 ranks got it from others; rank 0 got it from rank 1: first in c10d::allreduce_, collective, step 0" in result.sentence


def test_what_all_ranks_gave_agrees(tmp_path: Path) -> None:
    """Then it went wrong between them."""
    result = compared(tmp_path, data_parallel(), data_parallel(broken=True))
    first = result.culprit
    assert first is not None
    assert (first.op, first.rank, len(result.culprits)) == ("c10d::allreduce_", 0, 1)
    assert first.because == "what the ranks gave is bitwise equal: it went wrong between them"
    assert first.because in result.sentence
    assert "a difference arises on ranks 1, 2 too" in result.sentence


def test_what_a_rank_gave_is_not_in_the_captures(tmp_path: Path) -> None:
    both = [data_parallel(wrong=wrong) for wrong in (None, 1)]
    for run in both:
        run.rows = [row for row in run.rows if row["rank"] != 1]
    result = compared(tmp_path, *both)
    assert (result.verdict, result.culprits) == ("inconclusive", [])
    assert "what rank 1 gave is not in both captures" in result.notes[0]


def test_another_number_of_calls_is_not_followed(tmp_path: Path) -> None:
    both = [data_parallel(), data_parallel(broken=True)]
    for run in both:
        run.call("c10d::allreduce_", [W[0]], [W[0].copy()], phase="collective", rank=2, arguments=told(reduce_op="SUM"))
    result = compared(tmp_path, *both)
    assert result.verdict == "inconclusive"
    assert "rank 2 made 2 of these calls in that step, and this rank 1" in " ".join(result.notes)


@pytest.mark.parametrize("late", [0, 1])
def test_a_pipeline_is_followed_to_its_first_stage(tmp_path: Path, late: int) -> None:
    """Also where a receive belongs to the step before that of its send."""
    result = compared(tmp_path, pipeline(late=late, steps=2), pipeline(wrong=0, late=late, steps=2))
    first = result.culprit
    assert first is not None
    assert (first.rank, first.op, first.step) == (0, "aten::mm", 1)
    assert places(result) == [(0, "aten::mm", None, 0), (1, "c10d::recv_", 0, 0), (2, "c10d::recv_", 1, 0)]
    assert result.occurrences[2].sentence.startswith("rank 2 got it from rank 1, where it came from rank 0: first in c10d::recv_")


def test_what_arrives_is_not_what_was_sent(tmp_path: Path) -> None:
    result = compared(tmp_path, pipeline(), pipeline(broken=2))
    first = result.culprit
    assert first is not None
    assert (first.rank, first.op) == (2, "c10d::recv_")
    assert "it went wrong between them" in first.sentence


def test_the_ranks_of_a_pipeline_run_different_programs(tmp_path: Path) -> None:
    """A small execution number on a later stage is no earlier time."""
    both = [Recording(), Recording()]
    for side, run in enumerate(both):
        got = passed_on(run, changed(W[0], 0.1) if side else W[0], 1, 0)
        product(run, 0, got, 1, wrong=bool(side))
        for row in run.rows:
            row["seq"] += 100 if row["rank"] == 1 else 0
        run.seq = 50
        run.call("aten::relu", [W[2]], [changed(W[0], 0.1) if side else W[0]], rank=1)
    result = compared(tmp_path, *both)
    assert result.culprit is not None
    assert (result.culprit.rank, result.culprit.op) == (1, "aten::relu")


def broadcast(wrong: bool = False, *, broken: bool = False) -> Recording:
    run = Recording()
    x = product(run, 0, W[1], 0, wrong)
    y = changed(x, 0.1) if broken else x.copy()
    for rank, (given, got) in enumerate([([x], []), ([], [y])]):
        run.call("c10d::broadcast_", given, got, phase="collective", rank=rank, arguments=told(ranks="0-1", root=0))
    return run


def test_only_the_root_explains_a_broadcast(tmp_path: Path) -> None:
    broken = compared(tmp_path, broadcast(), broadcast(broken=True)).culprits
    assert [(c.rank, c.op) for c in broken] == [(1, "c10d::broadcast_")]
    came = compared(tmp_path, broadcast(), broadcast(wrong=True))
    assert places(came) == [(0, "aten::mm", None, 0), (1, "c10d::broadcast_", 0, 0)]


def test_what_all_ranks_gave_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of ranks each asks, and the answer is the same but for the one that asks."""
    looked: list[int] = []
    inner = Exchange._contributions
    monkeypatch.setattr(Exchange, "_contributions", lambda self, *given: looked.append(1) or inner(self, *given))
    many = tuple(range(24))
    both = [data_parallel(wrong=wrong, ranks=many) for wrong in (None, 7)]
    for run in both:
        for row in run.rows:
            row |= {"value": row["value"].replace("0-2", "0-23")} if "value" in row else {}
    result = compared(tmp_path, *both)
    assert {sender for rank, _, sender, _ in places(result) if rank != 7} == {7}
    assert (len(result.occurrences), len(looked)) == (24, 1)
    assert [ranks for _, ranks, _ in ranks_alike(result.occurrences)] == ["0-6, 8-23", "7"]
    others = [dataclasses.replace(result.occurrences[0], rank=2 * n) for n in range(20)]
    scattered = [dataclasses.replace(one, sentence=f"rank {one.rank} got it") for one in others]
    assert ranks_alike(scattered)[0][2] == "ranks 0, 2, 4, 6, 8, 10… (20 ranks) got it"
