"""One number by which all elements are off, from tensors and from sketches, and which number that is."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from trueup.comparison.result.summary import factor
from trueup.foundation.kernels import summarize
from trueup.foundation.model import NUMBERS, PACKED
from trueup.foundation.words.reasons import in_words
from verdict.captures import Array, Recording, changed, compared, normal

UNIT = 2.0**-24


def sketch_of(array: Array) -> Array:
    packed = np.empty(PACKED)
    summarize(array, packed)
    return packed[len(NUMBERS) :]


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize(
    ("times", "words"),
    [
        (2.0, "2"), (0.5, "1/2"), (-1.0, "-1"), (1 / 3, "1/3"), (8.0, "8"), (math.sqrt(24), "sqrt(24)"),
        (-1 / math.sqrt(96), "-1/sqrt(96)"), (0.75, "3/4"), (1.0173, ""),
    ],
)  # fmt: skip
def test_a_factor_is_told_to_rounding(times: float, words: str, statistics: bool) -> None:
    right = normal(64, 33, seed=4)
    wrong = (right * np.float32(times)).astype(np.float32)
    both = [sketch_of(side) if statistics else side.astype(np.float64).ravel() for side in (right, wrong)]
    found = factor(both[0], both[1], 8 * UNIT, right.size)
    assert found is not None
    assert found.facts[0] == words
    assert found.facts[1] == pytest.approx(times, rel=1e-6)


@pytest.mark.parametrize("statistics", [False, True])
def test_what_is_no_multiple_has_no_factor(statistics: bool) -> None:
    right = normal(64, 33, seed=4)
    for wrong in (changed(right, 0.1), right + np.float32(0.5), (2 * changed(right, 1e-3)).astype(np.float32)):
        both = [sketch_of(side) if statistics else side.astype(np.float64).ravel() for side in (right, wrong)]
        assert factor(both[0], both[1], 8 * UNIT, right.size) is None


def test_coarse_numbers_are_near_everything() -> None:
    right = normal(64, 33, seed=4).astype(np.float64).ravel()
    found = factor(right, right * math.sqrt(1023), 2.0**-8, right.size)
    assert found is not None
    assert found.facts[0] == ""


def test_what_rounding_could_make_of_one_is_no_factor_of_one() -> None:
    one = np.array([1.0])
    assert factor(one, one * 1.01, 0.08, 1) is None


def test_one_number_has_a_factor_only_if_somebody_would_write_it() -> None:
    one = np.array([0.7])
    assert factor(one, one * 1.0173, 8 * UNIT, 1) is None
    found = factor(one, one * 4, 8 * UNIT, 1)
    assert found is not None
    assert in_words(found) == "off by a factor of exactly 4"


def test_the_finding_says_it(tmp_path: Path) -> None:
    runs = Recording(), Recording()
    x, y = normal(32, 32, seed=1), normal(32, 32, seed=2)
    for run, times in zip(runs, (1, 2), strict=True):
        run.call("aten::mm", [x, x], [(y * np.float32(times)).astype(np.float32)])
    assert compared(tmp_path, *runs).culprit.sentence.endswith("; off by a factor of exactly 2")


@pytest.mark.parametrize("changed_too", [False, True])
def test_the_same_numbers_in_another_order(changed_too: bool, tmp_path: Path) -> None:
    """A batch that is shuffled; not where one of the numbers is another."""
    runs, x = (Recording(), Recording()), normal(32, 8, seed=1)
    shuffled = x[np.random.default_rng(0).permutation(32)]
    shuffled[0, 0] += changed_too
    for run, batch in zip(runs, (x, shuffled), strict=True):
        run.call("aten::relu", [batch], [np.maximum(batch, 0)])
    found = compared(tmp_path, *runs).culprit
    assert found.sentence.endswith("; the same numbers in another order") is not changed_too
