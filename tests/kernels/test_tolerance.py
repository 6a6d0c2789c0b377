"""Closeness against ``numpy.isclose``, and what statistics alone may claim."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trueup.foundation.kernels import summarize
from trueup.foundation.kernels.metrics import Tolerance, closeness, estimate, from_sketch
from trueup.foundation.model import NUMBERS, PACKED, TensorStats

SPECIAL = st.sampled_from([0.0, 1.0, 1.00001, -1.0, math.nan, math.inf, -math.inf, 3.4028234663852886e38])
ELEMENTS = SPECIAL | st.floats(-10, 10, width=32)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)


def known(values: np.ndarray) -> tuple[TensorStats, np.ndarray]:
    out = np.empty(PACKED)
    summarize(values, out)
    numbers: dict[str, Any] = {k: int(x) if k.startswith("n_") else x for k, x in zip(NUMBERS, out.tolist(), strict=False)}
    return TensorStats(numel=values.size, **numbers), out[len(NUMBERS) :]


@settings(max_examples=200, deadline=None)
@given(shape=SHAPES, data=st.data(), rtol=st.sampled_from([0.0, 1e-5, 0.1]), atol=st.sampled_from([0.0, 1e-8, 1.0]))
def test_as_numpy_says(shape: tuple[int, ...], data: st.DataObject, rtol: float, atol: float) -> None:
    a, b = (data.draw(hnp.arrays(np.float32, shape, elements=ELEMENTS)) for _ in range(2))
    found = closeness(a, b, Tolerance(rtol, atol), top=3)
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        close = np.isclose(y, x, rtol, atol, equal_nan=True)
    assert (found.outside, found.elements) == (np.count_nonzero(~close), a.size)
    unlike = np.count_nonzero(~((x == y) | (np.isnan(x) & np.isnan(y))))
    assert len(found.worst) == min(3, unlike)
    for each in found.worst:
        assert each.absolute == np.inf or each.absolute == abs(y[each.index] - x[each.index])
    assert [each.times for each in found.worst] == sorted((each.times for each in found.worst), reverse=True)
    if found.outside:
        assert not close[found.worst[0].index]


def test_the_worst_of_many_pieces_come_in_order() -> None:
    a = np.ones((400, 500), np.float32)
    b = a.copy()
    for k, index in enumerate([(399, 499), (0, 0), (200, 7), (17, 3)]):
        b[index] = 2 + k
    b[300] += 0.25
    found = closeness(a, b, Tolerance(), top=6)
    assert [each.index for each in found.worst] == [(17, 3), (200, 7), (0, 0), (399, 499), (300, 0), (300, 1)]
    assert found.outside == 504
    assert (found.worst[0].baseline, found.worst[0].candidate) == (np.float32(1), np.float32(5))


def test_integers_beyond_float64_and_complex() -> None:
    a = np.full(3, 2**60, np.int64)
    assert closeness(a, a + np.array([0, 1, 0]), Tolerance(0, 0)).worst[0].index == (1,)
    assert closeness(a, a + np.array([0, 1, 0]), Tolerance(0, 1)).close
    z = np.array([3 + 4j, 1])
    found = closeness(z, z + np.array([0.3 + 0.4j, 0]), Tolerance(0.1, 1e-12))
    assert (found.close, found.elements, found.worst[0].absolute) == (True, 2, pytest.approx(0.5))


@settings(max_examples=150, deadline=None)
@given(
    shape=hnp.array_shapes(min_dims=1, max_dims=2, max_side=40), data=st.data(), rtol=st.sampled_from([1e-6, 1e-2, 0.5])
)
def test_statistics_never_call_close_tensors_apart(shape: tuple[int, ...], data: st.DataObject, rtol: float) -> None:
    a = data.draw(hnp.arrays(np.float32, shape, elements=ELEMENTS))
    seed = data.draw(st.integers(0, 100))
    with np.errstate(all="ignore"):
        b = (a * (1 + rtol * np.random.default_rng(seed).uniform(-1.3, 1.3, shape))).astype(data.draw(
            st.sampled_from([np.float32, np.float64, ml_dtypes.bfloat16])))  # fmt: skip
    tolerance = Tolerance(rtol, 1e-8)
    (first, sketch), (second, other) = known(a), known(b)
    found = estimate(first, second, (sketch, other), tolerance)
    if found.apart:
        assert not closeness(a, b, tolerance).close, found.apart


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int16", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (1,), (4, 8), (32,), (0, 3)])
def test_a_sketch_of_up_to_64_reals_is_the_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    values = (np.random.default_rng(0).standard_normal(shape) * 9).astype(getattr(ml_dtypes, dtype, dtype))
    stats, sketch = known(values)
    found = from_sketch(stats, sketch, shape, dtype.startswith("complex"))
    np.testing.assert_array_equal(found, values.astype(np.complex128 if "c" in dtype[:1] else np.float64))


def test_a_sketch_is_not_the_tensor_where_something_is_missing_from_it() -> None:
    for values in (np.ones(65), np.array([1, np.nan]), np.array([1, np.inf]), np.array([np.finfo(np.float32).max], np.float32)):
        stats, sketch = known(values)
        assert from_sketch(stats, sketch, values.shape, False) is None
