"""What the sketch promises: linear, exact when small, unbiased when large, blind to nothing that moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.foundation.kernels import at_least, distance, summarize
from trueup.foundation.kernels.sketch import shifts, signs, splitmix64
from trueup.foundation.model import LANES, NUMBERS, PACKED

from . import oracle


def sketch(array: np.ndarray) -> np.ndarray:
    out = np.empty(PACKED)
    summarize(array, out)
    return out[len(NUMBERS) :]


def ratio(a: np.ndarray, b: np.ndarray) -> float:
    """Return the estimated over the true distance."""
    true = np.linalg.norm((a.astype(np.float64) - b.astype(np.float64)).ravel())
    return float(distance(sketch(a), sketch(b)) / true)


def test_constants_of_format_1() -> None:
    """The published first outputs of splitmix64 from seed 0, and frozen values of ours: a change is a new format."""
    golden = 0x9E3779B97F4A7C15
    words = splitmix64(np.array([0, golden], np.uint64))
    assert [hex(int(word)) for word in words] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]
    assert signs(0, 1)[:8].tolist() == [-1, -1, -1, -1, 1, -1, 1, -1]
    assert shifts(0, 6).tolist() == [oracle.place(512 * g)[0] for g in range(6)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**40))
def test_signs_and_shifts_are_the_oracles(i: int) -> None:
    lane, sign = oracle.place(i)
    assert signs(i // 64, 1)[i % 64] == sign
    assert (i % 64 + int(shifts(i // 512, 1)[0])) % 64 == lane


@pytest.mark.parametrize("size", [1, 7, 63, 64])
def test_up_to_64_elements_it_is_the_tensor(size: int) -> None:
    array = np.random.default_rng(size).standard_normal(size)
    lanes = (np.arange(size) + int(shifts(0, 1)[0])) % LANES
    assert (sketch(array)[lanes] * signs(0, 1)[:size]).tolist() == array.tolist()
    assert ratio(array, array + np.eye(1, size).ravel()) == pytest.approx(1.0, rel=1e-14)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.floats(-4, 4))
def test_linear(size: int, seed: int, factor: float) -> None:
    a, b = np.random.default_rng(seed).standard_normal((2, size))
    np.testing.assert_allclose(sketch(a + factor * b), sketch(a) + factor * sketch(b), atol=1e-11)


def spread_of_square(differences: list[np.ndarray]) -> tuple[float, float]:
    """Return mean and standard deviation of estimated over true *squared* distance."""
    ratios = [ratio(d, np.zeros_like(d)) ** 2 for d in differences]
    return float(np.mean(ratios)), float(np.std(ratios))


@pytest.mark.parametrize("size", [2048, 20_000, 100_000])
def test_spread_differences_deviate_by_18_percent(size: int) -> None:
    generator = np.random.default_rng(size)
    mean, deviation = spread_of_square([generator.standard_normal(size).astype(np.float32) for _ in range(300)])
    assert mean == pytest.approx(1.0, abs=4 * 0.18 / 300**0.5)
    assert 0.14 < deviation < 0.22


@pytest.mark.parametrize("width", [64, 128, 768])
def test_one_column_deviates_by_50_percent(width: int) -> None:
    """A column whose stride is a multiple of 64 sits in eight lanes: sqrt(2/8) of its square, never blind."""
    generator = np.random.default_rng(width)
    matrices = []
    for _ in range(150):
        matrix = np.zeros((512, width), np.float32)
        matrix[:, generator.integers(width)] = generator.standard_normal(512)
        matrices.append(matrix)
    mean, deviation = spread_of_square(matrices)
    assert mean == pytest.approx(1.0, abs=4 * 0.55 / 150**0.5)
    assert 0.35 < deviation < 0.65
    assert min(ratio(matrix, np.zeros_like(matrix)) for matrix in matrices) > 0.2


def moved(kind: str, array: np.ndarray) -> np.ndarray:
    return {
        "heads permuted": lambda: array.reshape(64, 8, 64)[:, [1, 0, 2, 3, 4, 5, 6, 7]].reshape(array.shape),
        "rows shifted": lambda: np.roll(array, 1, axis=0),
        "rotated by half": lambda: np.roll(array.ravel(), array.size // 2).reshape(array.shape),
        "one sign": lambda: np.where(np.arange(array.size).reshape(array.shape) == 4711, -array, array),
        "all signs": lambda: -array,
        "transposed": lambda: array.reshape(64, 8, 64).transpose(2, 1, 0).reshape(array.shape),
        "elements sorted": lambda: np.sort(array.ravel()).reshape(array.shape),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    ["heads permuted", "rows shifted", "rotated by half", "one sign", "all signs", "transposed", "elements sorted"],
)
def test_sees_what_norms_cannot(kind: str) -> None:
    array = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    assert 0.6 < ratio(array, moved(kind, array)) < 1.5


@pytest.mark.parametrize("error", [1e-6, 1e-4, 1e-2])
def test_small_relative_errors_are_measured(error: float) -> None:
    generator = np.random.default_rng(2)
    a = generator.standard_normal(100_000).astype(np.float32)
    b = (a + error * generator.standard_normal(a.size)).astype(np.float32)
    assert 0.6 < ratio(a, b) < 1.4


def test_distance_is_vectorised_and_stays_inside_float64() -> None:
    a, b = np.zeros((3, LANES)), np.zeros((3, LANES))
    a[0, :2], a[1, 0] = (3e200, 4e200), np.inf
    got = distance(a, b)
    assert got.shape == (3,)
    assert got[0] == pytest.approx(5e200)
    assert np.isnan(got[1])
    assert got[2] == 0.0


def test_elements_that_cancel_in_a_lane_show_in_norm_and_mean() -> None:
    """Elements that moved by the same number, as by Adam's first step, where they meet in a lane."""
    first, hidden = np.random.default_rng(0).standard_normal((20, 64)), 0
    for row in range(1, 20):
        for column in range(64):
            second = first.copy()
            second[[0, row], [5, column]] += 0.01
            estimate = distance(sketch(first), sketch(second))
            sides = [(np.linalg.norm(side, keepdims=True).ravel(), np.array([side.mean()])) for side in (first, second)]
            found = float(at_least(np.array([estimate]), *sides, np.array([first.size]), summed=1e-9)[0])
            hidden += estimate < 1e-9
            assert 0.02 / first.size**0.5 < found * (1 + 1e-9), "the sums differ by 0.02"
            assert found <= max(float(estimate), 0.01 * 2**0.5), "no more is proved than there is"
    assert hidden, "none of them cancels"


def test_norms_of_equal_numbers_summed_in_another_order_prove_nothing() -> None:
    sides = [(np.array([norm, norm, np.nan]), np.array([0.5, 0.5, 0.5])) for norm in (44.245736733299964, 44.245736733299957)]
    found = at_least(np.array([0.0, np.nan, 0.0]), *sides, np.array([2048.0] * 3), summed=1e-9)
    assert found[[0, 2]].tolist() == [0.0, 0.0]
    assert np.isnan(found[1])
