"""The way down leads to the culprit of the comparison, on each floor with what was executed before it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from trueup.analysis.recipes.recipe import FAILS, OPEN, PASSES, Reading, Trail, tree, way_to
from trueup.foundation.model import Finding
from trueup.foundation.words.wording import percent

STATES = {"pass": PASSES, "fail": FAILS, "open": OPEN}


def reading(seq: int, scope: str, state: str, level: str = "module", op: str = "Linear") -> Reading:
    error = 0.5 if state == "fail" else 0.0
    return Reading(0, (seq, seq), level, "forward", scope, op, 0, "output.0", STATES[state], error, (1.0, 1.5), 1.0)


def culprit(scope: str, level: str = "module", op: str = "Linear", *, seq: tuple[int, int] = (-1, 0)) -> Finding:
    return Finding("operator", 0, 0, "forward", level, scope, op, 0, None, "", error_out=0.2, seq=seq)


def names(trail: Trail) -> list[tuple[int, str, str]]:
    return [(rung.depth, rung.name, rung.status) for rung in trail.rungs]


def test_each_floor_with_what_came_before() -> None:
    root = tree([
        reading(0, "", "fail"), reading(1, "stem", "pass"), reading(2, "body", "fail"), reading(3, "body.a", "pass"),
        reading(4, "body.b", "fail"), reading(5, "body.c", "fail"), reading(6, "head", "fail"),
    ])  # fmt: skip
    trail = way_to(culprit("body.b", seq=(4, 4)), root)
    assert names(trail) == [(0, "stem", "pass"), (0, "body", "DEVIATES"), (1, "a", "pass"), (1, "b", "DEVIATES")]
    assert trail.said == "body.b, Linear output.0: mean 1 and 1.5 (50 % apart), tensor 50 % off"


def test_order_is_that_of_execution_not_of_names() -> None:
    root = tree([reading(1, "z", "pass"), reading(2, "a", "fail")])
    assert names(way_to(culprit("a", seq=(2, 2)), root)) == [(0, "z", "pass"), (0, "a", "DEVIATES")]


def test_the_first_whose_figures_differ_may_be_a_victim() -> None:
    """The operator stands between two modules; the second passes on what it got."""
    root = tree([reading(1, "norm", "pass"), reading(5, "conv", "fail")])
    trail = way_to(culprit("", "api", "x.gelu", seq=(-1, 3)), root)
    assert names(trail) == [(0, "norm", "pass"), (0, "gelu", "DEVIATES")]
    assert trail.said == "between norm and conv: gelu (only in the candidate), tensor 20 % off"


def test_between_modules_of_a_module() -> None:
    root = tree([reading(0, "block", "fail"), reading(1, "block.norm", "pass"), reading(5, "block.fc", "fail")])
    trail = way_to(culprit("block", "api", "x.add", seq=(3, 3)), root)
    assert trail.said == "between norm and fc of block: add, tensor 20 % off"
    assert names(trail) == [(0, "block", "DEVIATES"), (1, "norm", "pass"), (1, "add", "DEVIATES")]


def test_a_call_that_the_candidate_lacks_stands_where_the_baseline_has_it() -> None:
    readings = [reading(1, "norm", "pass"), reading(4, "conv", "fail")]
    root = tree(dataclasses.replace(one, seqs=(2 * one.seqs[0], one.seqs[1])) for one in readings)
    trail = way_to(culprit("", "api", "x.relu", seq=(5, -1)), root)
    assert trail.said == "between norm and conv: relu (only in the baseline), tensor 20 % off"


def test_before_and_after_all_modules() -> None:
    root = tree([reading(3, "only", "fail")])
    assert way_to(culprit("", "api", "x.mul", seq=(1, 1)), root).said.startswith("before only: mul, ")
    assert way_to(culprit("", "api", "x.mul", seq=(9, 9)), root).said.startswith("after only: mul, ")
    assert way_to(culprit("", "api", "x.mul", seq=(9, 9)), tree([])).said.startswith("in the model: mul, ")


def test_the_call_inside_the_last_module() -> None:
    calls = [reading(2, "body", "pass", "api", "x.add"), reading(3, "body", "fail", "api", "x.mul")]
    trail = way_to(culprit("body", "api", "x.mul", seq=(3, 3)), tree([reading(1, "body", "fail"), *calls]))
    assert names(trail) == [(0, "body", "DEVIATES"), (1, "add#0", "pass"), (1, "mul#0", "DEVIATES")]


def test_many_before_are_counted_and_one_that_was_not_measured_is_said() -> None:
    many = [reading(n, f"m{n}", "open" if n == 2 else "pass") for n in range(9)]
    rungs = way_to(culprit("bad", seq=(9, 9)), tree([*many, reading(9, "bad", "fail")])).rungs
    assert rungs[0] == dataclasses.replace(rungs[0], depth=0, name="5 before", status="could not tell")
    assert [rung.name for rung in rungs[1:]] == ["m5", "m6", "m7", "m8", "bad"]


def test_figures() -> None:
    one = Reading(0, (0, 0), "module", "forward", "a", "Linear", 0, "output.0", FAILS, 0.17, (0.438, 0.45), 1.0)
    assert one.figures == "mean 0.438 and 0.45 (2.7 % apart), tensor 17 % off"
    zero = dataclasses.replace(one, error=1.2, means=(1e-13, -2e-13), scale=1e-4)
    assert zero.figures == "mean near zero (1.0e-13 and -2.0e-13, elements of about 1.0e-04), tensor 120 % off"
    same = dataclasses.replace(one, error=1.2, means=(0.5, 0.5))
    assert same.figures == "the same mean 0.5, tensor 120 % off"
    equal = dataclasses.replace(same, error=0.0, exact=True)
    assert equal.figures == "equal, mean 0.5"
    assert dataclasses.replace(equal, exact=False).figures == "the same statistics, mean 0.5"


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0, "0 %"),
        (0.027, "2.7 %"),
        (0.997, "100 %"),
        (1.2, "120 %"),
        (1.3e-7, "under 0.0001 %"),
        (7.9e-5, "0.0079 %"),
        (1.234e-6, "0.00012 %"),
        (12.34, "1,234 %"),
        (1e30, "over 1,000,000,000 %"),
        (0.0999, "10 %"),
        (math.inf, "infinitely"),
    ],
)
def test_percent(share: float, said: str) -> None:
    assert percent(share) == said
