"""Statistics of a tensor: by the compiled kernel straight from host memory, of other places after a copy to the host."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import paddle

from trueup.foundation import kernels
from trueup.foundation.model import PACKED
from trueup.recording.adapters.paddle.tensors import Layout
from trueup.recording.recorder import Statistics

_OURS = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


class _Memory:
    """The memory of a CPU tensor, which it keeps alive, for NumPy to look at."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: paddle.Tensor, layout: Layout, dtype: np.dtype[Any]) -> None:
        self._tensor = tensor
        raw = np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" or dtype.name in _OURS else dtype
        self.__array_interface__ = {
            "version": 3, "typestr": raw.str, "shape": layout.shape, "data": (tensor.data_ptr(), True),
            "strides": tuple([stride * dtype.itemsize for stride in layout.strides]),
        }  # fmt: skip


def to_numpy(tensor: paddle.Tensor, layout: Layout) -> np.ndarray[Any, Any]:
    """View a CPU tensor as NumPy without copying, read only; ``Tensor.numpy`` copies, and gives bfloat16 as integers.

    Raises:
        TypeError: NumPy has no such dtype.
    """
    dtype = _dtype(layout.described.dtype)
    if not layout.numel:
        return np.empty(layout.shape, dtype)
    array: np.ndarray[Any, Any] = np.asarray(_Memory(tensor, layout, dtype))
    return array if array.dtype == dtype else array.view(dtype)


@lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    return _OURS.get(name) or np.dtype(name)


def measure(tensor: paddle.Tensor, layout: Layout, detail: str) -> Statistics:
    """Measure a tensor: its digest, unless the detail is ``digest`` its statistics, and for ``tensor`` its bytes.

    A tensor on another place than the CPU is copied to the host first, which the training waits for. The bytes (``data``) are a
    view of the tensor's memory: whoever keeps them copies them.
    """
    if layout.described.device != "cpu":
        tensor = tensor.detach().cpu()
        layout = Layout(layout.described.dtype, tuple(tensor.shape), tuple(tensor.get_strides()), "cpu")
    stats = _by_address(tensor, layout, detail) or _by_array(tensor, layout, detail)
    if detail == "tensor":
        stats.data = to_numpy(tensor, layout)
    return stats


def _by_address(tensor: paddle.Tensor, layout: Layout, detail: str) -> Statistics | None:
    kernel, start, kind = kernels.native(), tensor.data_ptr(), layout.host_kind
    if kernel is None or kind is None or (not start and layout.numel):
        return None
    if detail == "digest":
        return Statistics(None, kernel.measure(start, kind, layout.shape, layout.strides, 0, 1))
    return Statistics(*kernel.measured(start, kind, layout.shape, layout.strides, 1))


def _by_array(tensor: paddle.Tensor, layout: Layout, detail: str) -> Statistics:
    array = to_numpy(tensor, layout)
    stats = Statistics(digest=kernels.digest(array))
    if detail != "digest":
        stats.values = np.empty(PACKED)
        kernels.summarize(array, stats.values)
    return stats
