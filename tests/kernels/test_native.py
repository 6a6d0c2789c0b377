"""The compiled kernel gives the twin's numbers, in every instruction set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trueup.kernels import _compiled, _twin
from trueup.model import NUMBERS, PACKED

from . import oracle
from .test_summarize import close, values_of

_native = pytest.importorskip("trueup.kernels._native", reason="the compiled kernel was not built")

EXACT = [k for k, name in enumerate(NUMBERS) if name not in ("mean", "l2")]
SETS = ["plain", "avx2", "avx512"]


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.target(None)
    try:
        _native.target(request.param)
    except ValueError:
        pytest.skip("not on this processor")
    yield request.param
    _native.target(before)


def both(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    native, twin = np.full(PACKED, 7.0), np.full(PACKED, 8.0)
    kind, reals = _compiled.KINDS[array.dtype], array.size * (2 if array.dtype.kind == "c" else 1)
    assert _native.summarize(array.ctypes.data, reals, kind, native.ctypes.data)
    _twin.summarize(array, twin)
    return native, twin


def agree(array: np.ndarray) -> None:
    """Counts and extremes equal; sums within the bound of docs/format.md, 1e-13 of the magnitudes that entered."""
    native, twin = both(array)
    with np.errstate(all="ignore"):
        values = array.astype(np.float64)
        magnitude = np.abs(values, where=np.isfinite(values), out=np.zeros_like(values)).sum()
    np.testing.assert_array_equal(native[EXACT], twin[EXACT])
    np.testing.assert_allclose(native[2:4], twin[2:4], rtol=1e-13, atol=1e-15 * magnitude)
    np.testing.assert_allclose(native[len(NUMBERS) :], twin[len(NUMBERS) :], rtol=0, atol=1e-13 * magnitude)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 511, 512, 513, 1024, 5000, 100_003])
def test_edges(instructions: str, dtype: object, size: int) -> None:
    generator = np.random.default_rng(size)
    array = generator.standard_normal(size).astype(dtype)
    agree(array)
    agree(np.abs(array) + array.dtype.type(1))  # zeros that pad the last group are not the least
    agree(-np.abs(array) - array.dtype.type(1))
    largest = 1e100 if array.dtype == np.float64 else float(ml_dtypes.finfo(array.dtype).max)
    with np.errstate(all="ignore"):
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 6e-8, largest, -largest]).astype(dtype)
    for every in (3, 700):
        places = np.flatnonzero(generator.integers(0, every, size) == 0)
        array[places] = special[generator.integers(0, special.size, places.size)]
        agree(array)


@pytest.mark.parametrize("dtype", [d for d in oracle.DTYPES if d in _compiled.KINDS], ids=str)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_bit_pattern(instructions: str, dtype: np.dtype, data: st.DataObject) -> None:
    array = data.draw(values_of(dtype))
    out = np.empty(PACKED)
    with np.errstate(all="ignore"):
        if _compiled.summarize(array, out):
            close(out, oracle.summary(array), array)


@pytest.mark.parametrize("value", [1.7e308, 1e-300, 5e-324])
def test_huge_and_tiny_are_left_to_the_twin(value: float) -> None:
    out = np.empty(PACKED)
    assert not _compiled.summarize(np.full(600, value), out)
    assert not _compiled.summarize(np.full(600, 1, np.int8), out)
    assert _compiled.summarize(np.full(600, 1.0), out)


def test_threads_do_not_mix() -> None:
    arrays = [np.random.default_rng(k).standard_normal(50_000).astype(np.float32) for k in range(4)]
    wanted = [both(array)[0] for array in arrays]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            if not np.array_equal(both(arrays[k])[0], wanted[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_wrong_arguments_raise() -> None:
    with pytest.raises(TypeError, match="summarize"):
        _native.summarize(0, 0)
    with pytest.raises(ValueError, match="no such size or kind"):
        _native.summarize(0, -1, 0, 0)
    with pytest.raises(ValueError, match="no such instruction set"):
        _native.target("mmx")


SWITCH = """
import sys, warnings
import numpy as np
if {hide}:
    sys.modules["trueup.kernels._native"] = None
from trueup.kernels import _compiled, summarize
out = np.empty(74)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        summarize(np.ones(4, np.float32), out)
print(_compiled.native() is None, [str(w.message)[:47] for w in caught], out[3])
"""


@pytest.mark.parametrize(
    ("hide", "switch", "expected"),
    [
        (False, "0", "True [] 2.0"),
        (True, "1", 'True ["trueup\'s compiled statistics kernel is missing "] 2.0'),
        (True, "0", "True [] 2.0"),
    ],
)
def test_without_it(hide: bool, switch: str, expected: str) -> None:
    environment = {**os.environ, "TRUEUP_NATIVE": switch}
    command = [sys.executable, "-c", SWITCH.format(hide=hide)]
    assert subprocess.check_output(command, env=environment, text=True).strip() == expected
