"""Sketches where they lie, in several chunks, some of them null; and read part by part."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from trueup.foundation.kernels import distance
from trueup.foundation.model import LANES
from trueup.foundation.store import Piece
from trueup.foundation.store.read_ahead import Column, Parts, SideBySide, Sketches
from trueup.foundation.store.schema import RECORDS, read_sketches, stored_sketches


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
        monkeypatch.setattr("trueup.foundation.kernels.sketch.native", lambda: None)
    random = np.random.default_rng(3)
    matrices = [random.standard_normal((3000, LANES)) * 10.0 ** random.integers(-200, 150, (3000, 1)) for _ in range(2)]
    matrices[1][:40] = matrices[0][:40]  # equal
    matrices[1][40:60] = matrices[0][40:60] * (1 + 1e-12)  # squares that underflow, or cancel
    matrices[0][60, 5], matrices[1][61, 5] = np.nan, np.inf  # lanes that left float64
    matrices[0][62], matrices[1][62] = 1e200, -1e200  # squares that overflow
    absent = [random.random(3000) < 0.1 for _ in range(2)]
    baseline, candidate = (Sketches(Column(column(m, a, n))) for m, a, n in zip(matrices, absent, (4, 3), strict=True))
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
    np.testing.assert_array_equal(Sketches(Column(again))[np.arange(50)], Sketches(Column(listed))[np.arange(50)])
    none = pa.chunked_array([pa.nulls(4, listed.type)])
    assert read_sketches(stored_sketches(none)).null_count == 4


def in_parts(matrix: np.ndarray, absent: np.ndarray, count: int) -> tuple[Parts, pa.ChunkedArray]:
    """The same sketches in parts of unequal sizes, and as a column."""
    edges = np.r_[0, np.sort(np.random.default_rng(count).choice(np.arange(1, len(matrix)), count - 1, replace=False)), len(matrix)]

    def piece(start: int, stop: int) -> Piece:
        held = matrix[start:stop][~absent[start:stop]]

        def read(into: np.ndarray | None) -> np.ndarray:
            if into is None:
                return held.copy()
            into[: len(held)] = held
            return into[: len(held)]

        return Piece(stop - start, len(held), read, lambda: held.view(np.uint8).reshape(-1, 8 * LANES))

    pieces = [piece(*edge) for edge in pairwise(edges.tolist())]
    return Parts(pieces, ~absent), column(matrix, absent, 1)


@pytest.mark.parametrize("window", [(0, None), (130, 1700)])
@pytest.mark.parametrize("beside", [True, False])
def test_parts_give_what_the_column_gives(beside: bool, window: tuple[int, int | None]) -> None:
    random = np.random.default_rng(7)
    first = random.standard_normal((2000, LANES))
    matrices, absent = [first, first * (1 + 1e-3 * random.standard_normal((2000, LANES)))], random.random(2000) < 0.1
    matrices[1][:50] = first[:50]
    (one, two), columns = zip(*(in_parts(m, absent, n) for m, n in zip(matrices, (9, 7), strict=True)), strict=True)
    with ThreadPoolExecutor(2) as pool:
        running = SideBySide(one, two, pool) if beside else None
    baseline, candidate = Sketches(one, running, *window), Sketches(two, None, *window)
    count = 2000 if window[1] is None else window[1] - window[0]
    plain = [Sketches(Column(c), None, *window) for c in columns]
    k, j = random.integers(0, count, (2, 3000))
    k[:1500] = j[:1500]
    np.testing.assert_array_equal(baseline.distances(k, candidate, j), plain[0].distances(k, plain[1], j))
    np.testing.assert_array_equal(baseline[k], plain[0][k])
    np.testing.assert_array_equal(candidate[3], plain[1][3])
    rows = np.where(absent[:, None], np.nan, matrices[0])[slice(*window)]
    np.testing.assert_array_equal(baseline[np.arange(count)], rows)
    assert len(baseline) == count


@pytest.mark.parametrize("what", ["damaged", "of fewer"])
def test_a_part_that_is_not_what_it_was_costs_its_own_sketches(what: str) -> None:
    matrix, absent = np.random.default_rng(8).standard_normal((600, LANES)), np.zeros(600, bool)
    parts, _ = in_parts(matrix, absent, 3)
    start, stop = parts.starts[1:3].tolist()
    lanes = None if what == "damaged" else matrix[start : stop - 1]
    parts._pieces[1] = Piece(stop - start, stop - start, lambda into: lanes, lambda: lanes)
    assert np.isnan(parts[1].taken(np.arange(stop - start))).all()
    found = Sketches(parts)[np.arange(600)]
    assert np.isnan(found[start:stop]).all()
    np.testing.assert_array_equal(np.delete(found, np.s_[start:stop], 0), np.delete(matrix, np.s_[start:stop], 0))
