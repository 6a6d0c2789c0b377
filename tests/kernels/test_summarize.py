"""``summarize`` against the oracle: every dtype, shape, stride and special value."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trueup.foundation.kernels import summarize
from trueup.foundation.kernels._summary import by_twin
from trueup.foundation.kernels.sketch import BLOCK
from trueup.foundation.model import NUMBERS, PACKED

from . import oracle

SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, 5e-324, 1e-40, 6e-8, 65504.0, 448.0, 57344.0, 3e38]


def packed(array: np.ndarray) -> np.ndarray:
    out = np.full(PACKED, 123.0)
    summarize(array, out)
    return out


def close(got: np.ndarray, want: np.ndarray, array: np.ndarray) -> None:
    """Counts, min and max exact; sums to a few float64 roundings of the largest magnitude that entered them."""
    with np.errstate(all="ignore"):
        finite = [abs(x) for x in oracle.reals(array)[0] if math.isfinite(x)]
    bound = 4e-15 * math.fsum(min(x, 1e307 / max(1, len(finite))) for x in finite) + 5e-324
    exact = [k for k, name in enumerate(NUMBERS) if name not in ("mean", "l2")]
    np.testing.assert_array_equal(got[exact], want[exact])
    mean, l2 = NUMBERS.index("mean"), NUMBERS.index("l2")
    np.testing.assert_allclose(got[l2], want[l2], rtol=1e-14)
    np.testing.assert_allclose(got[mean], want[mean], rtol=1e-15, atol=bound / max(1, len(finite)))
    lanes = np.isfinite(got[len(NUMBERS) :]) | (max(finite, default=0.0) < 1e300)
    np.testing.assert_allclose(got[len(NUMBERS) :][lanes], want[len(NUMBERS) :][lanes], rtol=1e-15, atol=bound)


def as_the_twin(out: np.ndarray, array: np.ndarray) -> None:
    """Counts and extremes equal; sums within the bound of docs/format.md, 1e-13 of the magnitudes that entered."""
    twin = np.full(PACKED, 8.0)
    by_twin(array, twin)
    with np.errstate(all="ignore"):
        values = np.abs(array).astype(np.float64)
        values[~np.isfinite(values) | (values == np.finfo(np.float64).max)] = 0.0
        magnitude = 1.5 * values.sum()  # |z| is at least two thirds of |real| + |imaginary|
    exact = [k for k, name in enumerate(NUMBERS) if name not in ("mean", "l2")]
    np.testing.assert_array_equal(out[exact], twin[exact])
    np.testing.assert_allclose(out[2:4], twin[2:4], rtol=1e-13, atol=1e-15 * magnitude)
    np.testing.assert_allclose(out[len(NUMBERS) :], twin[len(NUMBERS) :], rtol=0, atol=1e-13 * magnitude)


def values_of(dtype: np.dtype) -> st.SearchStrategy:
    """Return raw bytes read as ``dtype``: every bit pattern there is, mixed with named special values."""

    def build(raw: bytes, count: int, picks: list[float]) -> np.ndarray:
        array = np.frombuffer(raw * (1 + count * dtype.itemsize // len(raw)), np.uint8)[: count * dtype.itemsize]
        if dtype.kind == "b":
            array = array & 1
        elif dtype.name in ("int4", "uint4"):
            array = array & 15
        array = array.copy().view(dtype)
        if dtype in oracle.FLOATS and picks and count:
            with np.errstate(all="ignore"):
                array[: len(picks)] = np.array(picks[:count]).astype(dtype)
        return array

    return st.builds(
        build, st.binary(min_size=1, max_size=200), st.integers(0, 200), st.lists(st.sampled_from(SPECIAL), max_size=20)
    )


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_bit_pattern(dtype: np.dtype, data: st.DataObject) -> None:
    array = data.draw(values_of(dtype))
    with np.errstate(all="ignore"):
        close(packed(array), oracle.summary(array), array)


@settings(max_examples=50, deadline=None)
@given(array=hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)), data=st.data())
def test_logical_order_counts_not_memory_order(array: np.ndarray, data: st.DataObject) -> None:
    view = array.transpose(data.draw(st.permutations(range(array.ndim))))
    if array.ndim:
        view = view[(slice(None, None, data.draw(st.sampled_from([1, -1, 2]))),)]
    np.testing.assert_array_equal(packed(view), packed(view.copy(order="C")))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "complex64"])
@pytest.mark.parametrize("size", [63, 64, 65, 511, 512, 513, 4097])
def test_row_and_group_edges(dtype: str, size: int) -> None:
    generator = np.random.default_rng(size)
    array = (generator.standard_normal(size) * 100).astype(dtype)
    close(packed(array), oracle.summary(array), array)


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 777])
def test_block_edges(size: int) -> None:
    array = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    array[[3, -1]] = np.nan
    array[[5, -2]] = [np.inf, -np.inf]
    array[[7, -3]] = [0.0, 1e-40]
    array[-4] = np.finfo(np.float32).max
    close(packed(array), oracle.summary(array), array)


def test_tables_beyond_the_remembered_blocks() -> None:
    """An element behind the last remembered block lands on the oracle's lane with the oracle's sign."""
    for i in (64 * BLOCK, 64 * BLOCK + 513, 70 * BLOCK + 12345):
        array = np.zeros(i + 1, np.int8)
        array[i] = 1
        lane, sign = oracle.place(i)
        sketch = packed(array)[len(NUMBERS) :]
        assert sketch[lane] == sign
        assert np.count_nonzero(sketch) == 1


@pytest.mark.parametrize("value", [1.7e308, 1e200, 1e160, 1e-160, 1e-300, 5e-324])
def test_l2_and_mean_stay_inside_float64(value: float) -> None:
    got = packed(np.full(4, value))
    assert got[NUMBERS.index("mean")] == value
    if value < 1e308:
        assert got[NUMBERS.index("l2")] == pytest.approx(2 * value, rel=1e-15)


def test_nothing_finite() -> None:
    got = dict(zip(NUMBERS, packed(np.array([np.nan, np.inf, -np.inf, np.nan], np.float16)), strict=False))
    assert [math.isnan(got[name]) for name in ("min", "max", "mean", "l2")] == [True] * 4
    assert [got[f"n_{name}"] for name in ("nan", "posinf", "neginf", "zero")] == [2, 1, 1, 0]


def test_empty_and_zero_dimensional() -> None:
    empty = packed(np.empty((3, 0), np.float32))
    assert np.isnan(empty[:4]).all()
    assert not empty[4:].any()
    assert packed(np.array(-2.5))[:4].tolist() == [-2.5, -2.5, -2.5, 2.5]


def test_swapped_bytes_are_read_by_value() -> None:
    for dtype in (">f4", ">f8", ">c8", ">i2"):
        array = np.arange(-5, 95).astype(dtype)
        np.testing.assert_array_equal(packed(array), packed(array.astype(array.dtype.newbyteorder("="))))


def test_the_array_is_left_alone() -> None:
    array = np.array([1.0, np.nan, 1e308, 1e308])
    before = array.tobytes()
    array.flags.writeable = False
    packed(array)
    assert array.tobytes() == before


@pytest.mark.parametrize("dtype", [object, "U3", "M8[s]", "V4", np.longdouble])
def test_other_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(TypeError, match=r"no statistics for dtype .*: expected real or complex numbers"):
        packed(np.zeros(2, dtype))


def test_wrong_out_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("out: expected float64 (74,), got float32 (74,)")):
        summarize(np.zeros(2), np.zeros(PACKED, np.float32))
