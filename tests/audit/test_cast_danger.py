"""What a cast did, from the statistics of both sides, against what NumPy's cast really does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.analysis.audit.casts import Danger, Numbers, is_mask, judge
from trueup.foundation.kernels import summarize
from trueup.foundation.model import NUMBERS, PACKED

HALF, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
GENERATOR = np.random.default_rng(0)


def numbers(array: np.ndarray) -> Numbers:
    packed = np.empty(PACKED)
    summarize(array, packed)
    known = dict(zip(NUMBERS, packed.tolist(), strict=False))
    known.pop("n_subnormal")
    return Numbers(array.dtype.name, array.size, **known, sketch=packed[len(NUMBERS) :])


def cast(array: np.ndarray, dtype: object) -> Danger | None:
    with np.errstate(all="ignore"):
        return judge(numbers(array), numbers(array.astype(dtype)))  # type: ignore[call-overload]


def normal(*shape: int) -> np.ndarray:
    return GENERATOR.standard_normal(shape).astype(np.float32)


ARBITRARY = "what lies beyond becomes an arbitrary number, another one on another device"

CASES: list[tuple[str, Callable[[], Danger | None], str, bool, str]] = [
    ("beyond fp16", lambda: cast(np.float32([1, 7e4, -9e4]), HALF), "overflow", True,
     "2 of 3 elements become infinite: the input reaches 90000, the largest float16 is 65504"),
    ("beyond float32", lambda: cast(np.float64([3e39]), np.float32), "overflow", True,
     "1 of 1 element becomes infinite: the input reaches 3.00e39, the largest float32 is 3.40e38"),
    ("below fp16", lambda: cast(np.float32([1e-9, 2e-9, 0, 1e-9]), HALF), "flushed", True,
     "3 of 3 numbers that are not zero become zero, below the smallest float16 (5.96e-8); the tensor changes by 1e0 (rel. L2)"),
    ("few below fp16", lambda: cast(np.r_[normal(999), np.float32(1e-9)].astype(np.float32), HALF), "flushed", False,
     "1 of 1,000 numbers that are not zero become zero, below the smallest float16 (5.96e-8)"),
    ("NaN to int", lambda: cast(np.float32([1, np.nan, np.inf]), np.int32), "not finite", True,
     "2 of 3 elements are NaN or Inf, which no int32 is: what they become differs between devices"),
    ("float beyond int8", lambda: cast(np.float32([1, 300]), np.int8), "range", True,
     f"the input reaches 300.0, int8 holds -128 to 127: {ARBITRARY}"),
    ("negative to unsigned", lambda: cast(np.float32([1, -3]), np.uint8), "range", True,
     f"the input reaches -3.000, uint8 holds 0 to 255: {ARBITRARY}"),
    ("int64 wraps", lambda: cast(np.int64([2**40, 1]), np.int32), "range", True,
     "the input reaches 1.10e12, int32 holds -2,147,483,648 to 2,147,483,647: what lies beyond wraps around"),
    ("probabilities to int", lambda: cast(np.float32([0.2, 0.9]), np.int64), "vanishes", True,
     "all 2 elements become 0: the input lies between 0.2000 and 0.9000"),
    ("fractions", lambda: cast(np.float32([1.5, 2.0]), np.int32), "fraction", False,
     "fractions are cut off, which changes the tensor by 2e-1 (rel. L2)"),
    ("positions in bf16", lambda: cast(np.arange(512), BF16), "rounded", True,
     "whole numbers up to 511.0 are rounded: bfloat16 holds them exactly up to 256"),
    ("ids in float32", lambda: cast(np.int64([2**24 + 1, 5]), np.float32), "rounded", False,
     "whole numbers up to 1.68e7 are rounded: float32 holds them exactly up to 16,777,216"),
    ("ints beyond fp16", lambda: cast(np.int32([70001]), HALF), "overflow", True,
     "1 of 1 element becomes infinite: the input reaches 70001, the largest float16 is 65504"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "dangerous", "what"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_destroys_numbers_is_named(make: Callable[[], Danger | None], kind: str, dangerous: bool, what: str) -> None:
    found = make()
    assert found is not None
    assert (found.kind, found.dangerous, found.what) == (kind, dangerous, what)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (normal(4000), HALF), (normal(4000), BF16), (normal(4000), np.float64), (np.float32([65504, -65510]), HALF),
        (np.float32([1, -2, 300, -0.0]), np.int32), (np.float32([-0.4, 3]), np.int32), (np.arange(257), BF16),
        (np.int64([-(2**31), 2**31 - 1]), np.int32), (np.array([True, False]), np.float16), (normal(8), np.bool_),
        (np.float32([]), HALF), (np.float16([np.inf, 1]), np.float32), (np.float32([np.inf, np.nan, 1]), HALF),
    ],
)  # fmt: skip
def test_what_rounds_is_healthy(array: np.ndarray, dtype: object) -> None:
    found = cast(array, dtype)
    assert found is None or found.kind == "fraction"


@pytest.mark.parametrize("mask", [-1e9, -1e30, float(np.finfo(np.float32).min), -np.inf])
def test_a_mask_is_to_become_infinite(mask: float) -> None:
    array = np.where(np.tri(8) > 0, 0, mask).astype(np.float32)
    assert cast(array, HALF) is None
    with np.errstate(over="ignore"):
        assert is_mask(numbers(array), numbers(array.astype(HALF))) == (mask != -np.inf)
    assert not is_mask(numbers(np.float32([7e4])), numbers(np.float16([0])))


@pytest.mark.parametrize("kind", ["min", "n_nan", "sketch", "numel"])
def test_what_was_not_measured_is_not_judged(kind: str) -> None:
    gone = {"sketch": {"sketch": None}, "min": {"min": math.nan, "max": math.nan}}.get(kind, {kind: math.nan})
    found = judge(dataclasses.replace(numbers(np.float32([1, 7e4])), **gone), numbers(np.float16([1, np.inf])))
    assert (found is None) == (kind in ("min", "numel"))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=60),
    st.sampled_from([HALF, BF16, np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.uint8), np.dtype(np.int64)]),
)
def test_silence_means_that_a_cast_lost_nothing_but_rounding(values: list[float], dtype: np.dtype) -> None:
    """Of up to 64 elements the sketch is the tensor, so a fault cannot hide; those masks are that a power of ten or the end is."""
    array = np.float32(values)
    with np.errstate(all="ignore"):
        result = array.astype(dtype)
        if cast(array, dtype) is not None or is_mask(numbers(array), numbers(result)):
            return
        wide = result.astype(np.float64)
        finite = np.isfinite(array)
        assert np.array_equal(np.isfinite(wide), finite)
        if finite.any():
            truth = array[finite].astype(np.float64)
            roundoff = 2.0 ** -(int(ml_dtypes.finfo(dtype).nmant) + 1) if dtype in (HALF, BF16) else 1e-9
            assert np.linalg.norm(wide[finite] - truth) <= roundoff * np.linalg.norm(truth) + 2.0**-24 * len(values)
