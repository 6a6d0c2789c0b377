"""What is rounding, what is noise, and which run a third one follows."""

from __future__ import annotations

import math

import pytest

from trueup.analysis.triage.triaging import apart, follows, gap, spread, tells

SINGLE = 2.0**-24
HALF = 2.0**-8


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (2.0, 2.0, 0.0), (math.nan, math.nan, 0.0), (2.0, 1.0, 0.5), (-1.0, 1.0, 2.0), (math.nan, 1.0, math.inf),
        (math.inf, 1.0, math.inf),
    ],
)  # fmt: skip
def test_a_gap_is_relative(one: float, other: float, expected: float) -> None:
    assert gap(one, other) == expected


def test_rounding_depends_on_the_dtype() -> None:
    one, other = {0: 2.0, 1: 1.9}, {0: 2.0 * (1 + 1e-4), 1: 1.9}
    found = apart(one, other, one, SINGLE)
    assert (found.first, found.step) == (0, 0)
    assert found.relative == pytest.approx(1e-4, rel=1e-3)
    assert apart(one, other, one, HALF).step is None
    assert apart(one, {0: 2.0 * (1 + 1e-6), 1: 1.9}, one, SINGLE).step is None


def test_rounding_that_went_through_the_weights_may_grow() -> None:
    one = {0: 2.0, 1: 1.9, 2: 1.8}
    grown = apart(one, {0: 2.0 * (1 + 1e-7), 1: 1.9 * 1.0005, 2: 1.8 * 1.04}, one, SINGLE)
    assert (grown.first, grown.step, grown.widest) == (0, None, 2)
    assert apart(one, {0: 2.0 * (1 + 1e-7), 1: 1.9 * 1.0005, 2: 1.8 * 1.06}, one, SINGLE).step == 2
    assert apart(one, {0: 2.0 * (1 + 1e-7), 1: 1.9 * 1.002, 2: 1.8}, one, SINGLE).step == 1
    assert apart(one, {0: 2.0, 1: 1.9 * (1 + 1e-5), 2: 1.8}, one, SINGLE).step is None


def test_losses_that_are_too_near_tell_nothing() -> None:
    assert not tells(1e-7, SINGLE)
    assert tells(3e-6, SINGLE)
    assert not tells(5e-4, HALF)
    assert tells(2e-3, HALF)


def test_what_the_run_does_by_itself_is_no_difference() -> None:
    one, again = {0: 2.0, 1: 1.9}, {0: 2.1, 1: 1.9}
    assert apart(one, {0: 2.3, 1: 1.9}, again, SINGLE).step is None
    assert apart(one, {0: 3.0, 1: 1.9}, again, SINGLE).step == 0
    assert spread(one, again) == pytest.approx(0.1 / 2.1)


def test_bitwise_equal_runs_and_runs_without_a_common_step() -> None:
    assert apart({0: 1.0}, {0: 1.0}, {}, SINGLE).first is None
    assert apart({0: 1.0}, {1: 1.0}, {}, SINGLE).steps == 0


@pytest.mark.parametrize(
    ("loss", "one", "other", "expected"),
    [
        (2.0, 1.0, 2.0, True), (1.95, 1.0, 2.0, True), (1.5, 1.0, 2.0, False), (1.0, 1.0, 2.0, False), (math.nan, 1.0, 2.0, False),
        (2.0, math.nan, 2.0, True), (math.nan, math.nan, 2.0, False), (math.nan, 2.0, math.nan, True),
    ],
)  # fmt: skip
def test_a_run_follows_the_one_it_is_near(loss: float, one: float, other: float, expected: bool) -> None:
    assert follows(loss, one, other) is expected
