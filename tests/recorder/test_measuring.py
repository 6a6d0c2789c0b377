"""Statistics of host memory: the compiled kernel on an address and NumPy give the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trueup.foundation import kernels
from trueup.recording.recorder import rows
from trueup.recording.recorder.rows import Statistics

RNG = np.random.default_rng(0)
ARRAYS = {
    "plain": RNG.standard_normal((3, 5)).astype(np.float32),
    "transposed": RNG.standard_normal((4, 6)).T,
    "bfloat16": RNG.standard_normal(7).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.float32),
}


def measured(array: np.ndarray, detail: str, *, kind: int | None) -> Statistics:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return rows.measure(array.__array_interface__["data"][0], kind, array.shape, strides, lambda: array, detail)


@pytest.mark.skipif(kernels.native() is None, reason="the compiled kernel was not built")
@pytest.mark.parametrize("detail", ["digest", "stats", "tensor"])
@pytest.mark.parametrize("name", ARRAYS)
def test_both_ways_give_the_same(name: str, detail: str) -> None:
    array = ARRAYS[name]
    fast, slow = measured(array, detail, kind=kernels.KINDS[array.dtype.name]), measured(array, detail, kind=None)
    assert fast.digest == slow.digest
    assert (fast.data is array, slow.data is array) == (detail == "tensor",) * 2
    assert (fast.values is None, slow.values is None) == (detail == "digest",) * 2
    if detail != "digest":
        np.testing.assert_allclose(*(np.frombuffer(bytes(each.values)) for each in (fast, slow)), rtol=1e-12)


def test_a_view_shows_memory_and_keeps_its_owner() -> None:
    owner = np.arange(12, dtype=np.int32)
    view = rows.view(owner, owner.__array_interface__["data"][0] + 4, (2, 3), (6, 2), owner.dtype)
    assert view.tolist() == [[1, 3, 5], [7, 9, 11]]
    assert not view.flags.writeable
    owner[1] = 99
    assert view[0, 0] == 99
