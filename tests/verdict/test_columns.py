"""Columns of records as arrays: sketches where they lie, in several chunks, some of them null."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trueup.kernels import distance
from trueup.model import LANES
from trueup.store.schema import RECORDS, read_sketches, stored_sketches
from trueup.verdict.columns import Sketches


def column(matrix: np.ndarray, absent: np.ndarray, chunks: int) -> pa.ChunkedArray:
    """A sketch column in several chunks, one of them a slice of a longer array."""
    found = []
    for rows in np.array_split(np.arange(len(matrix)), chunks):
        padded = np.concatenate([np.full((3, LANES), 7.0), matrix[rows]])
        mask = pa.array(np.r_[np.zeros(3, bool), absent[rows]])
        found.append(pa.FixedSizeListArray.from_arrays(pa.array(padded.ravel()), LANES, mask=mask).slice(3))
    return pa.chunked_array(found, RECORDS.field("sketch").type)


@pytest.mark.parametrize("native", [True, False])
def test_distances_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr("trueup.kernels.sketch.native", lambda: None)
    random = np.random.default_rng(3)
    matrices = [random.standard_normal((3000, LANES)) * 10.0 ** random.integers(-200, 150, (3000, 1)) for _ in range(2)]
    matrices[1][:40] = matrices[0][:40]  # equal
    matrices[1][40:60] = matrices[0][40:60] * (1 + 1e-12)  # squares that underflow, or cancel
    matrices[0][60, 5], matrices[1][61, 5] = np.nan, np.inf  # lanes that left float64
    matrices[0][62], matrices[1][62] = 1e200, -1e200  # squares that overflow
    absent = [random.random(3000) < 0.1 for _ in range(2)]
    baseline, candidate = (Sketches(column(m, a, n)) for m, a, n in zip(matrices, absent, (4, 3), strict=True))
    k, j = random.integers(0, 3000, (2, 5000))
    k[:3000], j[:3000] = np.arange(3000), np.arange(3000)
    expected = distance(*(np.where(a[at, None], np.nan, m[at]) for m, a, at in zip(matrices, absent, (k, j), strict=True)))
    found = baseline.distances(k, candidate, j)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    assert np.isnan(found[absent[0][k] | absent[1][j]]).all()
    assert (found[:40][~(absent[0] | absent[1])[:40]] == 0).all()
    np.testing.assert_array_equal(baseline[k[:70]], np.where(absent[0][k[:70], None], np.nan, matrices[0][k[:70]]))


def test_sketches_come_back_from_512_bytes() -> None:
    matrix = np.random.default_rng(4).standard_normal((50, LANES))
    matrix[3, 9] = np.nan
    absent = np.arange(50) % 7 == 0
    listed = column(matrix, absent, 3)
    stored = stored_sketches(listed)
    assert stored.type == pa.binary(512)
    assert stored[1].as_py() == matrix[1].astype("<f8").tobytes()
    again = read_sketches(stored)
    assert again.type == listed.type
    np.testing.assert_array_equal(Sketches(again)[np.arange(50)], Sketches(listed)[np.arange(50)])
    none = pa.chunked_array([pa.nulls(4, listed.type)])
    assert read_sketches(stored_sketches(none)).null_count == 4
