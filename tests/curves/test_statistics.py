"""Equivalence by two one-sided tests, beside SciPy's own tests and simulated trainings."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import numpy as np
import pytest

from trueup.analysis.curves import statistics
from trueup.analysis.curves.statistics import control, equivalence, holm, needed, power

MARGIN = math.log1p(0.005)


@pytest.fixture(scope="module")
def stats() -> ModuleType:
    return importlib.import_module("scipy.stats")  # here, for it takes a second, in each worker that collects this file


def numbers(count: int, mean: float, spread: float, seed: int) -> list[float]:
    return [float(value) for value in mean * np.exp(np.random.default_rng(seed).normal(0, spread, count))]


def test_unpaired_is_welch_on_logarithms_twice(stats: ModuleType) -> None:
    b, c = numbers(4, 2.0, 0.001, 1), numbers(6, 2.003, 0.003, 2)
    found = equivalence(b, c, 0.005, logarithmic=True)
    low = stats.ttest_ind(np.log(c), np.log(b) - MARGIN, equal_var=False, alternative="greater").pvalue
    high = stats.ttest_ind(np.log(c), np.log(b) + MARGIN, equal_var=False, alternative="less").pvalue
    both = stats.ttest_ind(np.log(c), np.log(b), equal_var=False)
    assert found.p_equivalent == pytest.approx(max(low, high))
    assert found.p_same == pytest.approx(both.pvalue)
    interval = both.confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((math.expm1(interval.low), math.expm1(interval.high)))


def test_paired_is_the_t_test_of_differences(stats: ModuleType) -> None:
    b = numbers(5, 2.0, 0.02, 1)
    c = [value * factor for value, factor in zip(b, numbers(5, 1.0015, 0.0005, 2), strict=True)]
    found = equivalence(b, c, 0.005, logarithmic=True, paired=True)
    difference = np.log(c) - np.log(b)
    assert found.p_same == pytest.approx(stats.ttest_1samp(difference, 0).pvalue)
    assert found.word == "different inside the margin"
    assert equivalence(b, c, 0.005, logarithmic=True).word == "could not tell"  # the spread of seeds hides it


def test_a_share_of_the_baseline_is_tested_exactly(stats: ModuleType) -> None:
    b, c = [-0.90, -0.91, -0.92], [-0.905, -0.912, -0.913]
    found = equivalence(b, c, 0.02, logarithmic=False)
    low = stats.ttest_ind(c, np.array(b) * 1.02, equal_var=False, alternative="greater").pvalue
    high = stats.ttest_ind(c, np.array(b) * 0.98, equal_var=False, alternative="less").pvalue
    assert found.p_equivalent == pytest.approx(max(low, high))
    assert equivalence(b, [0.9, 0.91, 0.92], 0.02, logarithmic=False).word == "different"


def test_only_what_is_worse_counts() -> None:
    b, c = [0.900, 0.901, 0.902, 0.899], [0.930, 0.931, 0.932, 0.929]
    assert equivalence(b, c, 0.005, logarithmic=True).word == "different"
    assert equivalence(b, c, 0.005, logarithmic=True, better="higher").word == "equivalent"
    assert equivalence(c, b, 0.005, logarithmic=True, better="higher").word == "different"


def test_a_run_alone_takes_the_spread_of_the_other_side(stats: ModuleType) -> None:
    b = numbers(5, 2.0, 0.001, 3)
    found = equivalence(b, [2.001], 0.005, logarithmic=True)
    error = np.log(b).std(ddof=1) * math.sqrt(1 + 1 / 5)
    away = (np.log(2.001) - np.log(b).mean()) / error
    assert found.p_same == pytest.approx(2 * stats.t.sf(abs(away), 4))


def test_without_any_spread_nothing_is_told() -> None:
    found = equivalence([2.0], [2.2], 0.005, logarithmic=True)
    assert (found.word, found.needed) == ("could not tell", None)
    assert math.isinf(found.low)
    assert math.isinf(found.high)
    known = equivalence([2.0], [2.2], 0.005, logarithmic=True, spread=0.001)
    assert known.word == "different"
    assert equivalence([2.0], [2.001], 0.005, logarithmic=True, spread=0.001).word == "equivalent"


@pytest.mark.parametrize(("spread", "runs", "expected"), [
    (0.002, 2, 0.180), (0.002, 3, 0.533), (0.002, 5, 0.945), (0.005, 2, 0.015), (0.005, 3, 0.026), (0.005, 5, 0.061),
    (0.005, 10, 0.366),
])  # fmt: skip
def test_power_is_what_simulations_gave(spread: float, runs: int, expected: float) -> None:
    """Shares of 2,000 simulated comparisons that are not paired: benchmarks/curves.py."""
    assert power(spread * math.sqrt(2 / runs), math.nan, MARGIN, runs) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(("spread", "runs", "expected"), [
    (0.002, 2, 0.328), (0.002, 3, 0.746), (0.005, 5, 0.287), (0.005, 10, 0.801),
])  # fmt: skip
def test_power_of_pairs_is_what_simulations_gave(spread: float, runs: int, expected: float) -> None:
    assert power(spread / math.sqrt(runs), runs - 1, MARGIN) == pytest.approx(expected, abs=0.03)


def test_the_repeats_needed_are_the_least_that_do() -> None:
    for spread, paired in ((0.002, False), (0.005, False), (0.005, True)):
        count = needed(spread, MARGIN, paired)
        assert count is not None
        sizes = [(spread * math.sqrt((1 if paired else 2) / n), n - 1, n) for n in (count - 1, count)]
        powers = [power(error, freedom, MARGIN, None if paired else n) for error, freedom, n in sizes]
        assert powers[0] < statistics.WANTED <= powers[1]
    assert needed(0.2, MARGIN, False) is None


@pytest.mark.parametrize("off", [0.0, MARGIN, 2 * MARGIN])
def test_wrong_words_are_as_rare_as_they_should(off: float) -> None:
    rng = np.random.default_rng(7)
    words = [
        equivalence(*np.exp(rng.normal([[0.0], [off]], 0.002, (2, 5))).tolist(), 0.005, logarithmic=True).word for _ in range(150)
    ]  # fmt: skip
    share = {word: words.count(word) / len(words) for word in set(words)}
    if off >= MARGIN:
        assert share.get("equivalent", 0) + share.get("different inside the margin", 0) <= 0.104  # 5 % and three deviations
    else:
        assert share.get("different", 0) == 0
        assert share["equivalent"] >= 0.85


def test_the_control_tests_the_halves_of_the_baseline() -> None:
    assert control([2.0, 2.001, 1.999], 0.005, logarithmic=True) == {}
    healthy = control(numbers(6, 2.0, 0.0005, 5), 0.005, logarithmic=True)
    assert sum(healthy.values()) == 10
    assert healthy.get("different", 0) <= 1
    assert control([2.0, 2.001, 3.0, 3.001], 0.005, logarithmic=True).get("different", 0) >= 1


def test_several_windows_are_corrected_together() -> None:
    assert holm([0.01, 0.04, 0.03]) == [True, False, False]
    assert holm([0.01, 0.02, 0.03]) == [True, True, True]
