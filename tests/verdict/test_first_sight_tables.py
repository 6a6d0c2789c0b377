"""The tables of public silent bugs and of strangers: their rows are whole, and what they train differs where it should.

What a comparison says of them is asked by `make bench-silent` and `make bench-strangers` alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import silent_bugs
import strangers
import trueup
from silent import CASES, Case
from strange import AGAIN, PLAIN, STRANGERS, Stranger


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_silent_bug_is_whole(case: Case) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case.origin)
    assert re.compile(case.place.ops)
    assert re.compile(case.place.scope)
    assert case.place.step < case.steps
    assert (case.what[0].isupper() or case.what.split("_")[0].islower(), case.what[-1]) == (True, ".")


@pytest.mark.parametrize("one", STRANGERS.values(), ids=list(STRANGERS))
def test_a_stranger_is_whole(one: Stranger) -> None:
    assert len(one.wrongs) >= 2
    assert not {PLAIN, *one.rights} & set(one.wrongs)
    assert all(place.step < one.steps for place in one.wrongs.values())


def test_both_tables_are_as_long_as_asked() -> None:
    assert len(CASES) >= 25
    assert len(STRANGERS) >= 10
    assert 3 <= sum(one.held_out for one in STRANGERS.values()) < len(STRANGERS)


@pytest.mark.parametrize("name", ["accumulation-never-divides", "sum-onto-expanded-rows"])
def test_the_buggy_form_differs_and_the_correct_one_does_not(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    losses = {form: silent_bugs.run(case, form, tmp_path / form)[0] for form in ("correct", "buggy", "again")}
    assert losses["again"] == pytest.approx(losses["correct"], rel=1e-5)
    assert losses["buggy"] != pytest.approx(losses["correct"], rel=1e-2)
    columns = ["level", "phase", "scope", "op", "step"]
    for call in trueup.open_capture(tmp_path / "buggy").records(columns=columns).to_pylist():
        if case.place.fits(call["level"], call["phase"], call["scope"], call["op"], call["step"]):
            break
    else:
        pytest.fail(f"no recorded call is {case.place}")


def test_a_broken_cpu_makes_the_same_calls(tmp_path: Path) -> None:
    one = STRANGERS["variational"]
    strangers.run(one, PLAIN, "float32", tmp_path / "plain")
    changed = strangers.run_broken(one, "conv-weight-grad-last-tile", "float32", tmp_path / "broken")
    calls, digests = [], []
    for path in (tmp_path / "plain", tmp_path / "broken"):
        rows = trueup.open_capture(path).records(columns=["step", "seq", "level", "op", "slot", "digest"]).to_pylist()
        calls.append([(row["step"], row["seq"], row["op"]) for row in rows])
        digests.append([row["digest"] for row in rows if row["level"] == "aten"])
    operators = [(row["step"], row["seq"]) for row in rows if row["level"] == "aten"]
    assert calls[0] == calls[1]
    assert changed[0] == next(place for place, *both in zip(operators, *digests, strict=True) if both[0] != both[1])


@pytest.mark.parametrize("precision", strangers.PRECISIONS)
def test_wrong_formulas_of_a_stranger_differ_and_the_other_right_one_does_not(precision: str) -> None:
    one = STRANGERS["variational"]
    losses = {form: float(strangers.build(one, form, precision).step()) for form in (PLAIN, AGAIN, *one.wrongs)}
    assert losses[AGAIN] == pytest.approx(losses[PLAIN], rel=1e-4)
    assert all(losses[wrong] != pytest.approx(losses[PLAIN], rel=1e-4) for wrong in one.wrongs)
    assert torch.isfinite(torch.tensor(list(losses.values()))).all()
