from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trueup.comparison.result import evidence
from trueup.comparison.result.evidence import WORST, compare_elements

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
PAIRS = st.integers(1, 60).flatmap(
    lambda n: st.tuples(hnp.arrays(np.float32, n, elements=FLOATS), hnp.arrays(np.float32, n, elements=FLOATS))
)


@settings(max_examples=150, deadline=None)
@given(PAIRS)
def test_against_numpy(pair: tuple[np.ndarray, np.ndarray]) -> None:  # type: ignore[type-arg]
    histogram, worst, _ = compare_elements("output.0", *pair)
    largest = float(np.finfo(np.float32).max)
    shown = [side.astype(np.float64)[np.abs(side.astype(np.float64)) < largest] for side in pair]
    if histogram is None:
        assert sum(map(len, shown)) == 0
    else:
        assert (sum(histogram.baseline), sum(histogram.candidate)) == tuple(map(len, shown))
        assert histogram.edges[0] <= min(side.min() for side in shown if len(side))
        assert histogram.edges[-1] >= max(side.max() for side in shown if len(side))
        assert all(np.diff(histogram.edges) > 0)
        for counts, side in zip((histogram.baseline, histogram.candidate), shown, strict=True):
            assert list(counts) == np.histogram(side, histogram.edges)[0].tolist()
    b, c = (side.astype(np.float64) for side in pair)
    differ = [k for k in range(len(b)) if not (b[k] == c[k] or (math.isnan(b[k]) and math.isnan(c[k])))]
    assert len(worst) == min(WORST, len(differ))
    gaps = [abs(c[k] - b[k]) if math.isfinite(c[k] - b[k]) else math.inf for k in differ]
    assert [abs(w.candidate - w.baseline) if math.isfinite(w.candidate - w.baseline) else math.inf for w in worst] == (
        sorted(gaps, reverse=True)[:WORST]
    )
    for element in worst:
        (k,) = element.index
        assert np.array_equal([element.baseline, element.candidate], [b[k], c[k]], equal_nan=True)


def test_chunks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    b = rng.normal(size=(7, 11, 13)).astype(np.float32)
    c = b + rng.normal(size=b.shape).astype(np.float32) * 1e-3
    whole = compare_elements("x", b, c)
    monkeypatch.setattr(evidence, "CHUNK", 17)
    assert compare_elements("x", b, c) == whole
    turned = np.ascontiguousarray(b.transpose(2, 0, 1)).transpose(1, 2, 0)
    assert not turned.flags.c_contiguous
    assert compare_elements("x", turned, c) == whole
    (worst,) = whole[1][:1]
    assert abs(c - b).argmax() == np.ravel_multi_index(worst.index, b.shape)


@pytest.mark.parametrize(
    ("baseline", "candidate", "dtypes", "ulps"),
    [
        (1.0, 1.0 + 2**-23, ("float32", "float32"), 1),
        (1.0, 1.0 - 2**-24, ("float32", "float32"), 0.5),
        (2.0, 3.0, ("float32", "float32"), 2**22),
        (1.0, 1.0 + 2**-23, ("float64", "float64"), 2**29),
        (1.0, 1.0078125, ("bfloat16", "bfloat16"), 1),
        (1.0, 1.0078125, ("float32", "bfloat16"), 1),
        (1.0, 1.0 + 2**-10, ("float16", "float32"), 1),
        (0.0, 1e-3, ("float32", "float32"), 1e-3 / 2**-33),
        (0.0, 2.0**-149, ("float32", "float32"), 1),
        (1.0, math.inf, ("float32", "float32"), math.nan),
        (3.0, 5.0, ("int64", "int64"), math.nan),
    ],
)  # fmt: skip
def test_units_in_the_last_place(baseline: float, candidate: float, dtypes: tuple[str, str], ulps: float) -> None:
    known = {"bfloat16": ml_dtypes.bfloat16}
    sides = [np.array([v]).astype(known.get(d, d)) for v, d in zip((baseline, candidate), dtypes, strict=True)]
    (worst,) = compare_elements("x", *sides)[1]
    assert worst.ulps == pytest.approx(ulps, rel=1e-5, nan_ok=True)


def test_masks_do_not_stretch_the_histogram() -> None:
    mask = np.full(1000, np.finfo(np.float32).min, np.float32)
    mask[:10] = np.linspace(-1, 1, 10)
    histogram, worst, notes = compare_elements("input.3", mask, mask.copy())
    assert histogram is not None
    assert (histogram.edges[0], histogram.edges[-1], sum(histogram.baseline)) == (-1.0, 1.0, 10)
    assert worst == []
    assert notes == ["input.3: 1,980 elements that are not finite, or the largest their dtype has, are not in the histogram"]


def test_of_a_large_tensor_a_part_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MOST", 100)
    b = np.zeros((40, 5))
    c = b.copy()
    c[30, 0], c[10, 0] = 9.0, 1.0
    histogram, worst, notes = compare_elements("x", b, c)
    assert [element.index for element in worst] == [(10, 0)]
    assert histogram is not None
    assert sum(histogram.candidate) == 100
    assert notes == ["x: of 200 elements the first 100 are shown"]


def test_complex_bool_integer_empty_and_scalar() -> None:
    b = np.array([[1 + 2j, 3 - 4j]], np.complex64)
    c = b.copy()
    c[0, 1] += 1j
    (worst,) = compare_elements("x", b, c)[1]
    assert (worst.index, worst.baseline, worst.candidate) == ((0, 1, 1), -4.0, -3.0)
    flags = np.array([True, False, True])
    assert [w.index for w in compare_elements("x", flags, ~flags)[1]] == [(0,), (1,), (2,)]
    empty = np.empty((0, 3), np.float32)
    assert compare_elements("x", empty, empty) == (None, [], [])
    (worst,) = compare_elements("x", np.float32(2).reshape(()), np.float32(2.5).reshape(()))[1]
    assert worst.index == ()
    wide = np.array([-1.7e308, 1.7e308])
    assert compare_elements("x", wide, wide)[0] is not None
