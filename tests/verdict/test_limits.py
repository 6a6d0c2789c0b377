"""Criteria of older tools: what they pass and fail, and that what they ask for and was not recorded is never passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.comparison import limits
from trueup.foundation.facts import criteria
from trueup.foundation.facts.criteria import PRESETS, load
from trueup.foundation.model import Result, TrueupError
from verdict.captures import Array, Recording, changed, compared, normal

X = normal(64, 64)


def chain(results: list[Array], *, parts: str = "stats digest tensor", first: Array = X) -> Recording:
    run = Recording(parts=parts)
    held = first
    for result in results:
        run.call("aten::mm", [held], [result])
        held = result
    return run


def verdict(tmp_path: Path, criterion: str, change: Any, parts: str = "stats digest tensor") -> Result:
    """Compare three products, the second of which is changed, and with it what follows."""
    right = [normal(64, 64, seed=k) for k in (1, 2, 3)]
    wrong = [right[0], change(right[1]), change(right[2])]
    return compared(tmp_path, chain(right, parts=parts), chain(wrong, parts=parts), criterion=criterion)


@pytest.mark.parametrize("criterion", PRESETS)
@pytest.mark.parametrize("parts", ["stats digest tensor", "stats digest"])
def test_equal_runs_pass_every_criterion(tmp_path: Path, criterion: str, parts: str) -> None:
    assert verdict(tmp_path, criterion, lambda x: x, parts).verdict == "aligned"


@pytest.mark.parametrize(
    ("criterion", "passes", "fails"),
    [
        ("bitwise", 0.0, 1e-7),
        ("ptdbg", 0.1, 0.2),  # cosine 0.995 and 0.98
        ("precision-tool", 0.15, 0.25),
    ],
)  # fmt: skip
def test_thresholds_of_the_distance(tmp_path: Path, criterion: str, passes: float, fails: float) -> None:
    assert verdict(tmp_path, criterion, lambda x: changed(x, passes) if passes else x).verdict == "aligned"
    result = verdict(tmp_path, criterion, lambda x: changed(x, fails))
    assert result.culprit is not None
    assert (result.verdict, result.culprit.ordinal, result.culprit.rule, len(result.culprits)) == ("deviates", 1, criterion, 1)
    assert [row["role"] for row in result.calls.to_pylist()] == ["", "culprit", "victim"]


@pytest.mark.parametrize(
    ("criterion", "passes", "fails"),
    [
        ("ptdbg-summary", lambda x: x * np.float32(1.4), lambda x: x * np.float32(2.2)),
        ("paddle", lambda x: x + np.float32(0.009), lambda x: x + np.float32(0.5)),
        ("msprobe", lambda x: x * np.float32(1.0005), lambda x: x * np.float32(1.01)),
    ],
)  # fmt: skip
def test_thresholds_of_numbers(tmp_path: Path, criterion: str, passes: Any, fails: Any) -> None:
    assert verdict(tmp_path, criterion, passes).verdict == "aligned"
    result = verdict(tmp_path, criterion, fails)
    assert result.culprit is not None
    assert result.culprit.ordinal == 1


@pytest.mark.parametrize(
    ("criterion", "change", "said"),
    [
        ("ptdbg-summary", lambda x: x * np.float32(2.2), "criterion ptdbg-summary: max_symmetric of output.0 is 0.545, above 0.5"),
        ("bitwise", lambda x: changed(x, 1e-6), "criterion bitwise: equal of output.0 is 0, below 1"),
        ("ptdbg", lambda x: changed(x, 0.3), "cosine of output.0 is 0.958, below 0.99 and max_absolute of output.0 is"),
    ],
)  # fmt: skip
def test_the_figure_that_broke_a_limit_is_said(tmp_path: Path, criterion: str, change: Any, said: str) -> None:
    result = verdict(tmp_path, criterion, change)
    assert said in result.sentence
    assert "where none is expected" not in result.sentence


def test_means_near_zero_are_named_as_such(tmp_path: Path) -> None:
    """Relative to the larger of two means that are nothing but rounding, their difference is large: that is what ptdbg asks."""
    x = np.concatenate([X, -X])
    moved = x + np.float32(1e-6)
    runs = [Recording(), Recording()]
    for run, result in zip(runs, (x, moved), strict=True):
        run.call("aten::add", [X], [result])
    found = compared(tmp_path, *runs, criterion="ptdbg-summary")
    assert "criterion ptdbg-summary: mean_symmetric of output.0 is" in found.sentence


def test_a_nan_in_the_candidate_fails(tmp_path: Path) -> None:
    def poisoned(x: Array) -> Array:
        found = x.copy()
        found[0, 0] = np.nan
        return found

    for criterion in ("msprobe", "bitwise"):
        assert verdict(tmp_path, criterion, poisoned).verdict == "deviates"


def test_what_statistics_do_not_tell_is_not_passed(tmp_path: Path) -> None:
    result = verdict(tmp_path, "ptdbg", lambda x: changed(x, 0.2), "stats digest")
    assert result.verdict == "inconclusive"  # the cosine is estimated, the largest difference is not known
    assert verdict(tmp_path, "precision-tool", lambda x: changed(x, 0.4), "stats digest").verdict == "deviates"


def test_an_input_that_fails_explains_the_output(tmp_path: Path) -> None:
    right = [normal(64, 64, seed=1)]
    result = compared(tmp_path, chain(right), chain([right[0] * 3], first=X * 2), criterion="ptdbg")
    assert result.culprit is not None
    assert result.culprit.kind == "input"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'a'\nloss = 1\n[[fail]]\norigin = 'x'", "fail 1: a measure is missing"),
        ("name = 'a'\nloss = 1\n[[fail]]\ncos = { below = 1 }\norigin = 'x'", "measure 'cos' is unknown: expected cosine, equal"),
        ("name = 'a'\nloss = 1\n[[fail]]\ncosine = { under = 1 }\norigin = 'x'", "cosine 'under' is unknown: expected above"),
        ("name = 'a'\nloss = 1\n[[fail]]\ncosine = { below = 1 }", "fail 1: origin is missing"),
        ("name = 'a'\nloss = 1\nfail = 3", "fail: expected tables, each headed [[fail]]"),
        ("name = 'a'\nloss = 1\nrows = 1\n[[fail]]\ncosine = { below = 1 }\norigin = 'x'", "'rows' is unknown"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(TrueupError) as refused:
        load(tmp_path / "mine.toml")
    assert message in str(refused.value)


def test_an_unknown_name_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(TrueupError, match="expected default, bitwise, ptdbg, ptdbg-summary, precision-tool, paddle, msprobe"):
        load("strict")


def test_each_measure_that_a_criterion_may_name_is_measured() -> None:
    assert tuple(limits.MEASURES) == criteria.MEASURES
