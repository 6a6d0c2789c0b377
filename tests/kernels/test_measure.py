"""The entrance by address: any strides, any size, any number of threads, and the digest on the way."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trueup.foundation.kernels import KINDS, _compiled
from trueup.foundation.model import NUMBERS, PACKED

_native = pytest.importorskip("trueup.foundation.kernels._native", reason="the compiled kernel was not built")
torch = pytest.importorskip("torch", reason="its OpenMP team is the one that works")

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def team() -> Iterator[None]:
    """A team of three, so that `threads` up to 3 means what it says."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def measured(array: np.ndarray, threads: int = 1) -> tuple[np.ndarray, int | None]:
    out = np.full(PACKED, 7.0)
    return out, _compiled.measure(array, out, digest=True, threads=threads)


def same(a: tuple[np.ndarray, int | None], b: tuple[np.ndarray, int | None]) -> None:
    np.testing.assert_array_equal(a[0].view(np.uint64), b[0].view(np.uint64))  # to the bit
    assert a[1] == b[1]


def by_address(pointer: int, kind: str, size: int, stride: int, threads: int = 1) -> tuple[np.ndarray, int]:
    out = np.full(PACKED, 7.0)
    return out, _native.measure(pointer, KINDS[kind], (size,), (stride,), out.ctypes.data, threads)


def named(out: np.ndarray) -> dict[str, float]:
    return dict(zip(NUMBERS, out.tolist(), strict=False))


