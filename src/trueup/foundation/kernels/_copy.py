"""Copying a tensor of any strides into a row of memory: by the compiled kernel where it can, else by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels._compiled import native

_SIZES = frozenset({1, 2, 4, 8, 16})
"""Bytes of the elements that the compiled kernel moves."""
_SMALL = 1 << 16
"""Bytes below which NumPy is done before the kernel is called."""


def copy(array: NDArray[Any], out: NDArray[Any]) -> None:
    """Write the elements of ``array`` in logical C order to ``out``.

    >>> out = np.empty(6, np.int64)
    >>> copy(np.arange(6).reshape(2, 3).T, out)
    >>> out.tolist()
    [0, 3, 1, 4, 2, 5]

    From 64 KB on past the caches, from 1 MB on without the interpreter's lock.

    Args:
        array: any shape, strides and dtype without Python objects.
        out: flat, contiguous, of the same dtype and number of elements; no memory of ``array``.

    Raises:
        ValueError: ``out`` is of another dtype or size, or not contiguous.
    """
    if out.dtype != array.dtype or out.shape != (array.size,) or not out.flags.c_contiguous or array.dtype.hasobject:
        raise ValueError(f"out: expected a row of {array.size} {array.dtype}, got {out.dtype} {out.shape}")
    kernel = native()
    if array.nbytes < _SMALL or kernel is None or array.itemsize not in _SIZES:
        np.copyto(out.reshape(array.shape), array)
        return
    start, to = (each.__array_interface__["data"][0] for each in (array, out))
    kernel.copy(start, array.itemsize, array.shape, array.strides, to)
