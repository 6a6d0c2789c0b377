"""The digest is a function of the values in logical order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from trueup.foundation.kernels import digest, hexadecimal


def test_known_value() -> None:
    """xxh3_64 of nothing, from the test vectors of xxHash."""
    assert hexadecimal(digest(np.empty(0, np.float32))) == "2d06800538d394c2"


@given(st.binary(max_size=300))
def test_is_xxh3_of_the_bytes(raw: bytes) -> None:
    assert digest(np.frombuffer(raw, np.uint8)) == xxhash.xxh3_64_intdigest(raw)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "bool", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_strides_do_not_enter(dtype: object) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    assert digest(array.transpose(2, 0, 1)) == digest(array.transpose(2, 0, 1).copy())
    assert digest(array[:, ::-1]) == digest(array[:, ::-1].copy()) != digest(array)


def test_one_bit_changes_it() -> None:
    assert digest(np.array(0.0)) != digest(np.array(-0.0))


def test_byte_order_does_not_enter() -> None:
    assert digest(np.arange(9, dtype=">f4")) == digest(np.arange(9, dtype="<f4"))


@given(st.integers(0, 2**64 - 1))
def test_sixteen_digits(value: int) -> None:
    text = hexadecimal(value)
    assert len(text) == 16
    assert int(text, 16) == value
