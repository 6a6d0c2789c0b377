"""The named measures: formulas against plain NumPy, and every edge case that a rival reads as perfect."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trueup.foundation.kernels.metrics import (
    SINGLE_EPSILON,
    Metrics,
    Msaccucmp,
    counts_that_differ,
    deviation,
    differences,
    kullback_leibler,
)
from trueup.foundation.model import TensorStats

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, max_side=7)
FLOATS = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_formulas(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a = data.draw(hnp.arrays(np.float32, shape, elements=FLOATS))
    b = data.draw(hnp.arrays(np.float64, shape, elements=FLOATS))
    m = Metrics.of(a, b)
    x, y = a.astype(np.float64), b
    d = np.abs(y - x)
    relative = d / np.where(x == 0, 2.0**-23, np.abs(x))
    assert m.rmse == pytest.approx(math.sqrt(np.mean(d**2)), rel=1e-12)
    assert (m.max_absolute, m.mean_absolute) == (d.max(), pytest.approx(d.mean(), rel=1e-12))
    assert (m.max_relative, m.mean_relative) == (relative.max(), pytest.approx(relative.mean(), rel=1e-12))
    assert (m.thousandth, m.five_thousandths) == ((relative < 0.001).mean(), (relative < 0.005).mean())
    assert m.sign_flips == np.count_nonzero(np.sign(x) * np.sign(y) < 0)
    if d.any():
        assert m.max_index == np.unravel_index(np.argmax(d), shape)
    else:
        assert m.max_index is None
    norm = np.linalg.norm(x)
    assert m.relative_l2 == pytest.approx(np.linalg.norm(d) / norm if norm else math.inf if d.any() else 0.0, rel=1e-12)
    if norm and np.linalg.norm(y):
        assert m.cosine == pytest.approx(np.vdot(x, y) / norm / np.linalg.norm(y), abs=1e-12)


def test_one_element_and_none() -> None:
    one = Metrics.of(np.array(2.0), np.array(-2.0))
    assert (one.cosine, one.max_index, one.sign_flips, one.relative_l2) == (-1.0, (), 1, 2.0)
    none = Metrics.of(np.empty((0, 4)), np.empty((0, 4)))
    assert (none.counted, none.relative_l2, none.cosine, none.rmse, none.thousandth, none.same) == (0, 0.0, 1.0, 0.0, 1.0, True)


@pytest.mark.parametrize(
    ("a", "b", "cosine", "relative"),
    [([0, 0], [0, 0], 1.0, 0.0), ([0, 0], [0, 1], math.nan, math.inf), ([0, 1], [0, 0], math.nan, 1.0)],
)
def test_a_norm_of_zero(a: list[float], b: list[float], cosine: float, relative: float) -> None:
    m = Metrics.of(np.array(a, np.float32), np.array(b, np.float32))
    assert m.cosine == pytest.approx(cosine, nan_ok=True)
    assert m.relative_l2 == relative


def test_a_one_sided_nan_is_no_agreement() -> None:
    a = np.ones((3, 4), np.float32)
    b = a.copy()
    b[1, 2] = np.nan
    for first, second in ((a, b), (b, a)):
        m = Metrics.of(first, second)
        assert (m.relative_l2, m.disagreeing, m.first_disagreement, m.same) == (math.inf, 1, (1, 2), False)
        assert m.max_absolute == 0.0
    both = Metrics.of(b, b)
    assert (both.relative_l2, both.disagreeing, both.same, both.counted) == (0.0, 0, True, 11)


def test_inf_of_the_other_sign_is_no_agreement() -> None:
    assert Metrics.of(np.array([np.inf]), np.array([-np.inf])).relative_l2 == math.inf
    assert Metrics.of(np.array([np.inf]), np.array([np.inf])).same
    assert Metrics.of(np.full(3, np.nan), np.full(3, np.nan)).same


def test_integers_and_bool_are_exact() -> None:
    a = np.array([2**60, 1], np.int64)
    m = Metrics.of(a, a + np.array([1, 0]))
    assert (m.max_absolute, m.equal, m.same, m.max_index) == (1.0, 1, False, (0,))
    assert m.relative_l2 == 2.0**-60
    assert Metrics.of(np.array([True, False]), np.array([True, True])).equal == 1


def test_units_in_the_last_place() -> None:
    a = np.array([1.0, 1.0, 1.0, 1.0], np.float32)
    b = a.copy()
    for _ in range(3):
        b[1:] = np.nextafter(b[1:], np.float32(2))
    m = Metrics.of(a, b)
    assert m.ulp[:3] == (1, 0, 3)
    assert Metrics.of(a, (a * 1.001).astype(BF16)).ulp[0] == 4  # rounds to the same bfloat16


def msaccucmp_divergence(my: np.ndarray, golden: np.ndarray) -> float:
    shares = []
    for side in (my, golden):
        scaled = np.maximum((side - side.min()) / (side.max() - side.min()), np.finfo(np.float32).eps)
        shares.append(scaled / scaled.sum())
    return float(np.sum(shares[0] * np.log(shares[0] / shares[1])))


def test_the_measures_of_msaccucmp() -> None:
    generator = np.random.default_rng(0)
    a = generator.standard_normal((300, 400)).astype(np.float32)
    b = (a + generator.standard_normal(a.shape) * 0.01).astype(np.float32)
    a[0, :3] = [0.0, 1e-8, SINGLE_EPSILON]
    found = Msaccucmp.of(a, b)
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    kept = np.abs(x) > SINGLE_EPSILON
    relative = np.abs(y[kept] / x[kept] - 1)
    assert found.accumulated_relative == pytest.approx(relative.sum(), rel=1e-9)
    assert (found.max_relative, found.mean_relative) == pytest.approx((relative.max(), relative.mean()), rel=1e-9)
    assert found.kullback_leibler == pytest.approx(msaccucmp_divergence(y, x), rel=1e-9)
    assert found.standard_deviation == (pytest.approx((x.mean(), x.std())), pytest.approx((y.mean(), y.std())))
    assert found.relative_euclidean == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x))
    assert found.mean_absolute == pytest.approx(np.abs(y - x).mean())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2], [3, 4], 0.0), ([1, 1], [2, 2], 0.0), ([1, np.nan], [1, 2], math.nan), ([], [], math.nan), ([1j], [1j], math.nan)],
)
def test_edges_of_the_divergence(a: list[Any], b: list[Any], expected: float) -> None:
    assert kullback_leibler(np.array(a), np.array(b)) == pytest.approx(expected, nan_ok=True)


def test_the_divergence_of_numbers_whose_span_leaves_float64() -> None:
    a = np.array([-1.7e308, 0.0, 1.7e308])
    assert kullback_leibler(a, a) == 0.0


def test_deviation_leaves_out_what_does_not_count() -> None:
    values = np.array([1.0, 3.0, np.nan, np.inf, np.finfo(np.float32).max], np.float32)
    assert deviation(values) == (2.0, 1.0)
    assert all(map(math.isnan, deviation(np.array([np.nan]))))
    assert deviation(np.array([65504.0, 65504.0], np.float16)) == (65504.0, 0.0)


def stats(**changes: float) -> TensorStats:
    zero = dict.fromkeys(("n_nan", "n_posinf", "n_neginf", "n_zero", "n_subnormal", "n_saturated"), 0)
    made: dict[str, Any] = {"numel": 4, "min": -1.0, "max": 2.0, "mean": 0.5, "l2": 3.0, **zero}
    return TensorStats(**(made | changes))


def test_statistics_side_by_side() -> None:
    rows = differences(stats(), stats(max=4.0, mean=-0.5, l2=math.inf))
    assert [(row.name, row.absolute) for row in rows] == [("max", 2.0), ("min", 0.0), ("mean", -1.0), ("l2", math.inf)]
    assert [row.relative for row in rows] == pytest.approx([0.5, 0.0, 2.0, math.inf])
    assert all(row.absolute == 0.0 for row in differences(stats(min=math.nan), stats(min=math.nan)))


def test_counts_that_differ() -> None:
    assert counts_that_differ(stats(), stats()) == ()
    assert [(row.name, row.absolute) for row in counts_that_differ(stats(n_nan=2), stats())] == [("n_nan", -2)]
