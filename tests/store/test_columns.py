"""Columns of records as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from trueup.foundation.store.columns import distinct


@pytest.mark.parametrize("numbers", [[], [3], [2, 2, 2], [5, -1, 5, 0, -1], [[2, 1], [1, 2]]])
def test_distinct_numbers_are_those_of_numpy(numbers: list[int]) -> None:
    found = distinct(np.array(numbers, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == np.unique(np.array(numbers, np.int64)).tolist()
