"""Copies are NumPy's, byte for byte, whatever the dtype, the strides and the size."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trueup.foundation import kernels
from trueup.foundation.kernels import _compiled

from . import oracle

native = pytest.importorskip("trueup.foundation.kernels._native", reason="the compiled kernel was not built")

DTYPES = [*oracle.DTYPES, np.dtype(ml_dtypes.float8_e4m3fn), np.dtype("i8,f8")]


@pytest.fixture(params=["native", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways take every array."""
    monkeypatch.setattr(_compiled, "PAST_CACHES", 0)
    if request.param == "numpy":
        monkeypatch.setattr(_compiled, "native", lambda: None)
    return str(request.param)


def random(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(size).integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8).view(dtype).reshape(shape)


def same(array: np.ndarray) -> None:
    """Copy into memory of any alignment, with a fence on both sides."""
    for shift in (0, array.itemsize):
        memory = np.full(array.nbytes + 256, 170, np.uint8)
        start = -memory.__array_interface__["data"][0] % 64 + shift
        out = memory[start : start + array.nbytes].view(array.dtype)
        kernels.copy(array, out)
        assert out.tobytes() == array.tobytes()
        assert set(memory[:start]) | set(memory[start + array.nbytes :]) == {170}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (63,), (4, 5, 6), (100_003,)], ids=str)
def test_every_dtype(way: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    same(random(shape, dtype))


@pytest.mark.parametrize("dtype", [np.dtype(kind) for kind in ("u1", "u2", "f4", "f8", "c16")], ids=str)
def test_large_views(way: str, dtype: np.dtype) -> None:
    array = random((37, 64, 129 + 16 // dtype.itemsize * 16), dtype)
    views = [
        array, array[:, ::2], array[::-1], array[:, :, ::-1], array[:, :, 1:-1], array.T, array.transpose(0, 2, 1),
        array.transpose(2, 0, 1), array[3:5], array.reshape(-1)[1:], np.broadcast_to(array[:1, :, :1], array.shape),
    ]  # fmt: skip
    for view in views:
        same(view)


@pytest.mark.parametrize("shape", [(16, 16), (4, 33), (20, 37), (1000, 300), (4096, 24), (6, 512, 36), (7, 129)])
def test_transposed_words(way: str, shape: tuple[int, ...]) -> None:
    """Elements of four bytes are transposed by lines, what is left of a line by four or one by one."""
    whole = np.random.default_rng(5).integers(0, 1 << 32, (*shape[:-1], shape[-1] + 3), np.uint32)
    for array in (whole[..., :-3], whole[..., 3:].view("f4")):  # NaN keeps its bits
        same(array.swapaxes(-1, -2))
        assert kernels.digest(array.swapaxes(-1, -2)) == xxhash.xxh3_64_intdigest(array.swapaxes(-1, -2).tobytes())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_strides(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["u1", "i2", "u4", "i8", "c16"]))
    array = data.draw(hnp.arrays(dtype, hnp.array_shapes(max_dims=4, max_side=9)))
    view = array[data.draw(hnp.basic_indices(array.shape, allow_ellipsis=True))]
    view = np.asarray(view).transpose(data.draw(st.permutations(range(np.ndim(view)))))
    out = np.empty(view.nbytes, np.uint8)
    start, to = (each.__array_interface__["data"][0] for each in (view, out))
    native.copy(start, view.itemsize, view.shape, view.strides, to)
    assert out.tobytes() == view.tobytes()


def test_elements_need_not_be_aligned(way: str) -> None:
    same(random((90_000,), np.dtype("u1"))[1:80_001].view("f8"))
    same(np.zeros(9000, np.dtype([("a", "u1"), ("b", "f8")]))["b"])


def test_what_does_not_fit_is_refused() -> None:
    for out in (np.empty(3, np.float64), np.empty(4, np.float32), np.empty(6, np.float32)[::2], np.empty((1, 3), np.float32)):
        with pytest.raises(ValueError, match="expected a row of 3 float32"):
            kernels.copy(np.zeros(3, np.float32), out)
    with pytest.raises(ValueError, match="expected a row"):
        kernels.copy(np.zeros(3, object), np.zeros(3, object))
    with pytest.raises(ValueError, match="1, 2, 4, 8 or 16 bytes, got 3"):
        native.copy(0, 3, (0,), (3,), 0)
    with pytest.raises(ValueError, match="a stride for each"):
        native.copy(0, 4, (1, 1), (4,), 0)
    with pytest.raises(TypeError, match="copy"):
        native.copy(0, 4, (1,), (4,))
