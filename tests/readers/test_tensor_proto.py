"""TensorProtos: whatever TensorFlow packs comes out as it was, and nothing that is claimed is believed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from readers.tensorflow_writers import NUMBERS, message, tensor
from trueup.exchange.readers.contents import DTYPES, array_of, parse
from trueup.exchange.readers.dump import UnreadableError


@pytest.mark.parametrize("name", sorted(set(DTYPES.values())))
def test_bytes(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.arange(6).astype(dtype).reshape(2, 3)
    found = array_of(parse("TensorProto", tensor(array).SerializeToString()))
    assert (found.dtype, found.shape, found.tobytes()) == (dtype, (2, 3), array.tobytes())


@pytest.mark.parametrize(
    ("name", "field", "values", "expected"),
    [
        ("float32", "float_val", [1.5], [1.5, 1.5, 1.5]), ("float64", "double_val", [1, 2], [1, 2, 2]),
        ("int8", "int_val", [-3], [-3] * 3), ("uint8", "int_val", [200, 1], [200, 1, 1]), ("bool", "bool_val", [True], [True] * 3),
        ("int64", "int64_val", [2**62 + 1], [2**62 + 1] * 3), ("uint64", "uint64_val", [2**64 - 1], [2**64 - 1] * 3),
        ("float16", "half_val", [0x3C00, 0xC000], [1, -2, -2]), ("bfloat16", "half_val", [0x3F80], [1, 1, 1]),
        ("complex64", "scomplex_val", [1, 2, 3, 4], [1 + 2j, 3 + 4j, 3 + 4j]),
    ],
)  # fmt: skip
def test_values_whose_last_one_fills_the_rest(name: str, field: str, values: list[object], expected: list[object]) -> None:
    shape = message("Shape", dim=[message("Dim", size=3)])
    found = array_of(message("TensorProto", dtype=NUMBERS[name], tensor_shape=shape, **{field: values}))
    assert found.tolist() == np.array(expected, found.dtype).tolist()


@pytest.mark.parametrize(
    ("shape", "fields", "why"),
    [
        ([2**40], {"float_val": [1.0]}, "it claims"), ([3], {"tensor_content": b"12345"}, "claims 12 bytes, 5 are there"),
        ([2], {"float_val": [1.0, 2.0, 3.0]}, "claims 2 elements, 3 are there"), ([2], {}, "claims 2 elements, 0 are there"),
        ([-1], {"float_val": [1.0]}, "impossible"), ([1] * 70, {"float_val": [1.0]}, "impossible"),
    ],
)  # fmt: skip
def test_what_is_claimed_is_not_believed(shape: list[int], fields: dict[str, object], why: str) -> None:
    sizes = message("Shape", dim=[message("Dim", size=size) for size in shape])
    with pytest.raises(UnreadableError, match=why):
        array_of(message("TensorProto", dtype=1, tensor_shape=sizes, **fields))


@pytest.mark.parametrize(("number", "what"), [(7, "text"), (20, "a handle"), (107, "text"), (99, "dtype 99")])
def test_what_holds_no_numbers(number: int, what: str) -> None:
    with pytest.raises(UnreadableError, match=f"it holds {what}, no numbers"):
        array_of(message("TensorProto", dtype=number))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_tensor_or_unreadable(data: bytes) -> None:
    try:
        array_of(parse("TensorProto", data))
    except UnreadableError:
        pass
