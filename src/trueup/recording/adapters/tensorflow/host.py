"""Statistics of a tensor: by the compiled kernel straight from host memory; of other devices after a copy to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation import kernels
from trueup.foundation.model import PACKED
from trueup.recording.recorder import Statistics


def on_host(tensor: Any) -> NDArray[Any]:
    """View an eager tensor as NumPy, without a copy where it lies on the CPU; bfloat16 and the like as ml_dtypes has them.

    Raises:
        Exception: it has no numbers to show (a resource, a variant).
    """
    array: NDArray[Any] = np.asarray(tensor._numpy_internal())
    return array


def measure(array: NDArray[Any], detail: str) -> Statistics:
    """Measure an array in C order: its digest, unless the detail is ``digest`` its statistics, and for ``tensor`` its bytes.

    The bytes (``data``) are the array itself: whoever keeps them copies them.
    """
    array = np.ascontiguousarray(array).reshape(array.shape)  # which makes an array of no dimensions one of one
    kernel, kind = kernels.native(), kernels.KINDS.get(array.dtype.name)
    if kernel is None or kind is None:
        stats = Statistics(digest=kernels.digest(array))
        if detail != "digest":
            stats.values = np.empty(PACKED)
            kernels.summarize(array, stats.values)
    else:
        start, shape = array.__array_interface__["data"][0], array.shape
        strides = tuple(stride // array.itemsize for stride in array.strides)
        if detail == "digest":
            stats = Statistics(None, kernel.measure(start, kind, shape, strides, 0, 1))
        else:
            stats = Statistics(*kernel.measured(start, kind, shape, strides, 1))
    if detail == "tensor":
        stats.data = array
    return stats
