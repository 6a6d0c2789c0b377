"""Elements and memory: tensors on the host of any strides, filled with recorded bytes, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.execution.cases import contiguous as contiguous
from trueup.recording.execution.decoding import damaged as damaged
from trueup.recording.execution.decoding import extent as extent
from trueup.recording.execution.decoding import natural as natural
from trueup.recording.execution.places import NotReplayable as NotReplayable


def fill(host: torch.Tensor, array: NDArray[Any] | None) -> None:
    """Write elements into a tensor on the CPU of any strides, overlapping ones too; None: NaN, for memory that nobody wrote."""
    if array is None:
        if host.numel():
            flat = torch.as_strided(host, (extent(tuple(host.shape), host.stride()),), (1,))
            flat.fill_(math.nan if host.dtype.is_floating_point or host.dtype.is_complex else 0)
        return
    given = from_numpy(array)
    if given.dtype != host.dtype:
        given = given.to(host.dtype)
    if 0 in host.stride() and host.numel():  # repeated elements: each is written once
        once = [slice(0, 1) if stride == 0 else slice(None) for stride in host.stride()]
        host[tuple(once)].copy_(given[tuple(once)])
        return
    try:
        host.copy_(given)
    except RuntimeError:  # elements overlap otherwise (unfold): NumPy writes them one after the other
        into = np.lib.stride_tricks.as_strided(bits(torch.as_strided(host, (extent(tuple(host.shape), host.stride()),), (1,))),
                                               host.shape, [s * host.dtype.itemsize for s in host.stride()])  # fmt: skip
        into[...] = bits(given)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a dense tensor on the CPU as integers of its width, sharing its memory; complex128 as itself."""
    kind = _BITS.get(tensor.dtype.itemsize)
    plain: NDArray[Any] = (tensor.detach() if kind is None else tensor.detach().view(kind)).numpy()
    return plain


def from_numpy(array: NDArray[Any]) -> torch.Tensor:
    """Return an array of any dtype of NumPy or ml_dtypes as a tensor on the CPU; a copy."""
    dtype = constant(torch.dtype, array.dtype.name)
    copied = np.array(array, order="C", copy=True)
    if array.dtype.kind in "biufc":
        return torch.from_numpy(copied.reshape(-1)).reshape(array.shape)
    kind = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
    return torch.from_numpy(copied.reshape(-1).view(kind)).view(dtype).reshape(array.shape)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the elements of a tensor on any device, C order, in the dtype of NumPy or ml_dtypes that captures use."""
    if tensor._is_zerotensor():  # zeros that autograd never allocated
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    name = str(host.dtype).removeprefix("torch.")
    wanted = numpy_dtype(name)
    if wanted.kind in "biufc":
        found: NDArray[Any] = host.numpy()
        return found
    plain: NDArray[Any] = bits(host.reshape(-1)).view(wanted).reshape(tuple(host.shape))
    return plain


def constant(kind: type, name: Any) -> Any:
    """Return a dtype, layout or memory format of PyTorch by its name."""
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    return found if isinstance(found, kind) else damaged()
