"""Tensors in host memory, measured by the compiled kernel straight from their address."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from trueup.foundation import kernels
from trueup.foundation.model import PACKED
from trueup.recording.recorder import Statistics

_KINDS: dict[torch.dtype, int] = {
    getattr(torch, name): number for name, number in kernels.KINDS.items() if hasattr(torch, name)
}  # fmt: skip

_VIEWS: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}


class _Memory:
    """The memory of a CPU tensor, which it keeps alive, for NumPy to look at."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any]) -> None:
        self._tensor = tensor
        size = dtype.itemsize
        self.__array_interface__ = {
            "version": 3, "typestr": dtype.str, "shape": tuple(tensor.shape), "data": (tensor.data_ptr(), True),
            "strides": tuple([stride * size for stride in tensor.stride()]),
        }  # fmt: skip


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a CPU tensor as NumPy without copying, read only; dtypes NumPy lacks come from ml_dtypes.

    Not by `Tensor.numpy`: that forbids the storage to be resized ever after, and FSDP frees parameters by resizing.

    Raises:
        RuntimeError: it has no memory.
        TypeError: NumPy has no such dtype.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    view = _VIEWS.get(tensor.dtype)
    dtype = _numpy_dtype(tensor.dtype if view is None else view[0])
    if not tensor.numel():
        empty: np.ndarray[Any, Any] = np.empty(tuple(tensor.shape), dtype)
        return empty if view is None else empty.view(view[1])
    if tensor._is_zerotensor():
        raise RuntimeError("zeros that take no memory (an efficient zero tensor)")
    array: np.ndarray[Any, Any] = np.asarray(_Memory(tensor, dtype))
    return array if view is None else array.view(view[1])


@lru_cache(maxsize=64)
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype of the same name.

    Raises:
        TypeError: it has none.
    """
    return np.dtype(str(dtype).removeprefix("torch."))


def on_host(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure a CPU tensor: its digest, unless the detail is ``digest`` its statistics, and for ``tensor`` its bytes.

    The bytes (``data``) are a view: whoever keeps them copies them.
    """
    kind = _KINDS.get(tensor.dtype)
    stats = None if kind is None or tensor.is_neg() or tensor.is_conj() else _by_address(tensor, kind, detail)
    stats = stats or _by_array(tensor, detail)
    if detail == "tensor":
        stats.data = to_numpy(tensor)
    return stats


def _by_address(tensor: torch.Tensor, kind: int, detail: str) -> Statistics | None:
    """Measure with the compiled kernel, which knows the dtype by the number ``kind``.

    None where it is missing, or the tensor has sizes and no memory.
    """
    kernel, start = kernels.native(), tensor.data_ptr()
    if kernel is None or (not start and tensor.numel()):
        return None
    layout = tensor.shape, tensor.stride()
    if detail == "digest":
        return Statistics(None, kernel.measure(start, kind, *layout, 0, torch.get_num_threads()))
    return Statistics(*kernel.measured(start, kind, *layout, torch.get_num_threads()))


def _by_array(tensor: torch.Tensor, detail: str) -> Statistics:
    array = to_numpy(tensor)
    stats = Statistics(digest=kernels.digest(array))
    if detail != "digest":
        stats.values = np.empty(PACKED)
        kernels.summarize(array, stats.values)
    return stats
