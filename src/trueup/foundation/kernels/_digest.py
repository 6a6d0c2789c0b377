"""The digest of a tensor: xxh3_64 of its bytes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from trueup.foundation.kernels import _compiled


def digest(array: NDArray[Any]) -> int:
    """Return xxh3_64 (seed 0) of the bytes of ``array`` in logical C order and little-endian: an unsigned integer.

    Shape and dtype do not enter: equal bytes have equal digests. Records hold the 16 hex digits of ``hexadecimal``.
    """
    value = _compiled.measure(array, None, digest=True)
    return _by_copy(array) if value is None else value


def _by_copy(array: NDArray[Any]) -> int:
    """Do without the compiled kernel: a non-contiguous array is copied first."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    flat = np.ascontiguousarray(array).reshape(-1)
    return int(xxhash.xxh3_64_intdigest(cast(Any, flat.view(np.uint8))))


def hexadecimal(value: int) -> str:
    """Return the stored form of a digest: 16 hexadecimal digits, most significant first."""
    return f"{value:016x}"
