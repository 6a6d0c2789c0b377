"""Statistics of a tensor in host memory: by the compiled kernel straight from its address, else by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation import kernels
from trueup.foundation.model import PACKED
from trueup.recording.recorder.rows import Statistics


class _Memory:
    """Host memory that somebody owns, and whom it keeps alive, for NumPy to look at."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Any, start: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3, "typestr": dtype.str, "shape": tuple(shape), "data": (start, True),
            "strides": tuple([stride * dtype.itemsize for stride in strides]),
        }  # fmt: skip


def view(owner: Any, start: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """View host memory, kept alive by its owner, as NumPy, read only; ``strides`` count elements. Other dtypes are views of what
    NumPy knows."""
    array: NDArray[Any] = np.asarray(_Memory(owner, start, shape, strides, dtype))
    return array


def measure(
    start: int, kind: int | None, shape: tuple[int, ...], strides: tuple[int, ...], array: Callable[[], NDArray[Any]], detail: str,
    threads: int = 1,
) -> Statistics:  # fmt: skip
    """Measure host memory from the address ``start`` (0: sizes without memory), with ``strides`` in elements: its digest, unless
    the detail is ``digest`` its statistics, and for ``tensor`` its bytes, a view that whoever keeps them copies. ``kind`` is the
    compiled kernel's number of the dtype, None where ``array``, the tensor as NumPy, is measured."""
    kernel = kernels.native()
    if kernel is None or kind is None or (not start and 0 not in shape):
        stats = Statistics(digest=kernels.digest(array()))
        if detail != "digest":
            stats.values = np.empty(PACKED)
            kernels.summarize(array(), stats.values)
    elif detail == "digest":
        stats = Statistics(None, kernel.measure(start, kind, shape, strides, 0, threads))
    else:
        stats = Statistics(*kernel.measured(start, kind, shape, strides, threads))
    if detail == "tensor":
        stats.data = array()
    return stats
