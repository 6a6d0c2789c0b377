"""The compiled kernel gives the twin's numbers, in every instruction set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.foundation.kernels import _compiled
from trueup.foundation.model import PACKED

from . import oracle
from .conftest import KNOWN, SETS, compiled_for
from .test_summarize import as_the_twin, close, values_of

_native = pytest.importorskip("trueup.foundation.kernels._native", reason="the compiled kernel was not built")



def measured(array: np.ndarray, threads: int = 1) -> tuple[np.ndarray, int | None]:
    out = np.full(PACKED, 7.0)
    return out, _compiled.measure(array, out, digest=True, threads=threads)


def agree(array: np.ndarray) -> None:
    out, digest = measured(array)
    as_the_twin(out, array)
    assert digest == xxhash.xxh3_64_intdigest(array.tobytes())


@pytest.mark.parametrize("name", KNOWN)
def test_sets_of_this_processor(name: str) -> None:
    if name not in SETS:
        pytest.skip(f"this processor has no {name}: the tests of the kernel's code for it are left out")
    with compiled_for(name):
        assert _native.target(None) == name


@pytest.mark.parametrize("dtype", [d for d in oracle.FLOATS if d.name in _compiled.KINDS], ids=str)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 511, 512, 513, 1024, 5000, 100_003])
def test_edges(instructions: str, dtype: object, size: int) -> None:
    generator = np.random.default_rng(size)
    array = generator.standard_normal(size).astype(dtype)
    agree(array)
    agree(np.abs(array) + array.dtype.type(1))  # zeros that pad the last group are not the least
    agree(-np.abs(array) - array.dtype.type(1))
    largest = float(ml_dtypes.finfo(array.dtype).max)
    with np.errstate(all="ignore"):
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 6e-8, largest, -largest]).astype(dtype)
    for every in (3, 700):
        places = np.flatnonzero(generator.integers(0, every, size) == 0)
        array[places] = special[generator.integers(0, special.size, places.size)]
        agree(array)


@pytest.mark.parametrize("dtype", [*oracle.INTEGERS[:-2], np.dtype(bool), *oracle.COMPLEX], ids=str)
@pytest.mark.parametrize("size", [1, 65, 100_003])
def test_edges_of_whole_and_complex_numbers(instructions: str, dtype: np.dtype, size: int) -> None:
    raw = np.random.default_rng(size).integers(0, 2 if dtype.kind == "b" else 256, size * dtype.itemsize, np.uint8)
    agree(raw.view(dtype) if dtype.kind != "c" else raw.astype(dtype))


@pytest.mark.parametrize("dtype", [d for d in oracle.DTYPES if d.name in _compiled.KINDS], ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_bit_pattern(dtype: np.dtype, data: st.DataObject) -> None:
    array = data.draw(values_of(dtype))
    with np.errstate(all="ignore"):
        want = oracle.summary(array)
    for instructions in SETS:
        with compiled_for(instructions), np.errstate(all="ignore"):
            out, digest = measured(array)
            close(out, want, array)
        assert digest == xxhash.xxh3_64_intdigest(array.tobytes()), instructions


def test_every_dtype_of_the_recorder_is_taken() -> None:
    """All that the table names and NumPy has (it has no complex32) goes through the compiled kernel, the rest does not."""
    taken = {d.name for d in oracle.DTYPES if measured(np.zeros(3, d))[1] is not None}
    assert taken == set(_compiled.KINDS) - {"complex32"}


@pytest.mark.parametrize("value", [1.7e308, 1e200, 1e-200, 1e-300, 5e-324])
def test_huge_and_tiny_numbers_stay_inside_float64(instructions: str, value: float) -> None:
    array = np.full(60, value)
    array[:2] = [-value, np.finfo(np.float64).max]
    close(measured(array)[0], oracle.summary(array), array)


@pytest.mark.parametrize("dtype", [np.dtype(np.float64), np.dtype(np.complex128)], ids=str)
def test_a_lane_that_leaves_float64_is_infinite(instructions: str, dtype: np.dtype) -> None:
    array = np.full(97 * dtype.itemsize // 8, 8.98e307).view(dtype)
    out, expected = measured(array)[0], oracle.summary(array)
    assert np.isinf(expected).any()
    np.testing.assert_allclose(out, expected, rtol=1e-14)


def test_wrong_arguments_raise() -> None:
    with pytest.raises(TypeError, match=r"measure\(pointer, kind, shape"):
        _native.measure(0, 0)
    with pytest.raises(TypeError, match="expected shape and strides as tuples of int"):
        _native.measure(0, 0, [1], [1], 0, 1)
    with pytest.raises(ValueError, match="a stride for each of at most 64 dimensions, got 2 and 1"):
        _native.measure(0, 0, (1, 1), (1,), 0, 1)
    with pytest.raises(ValueError, match=r"no such kind: 99; see trueup\.foundation\.kernels\.KINDS"):
        _native.measure(0, 99, (1,), (1,), 0, 1)
    for shape in ((-1,), (2**62, 2), (-3, 0)):
        with pytest.raises(ValueError, match="sizes of at least 0 and of less than"):
            _native.measure(0, 0, shape, (1,) * len(shape), 0, 1)
    assert _native.measure(0, 0, (2**62, 2**62, 0), (0, 1, 1), 0, 1) == xxhash.xxh3_64_intdigest(b"")
    with pytest.raises(ValueError, match="no such instruction set"):
        _native.target("mmx")


SWITCH = """
import sys, warnings
import numpy as np
if {hide}:
    sys.modules["trueup.foundation.kernels._native"] = None
from trueup.foundation.kernels import _compiled, summarize
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


def test_a_kernel_of_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(**{name: None for name in _compiled.NEEDED if name != "streams"})
    monkeypatch.setenv(_compiled.SWITCH, "1")
    monkeypatch.setitem(sys.modules, "trueup.foundation.kernels._native", older)
    with pytest.warns(RuntimeWarning, match=r"another version \(it lacks streams\).*build it again"):
        assert _compiled.native.__wrapped__() is older
