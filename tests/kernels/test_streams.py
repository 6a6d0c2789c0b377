"""Sums of many tensors are those of float64, and the same in every instruction set and by any number of threads."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from trueup.foundation.kernels import ABOVE, ALIKE, APART, SPREAD, STREAMED, native, streams

SIZES = (0, 1, 15, 16, 33, 2047, 2048, 40_000, 70_001)


def _table(*sides: list[NDArray[np.generic]]) -> list[int]:
    found: list[int] = []
    for arrays in zip(*sides, strict=True):
        for one in arrays:
            found += [one.__array_interface__["data"][0], STREAMED[one.dtype.name]]
        found += [0, 0] * (2 - len(arrays)) + [arrays[0].size]
    return found


def _in_all(what: int, *sides: list[NDArray[np.generic]], ends: tuple[float, float] = (-math.inf, math.inf)) -> NDArray[np.float64]:
    kernel = native()
    if getattr(kernel, "streams", None) is None:
        pytest.skip("the compiled kernel was not built")
    before, found = kernel.target(None), []
    try:
        for name in ("plain", "neon", "avx2", "avx512"):
            try:
                kernel.target(name)
            except ValueError:
                continue
            found += [streams(what, _table(*sides), ends, threads) for threads in (1, 4)]
    finally:
        kernel.target(before)
    assert len(found) >= 2
    for one in found[1:]:
        if what == APART:
            np.testing.assert_allclose(one[:, 1], found[0][:, 1], rtol=1e-14)
            one[:, 1] = found[0][:, 1]
        np.testing.assert_array_equal(one, found[0])
    return found[0]


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_sums_are_those_of_float64(dtype: str) -> None:
    random = np.random.default_rng(0)
    x = [random.standard_normal(size).astype(dtype) for size in SIZES]
    y = [np.abs(one.astype(np.float32) + random.standard_normal(one.size).astype(np.float32)) for one in x]
    for one in x:
        one[::7] = 0
    wide = [one.astype(np.float64) for one in x]
    other = [one.astype(np.float64) for one in y]
    rows = _in_all(SPREAD, x, ends=(-1.0, 0.5))
    for row, one in zip(rows, wide, strict=True):
        ends = (one.min(), one.max()) if one.size else (math.inf, -math.inf)
        counts = np.count_nonzero(one), np.count_nonzero((one < -1) | (one > 0.5))
        assert row[0] == pytest.approx(np.sum(one * one), rel=1e-12)
        assert row[1:].tolist() == [0, 0, 0, *ends, *counts]
    np.testing.assert_array_equal(_in_all(SPREAD, x)[:, :7], rows[:, :7])  # without ends another loop runs
    for row, one, two in zip(_in_all(ALIKE, x, y), wide, other, strict=True):
        want = np.sum(one * one), np.sum(two * two), np.sum(one * two), np.sum(np.sign(one * two))
        np.testing.assert_allclose(row[:4], want, rtol=1e-12)
    for row, one, two in zip(_in_all(ABOVE, x, y), wide, other, strict=True):
        np.testing.assert_allclose(row[:4], (np.sum(one**2), np.sum(two**2), 0, np.sum(np.sign(two - one**2))), rtol=1e-12)
    for row, one, two in zip(_in_all(APART, x, y), wide, other, strict=True):
        np.testing.assert_allclose(row[:2], (np.sum(one**2), np.sum((one - two) ** 2)), rtol=1e-12)


def test_what_is_not_finite_is_seen() -> None:
    nan, inf = np.ones(100, np.float32), np.full(100, 3e38, np.float32)
    nan[70], inf[3] = np.nan, -np.inf
    rows = _in_all(SPREAD, [nan, inf, np.full(40_000, 3e38, np.float32)], ends=(-1e38, 1e38))
    assert np.isnan(rows[0, [0, 4, 5]]).all()
    assert rows[0, 6:].tolist() == [100, 0]
    assert rows[1].tolist() == [math.inf, 0, 0, 0, -math.inf, float(np.float32(3e38)), 100, 100]
    assert rows[2, 0] == pytest.approx(40_000 * float(np.float32(3e38)) ** 2)  # float32 squares would be Inf
