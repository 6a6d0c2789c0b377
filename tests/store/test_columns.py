"""Columns of records as arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trueup.foundation.store.columns import COUNTABLE, counts, distinct


@pytest.mark.parametrize("numbers", [[], [3], [2, 2, 2], [5, -1, 5, 0, -1], [[2, 1], [1, 2]]])
def test_distinct_numbers_are_those_of_numpy(numbers: list[int]) -> None:
    found = distinct(np.array(numbers, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == np.unique(np.array(numbers, np.int64)).tolist()


def test_the_largest_count_is_one_and_what_lies_beyond_is_none() -> None:
    largest = int(COUNTABLE)
    found = counts(pa.chunked_array([[0, largest], [largest + 2, -1, None]], pa.int64()))
    assert found[:2].tolist() == [0, largest]
    assert np.isnan(found[2:]).all()
