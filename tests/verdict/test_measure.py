"""How far apart two slots are, against a float64 oracle; what cannot be measured is never equal."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trueup.comparison.measures.measure import Distance, Measured, measure
from trueup.comparison.verdict.align import align
from trueup.foundation.words.reasons import in_words
from verdict.captures import Array, Recording, Slot, no_payload, normal

FLOATS = st.sampled_from([np.float16, np.float32, np.float64, ml_dtypes.bfloat16])


def measured(baseline: Any, candidate: Any, parts: str = "stats digest", **call: Any) -> Measured:
    """Measure one call with ``output.0`` given, from the parts kept of it."""
    runs = Recording(parts=parts), Recording(parts=parts)
    for run, tensor in zip(runs, (baseline, candidate), strict=True):
        run.call("aten::mm", [], [tensor], **call)
    first, second = (run.stream() for run in runs)
    for stream in (first, second):
        stream.has_payload[:] = "tensor" in parts
        stream.places = lambda slots: [("segment", "key", None)] * len(slots)  # type: ignore[method-assign]
    payloads = (lambda *_: np.asarray(baseline).reshape(-1)), (lambda *_: np.asarray(candidate).reshape(-1))
    return measure(align(first, second), first, second, payloads).measured(0)


def error(baseline: Any, candidate: Any, parts: str = "stats digest") -> Distance:
    return measured(baseline, candidate, parts).slots["output.0"]


def reals(array: Array) -> Array:
    return array.view(array.real.dtype).astype(np.float64) if array.dtype.kind == "c" else array.astype(np.float64)


def test_equal_digests_are_bitwise_equal() -> None:
    found = error(normal(7), normal(7))
    assert (found.low, found.kind, found.relative) == (0.0, "digest", 0.0)


@settings(max_examples=60, deadline=None)
@given(FLOATS, st.integers(1, 2000), st.floats(1e-6, 2.0), st.integers(0, 5), st.sampled_from(["stats digest", "tensor"]))
def test_distance_is_that_of_the_oracle(dtype: Any, size: int, relative: float, seed: int, parts: str) -> None:
    baseline = normal(size, seed=seed, dtype=dtype)
    candidate = (reals(baseline) + relative * normal(size, seed=seed + 9, dtype=np.float64)).astype(dtype)
    true = float(np.linalg.norm(reals(candidate) - reals(baseline)))
    norm = float(np.linalg.norm(reals(baseline)))
    found = error(baseline, candidate, parts)
    assert found.norm == pytest.approx(norm, rel=1e-12)
    exact = parts == "tensor" or size <= 64
    assert found.low == pytest.approx(true, rel=1e-9 if exact else 0.6, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)), st.integers(0, 39))
def test_non_finite_values_elsewhere_are_infinitely_far(values: Array, position: int) -> None:
    other = values.copy()
    k = position % len(values)
    other[k] = np.float32(0) if not math.isfinite(values[k]) else np.float32(np.nan)
    for parts in ("stats digest", "stats", "tensor"):
        found = error(values, other, parts)
        assert found.low == math.inf
        assert "NaN or Inf" in in_words(found.why)


def test_nan_in_different_places_is_found_in_tensors_and_sketches() -> None:
    first, second = normal(50), normal(50)
    first[3] = second[4] = np.nan
    assert in_words(error(first, second, "tensor").why) == "NaN or Inf in different places"
    assert error(first, second).low > 0


@pytest.mark.parametrize("parts", ["stats", "stats digest", "tensor"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_non_finite_values_in_the_same_places_are_no_difference(dtype: Any, parts: str) -> None:
    first = normal(50, dtype=dtype)
    first[[3, 7]] = np.nan, np.inf
    second = first.copy()
    assert error(first, second, parts).low == 0
    second[5] += np.float32(0.5)
    assert error(first, second, parts).low == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("parts", ["stats", "tensor"])
def test_nothing_finite(parts: str) -> None:
    nothing = np.full(5, np.nan, np.float32)
    assert error(nothing, nothing.copy(), parts).relative == 0
    assert error(nothing, normal(5), parts).relative == math.inf


@pytest.mark.parametrize("parts", ["stats digest", "stats digest tensor"])
def test_masks_of_the_largest_number_are_counted_and_have_places(parts: str) -> None:
    """Norms and sketches leave them out, and a causal mask is of nothing else."""
    lowest = np.finfo(np.float32).min
    mask = np.triu(np.full((6, 6), lowest, np.float32), 1)
    wrong, moved = mask.copy(), mask.copy()
    wrong[0, 5] = 0
    moved[0, 5], moved[5, 0] = 0, lowest
    assert error(mask, mask.copy(), parts).low == 0
    assert error(mask, wrong, parts).low == math.inf
    assert error(mask, moved, parts).low == math.inf
    half = np.array([65504.0, 1.0], np.float16)  # no mask: a number like others
    assert error(half, half * np.float16(0.5), parts).relative == pytest.approx(0.5)


@pytest.mark.parametrize("parts", ["stats", "tensor"])
def test_zero_norm(parts: str) -> None:
    zero = np.zeros(5, np.float32)
    assert error(zero, -zero, parts).relative == 0
    assert error(zero, normal(5), parts).relative == math.inf
    assert error(normal(5), zero, parts).relative == pytest.approx(1.0)


@pytest.mark.parametrize("parts", ["stats", "tensor"])
def test_scalars_and_empty_tensors(parts: str) -> None:
    assert error(np.float32(2.0).reshape(()), np.float32(1.0).reshape(()), parts).relative == 0.5
    assert error(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), parts).relative == 0


@pytest.mark.parametrize("parts", ["stats digest", "tensor"])
def test_integers_and_bools_by_value(parts: str) -> None:
    assert error(np.array([3, 4]), np.array([3, 5]), parts).relative == pytest.approx(0.2)
    assert error(np.array([True, False, True]), np.array([True, True, True]), parts).low == 1.0


@pytest.mark.parametrize("parts", ["stats digest", "tensor"])
def test_integers_beyond_the_digits_of_a_double_are_not_equal(parts: str) -> None:
    assert error(np.array([2**53]), np.array([2**53 + 1]), parts).low >= 1


def test_a_swap_that_the_sketch_cannot_see_is_not_equal() -> None:
    mask = np.zeros(4096, np.int64)
    mask[:64] = 1
    swapped = next(
        other
        for row in range(1, 64)
        if error(mask, other := np.roll(mask, 64 * row), "stats").low == 0
        or row == 63
    )
    assert error(mask, swapped).low > 0


def test_complex_values_are_two_reals() -> None:
    first = normal(20, dtype=np.complex64)
    second = first + np.complex64(0.25j)
    for parts in ("stats", "tensor"):
        assert error(first, second, parts).low == pytest.approx(0.25 * math.sqrt(20), rel=1e-5)


def test_complex_norms_do_not_overflow_their_dtype() -> None:
    large = np.full(4, 1e30 + 1e30j, np.complex64)
    assert error(large, large * np.complex64(2), "tensor").relative == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("parts", ["stats digest", "tensor"])
def test_other_dtypes_are_measured_by_value(parts: str) -> None:
    exact = np.arange(8).astype(np.float32)
    assert error(exact, exact.astype(ml_dtypes.bfloat16), parts).low == 0
    rounded = normal(500)
    assert 1e-4 < error(rounded, rounded.astype(ml_dtypes.bfloat16), parts).relative < 2**-8


def test_digests_of_other_dtypes_say_nothing() -> None:
    found = error(normal(5), normal(5).astype(np.float64), "digest")
    assert math.isnan(found.low)
    assert in_words(found.why) == "dtypes differ (float32 and float64) and only digests were recorded"


def test_digests_alone_tell_that_and_not_how_much() -> None:
    found = error(normal(5), normal(5, seed=1), "digest")
    assert (found.low, found.kind) == (math.inf, "digest")
    assert in_words(found.why) == "digests differ; how much is not recorded"


@pytest.mark.parametrize("parts", ["stats digest", "tensor", "digest"])
def test_other_shapes_are_not_measured(parts: str) -> None:
    for other in (normal(5, 2), normal(3, 2)):
        found = error(normal(2, 5), other, parts)
        assert math.isnan(found.relative)
        assert in_words(found.why) == f"shapes differ: (2, 5) and {other.shape}"


def test_sizes_of_one_do_not_matter() -> None:
    assert error(normal(1, 5), normal(5)).low == 0
    assert error(normal(1).reshape(()), normal(1)).low == 0


@pytest.mark.parametrize(("first", "second"), [("stats", "digest"), ("", "stats digest"), ("digest", "stats"), ("", "")])
def test_nothing_in_common_is_not_measured(first: str, second: str) -> None:
    found = error(Slot(normal(5), first), Slot(normal(5), second))
    assert math.isnan(found.low)
    assert (found.kind, in_words(found.why)) == ("none", "no statistics on both sides")


def test_a_sum_beyond_float64_is_not_measured() -> None:
    huge = np.full(4096, 1.5e308)
    found = error(huge, huge / 2, "stats")
    assert math.isnan(found.low)
    assert in_words(found.why) == "a sum of the sketch left the range of float64; capture with detail tensor"


def test_one_sided_slots_and_arguments() -> None:
    runs = Recording(), Recording()
    runs[0].call("aten::addmm", {"input.0": normal(2), "input.bias": normal(2)}, [normal(2)], arguments={"alpha": 1})
    runs[1].call("aten::addmm", {"input.0": normal(2)}, [normal(2)], arguments={"alpha": 2})
    streams = runs[0].stream(), runs[1].stream()
    found = measure(align(*streams), *streams, (no_payload, no_payload)).measured(0)
    assert found.one_sided == ("input.bias",)
    assert found.arguments == ('{"alpha": 1}', '{"alpha": 2}')


@pytest.mark.parametrize("imported", [False, True])
def test_what_a_function_writes_beside_its_results_is_in_no_dump(imported: bool) -> None:
    runs, inputs = (Recording(), Recording()), {"input.0": normal(2)}
    runs[0].call("torch.batch_norm", inputs, {"output.0": normal(2), "output.running_mean": normal(2)}, level="api")
    runs[1].call("torch.batch_norm", inputs, {"output.0": normal(2)}, level="api")
    streams = runs[0].stream(), runs[1].stream()
    streams[1].imported = imported
    found = measure(align(*streams), *streams, (no_payload, no_payload)).measured(0)
    assert found.one_sided == (() if imported else ("output.running_mean",))


def test_equal_arguments_leave_nothing() -> None:
    found = measured(normal(2), normal(2), arguments={"dim": 1})
    assert (found.arguments, found.one_sided) == (None, ())