def test_digest_of_every_length_up_to_4096(instructions: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    for size in range(4097):
        expected = xxhash.xxh3_64_intdigest(raw[:size].tobytes())
        assert _native.measure(raw.ctypes.data, KINDS["uint8"], (size,), (1,), 0, 1) == expected, size


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_digest_of_large_sizes(instructions: str, threads: int) -> None:
    generator = np.random.default_rng(threads)
    for size in (*generator.integers(4096, 3 * MEGABYTE, 12).tolist(), MEGABYTE, MEGABYTE + 1, 2 * MEGABYTE - 1):
        raw = generator.integers(0, 256, size, np.uint8)
        out, digest = measured(raw, threads)
        assert digest == xxhash.xxh3_64_intdigest(raw), size
        assert named(out)["n_zero"] == np.count_nonzero(raw == 0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_strides(instructions: str, data: st.DataObject) -> None:
    """Permuted, sliced, reversed, expanded: as a copy in logical order would be, to the bit."""
    dtype = data.draw(st.sampled_from(["int8", "float16", "float32", "float64", "complex64", "complex128", "bool"]))
    shape = data.draw(st.lists(st.integers(0, 12), max_size=4))
    array = (np.random.default_rng(len(shape)).standard_normal(shape) * 3).astype(dtype)
    view = array.transpose(data.draw(st.permutations(range(len(shape)))))
    view = view[tuple(slice(None, None, data.draw(st.sampled_from([1, 1, -1, 2, -3]))) for _ in shape)]
    if data.draw(st.booleans()):
        view = np.broadcast_to(view[..., None, :] if shape else view, (*view.shape[:-1], 5, *view.shape[-1:]))
    same(measured(view), measured(view.copy(order="C")))


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64", "complex128"])
def test_large_views(dtype: str) -> None:
    """Views of many pieces: a transposed matrix, channels last, every third column, odd rows, one row repeated."""
    array = (np.random.default_rng(0).standard_normal((37, 61, 67)) * 50).astype(dtype)
    for view in (array.T, array.transpose(0, 2, 1), array[:, ::2], array[:, :, 1::3], array[:, :, :66], array[::-1],
                 np.broadcast_to(array[3], (5, 61, 67))):  # fmt: skip
        for threads in (1, 2):
            same(measured(view, threads), measured(view.copy(order="C"), threads))


def test_fields_of_records_are_copied() -> None:
    records = np.zeros(100, np.dtype([("a", "i1"), ("b", "f4"), ("c", "i1")]))
    records["b"] = np.arange(100)
    same(measured(records["b"]), measured(records["b"].copy()))


def test_complex32_is_pairs_of_float16() -> None:
    pairs = np.arange(40, dtype=np.float16)
    same(by_address(pairs.ctypes.data, "complex32", 20, 1), by_address(pairs.ctypes.data, "float16", 40, 1))
    evens = pairs.reshape(20, 2)[::2].copy()
    same(by_address(pairs.ctypes.data, "complex32", 10, 2), by_address(evens.ctypes.data, "float16", 20, 1))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16, "int8", "int64", ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("size", [MEGABYTE + 1, 40 * 32768, 40 * 32768 + 512 * 3 + 7])
def test_threads_change_no_bit(instructions: str, dtype: object, size: int) -> None:
    array = (np.random.default_rng(size).standard_normal(size) * 9).astype(dtype)
    one = measured(array)
    assert one[1] == xxhash.xxh3_64_intdigest(array.view(np.uint8))
    for threads in (2, 3, 64):
        for _ in range(3):
            same(measured(array, threads), one)


def test_threads_with_masks_and_huge_numbers() -> None:
    array = np.random.default_rng(0).standard_normal(400_000)
    array[::3] = np.finfo(np.float64).max
    array[1::7], array[5::5001] = np.nan, -1e300
    one = measured(array)
    for threads in (2, 3):
        same(measured(array, threads), one)
    kept = array[np.isfinite(array) & (array != np.finfo(np.float64).max)]
    got = named(one[0])
    assert got["l2"] == pytest.approx(1e300 * np.sqrt(np.count_nonzero(kept == -1e300)), rel=1e-14)
    assert got["mean"] == pytest.approx(-1e300 * (np.count_nonzero(kept == -1e300) / kept.size), rel=1e-14)
    assert got["n_saturated"] == np.count_nonzero(array == np.finfo(np.float64).max)


def test_a_mask_of_bfloat16_hides_nothing_in_float32() -> None:
    """The softmax of a bfloat16 model casts its scores and their masks to float32."""
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    expected = named(measured(array)[0])["l2"]
    hidden = array[::3].astype(np.float64)
    array[::3] = -np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    got = named(measured(array)[0])
    assert got["n_saturated"] == len(hidden)
    assert got["l2"] == pytest.approx(math.sqrt(expected**2 - np.sum(hidden**2)), rel=1e-6)


def test_python_threads_do_not_mix() -> None:
    arrays = [np.random.default_rng(k).standard_normal(400_000).astype(np.float32) for k in range(4)]
    wanted = [measured(array) for array in arrays]
    right: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            same(measured(arrays[k], threads=1 + k % 2), wanted[k])
        right.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(right) == [0, 1, 2, 3]


TEAM = """
import os, torch
from trueup.foundation.kernels import KINDS, native
count = lambda: len(os.listdir("/proc/self/task"))
x, out = torch.empty(4_000_000), torch.empty(74, dtype=torch.float64)  # filling them would start the team
torch.set_num_threads(3)
before = count()
measure = lambda threads: native().measure(x.data_ptr(), KINDS["float32"], x.shape, x.stride(), out.data_ptr(), threads)
for threads in (1, 3, 3):
    measure(threads)
    print(count() - before, end=" ")
torch.mm(torch.ones(600, 600), torch.ones(600, 600)), x.exp_()
print(count() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_the_team_is_that_of_torch() -> None:
    """One thread alone starts none; three start a team's other two; torch then works with these, and starts none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", TEAM]
    assert subprocess.check_output(command, env=environment, text=True).split() == ["0", "2", "2", "2"]


def test_a_forked_child_works_alone() -> None:
    """The team did not come along: waiting for it would never end."""
    array = np.random.default_rng(0).standard_normal(400_000)
    wanted = measured(array, threads=2)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        got = measured(array, threads=2)
        os._exit(0 if got[1] == wanted[1] and np.array_equal(got[0], wanted[0]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_flushing_of_subnormals_changes_nothing() -> None:
    array = np.full(600_000, 1e-40, np.float32)
    before = measured(array, threads=2)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("not on this processor")
        same(measured(array, threads=2), before)
        same(measured(array[:70]), measured(array[:70].copy()))
        assert np.float32(1e-40) * np.float32(1.0) == 0.0  # the caller's mode is as it was
    finally:
        torch.set_flush_denormal(False)
    assert named(before[0])["n_subnormal"] == array.size
    assert named(before[0])["max"] == np.float32(1e-40)


def test_more_than_four_gigabytes_without_the_memory() -> None:
    """2**32 + 5 elements of one byte by stride 0: sizes are 64 bits wide, memory is not taken in proportion."""
    one, count = np.array([3], np.int8), 2**32 + 5
    out, _ = by_address(one.ctypes.data, "int8", count, 0, threads=2)
    got = named(out)
    assert got["mean"] == got["max"] == 3.0
    assert got["l2"] == pytest.approx(3.0 * count**0.5, rel=1e-13)


def test_elements_beyond_two_to_the_32_keep_their_place() -> None:
    """Offsets do not wrap: a view whose last element lies 6 GB behind its first, in memory that is only reserved."""
    reserved = np.zeros(6 * 2**30, np.uint8)  # never touched but at its ends: the system gives pages on first use
    reserved[0], reserved[-1] = 1, 2
    step = reserved.size - 1
    out, digest = by_address(reserved.ctypes.data, "uint8", 2, step)
    assert named(out)["max"] == 2.0
    assert digest == xxhash.xxh3_64_intdigest(bytes([1, 2]))
    out, digest = by_address(reserved.ctypes.data + step, "uint8", 2, -step)
    assert digest == xxhash.xxh3_64_intdigest(bytes([2, 1]))
