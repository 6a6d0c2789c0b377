"""The compiled kernel, where it was built: which dtypes it takes and how to do without it; digests, and copies."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import lru_cache
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

_NAMES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "complex32",
)  # fmt: skip

KINDS = {name: number for number, name in enumerate(_NAMES)}  # dtypes by name -> the kernel's numbers (native/base.h)

NEEDED = ("copy", "measure", "measured", "pair", "spent", "squared_distances", "streams")  # of the kernel, by this version

SWITCH = "TRUEUP_NATIVE"  # environment variable: ``0`` keeps to the NumPy twin


@lru_cache(maxsize=1)
def native() -> Any:
    """Return the extension module, or None (said once) where it was not built or is switched off.

    Callers that have an address instead of an array use it directly::

        digest = native().measure(pointer, KINDS["float32"], shape, strides, out_pointer, threads)

    ``shape`` and ``strides`` are tuples (``torch.Size`` is one). Strides count elements (a complex one is one) and may be 0 or
    negative; ``pointer`` is the first element in logical C order. The 74 float64 of ``model.PACKED`` go to ``out_pointer``,
    unless it is 0. A seventh argument False leaves the digest out (None). From 256 KB on up to ``threads`` OpenMP threads work,
    from 1 MB on without the interpreter's lock; the result does not depend on ``threads``. ``measured`` writes into memory of the
    kernel's own (native/results.h); ``spent`` tells what all calls took.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        kernel = importlib.import_module("trueup.foundation.kernels._native")
    except ImportError as error:
        warnings.warn(
            f"trueup's compiled statistics kernel is missing ({error}): the NumPy twin gives the same numbers at "
            "about a tenth of the speed; reinstall trueup with a C compiler (gcc or clang) at hand, "
            f"or set {SWITCH}=0 to be content with the twin",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    lacking = [name for name in NEEDED if not hasattr(kernel, name)]
    if lacking:
        warnings.warn(
            f"trueup's compiled statistics kernel was built for another version (it lacks {', '.join(lacking)}): what it lacks "
            "is computed more slowly; build it again: reinstall trueup (in a checkout: pip install --no-deps -e .)",
            RuntimeWarning,
            stacklevel=3,
        )
    return kernel


def measure(array: NDArray[Any], out: NDArray[np.float64] | None, digest: bool, threads: int = 1) -> int | None:
    """Fill ``out``; return the digest if it is wanted, else 0, or None where the twin has to do it all: other dtypes."""
    kernel = native()
    dtype = array.dtype
    kind = KINDS.get(dtype.name)
    if kernel is None or kind is None or not dtype.isnative or not (out is None or out.flags.c_contiguous):
        return None
    if not array.flags.aligned or any(step % dtype.itemsize for step in array.strides):
        array = np.ascontiguousarray(array)  # fields of records
    strides = tuple(step // dtype.itemsize for step in array.strides)
    pointer = array.__array_interface__["data"][0]
    to = 0 if out is None else out.__array_interface__["data"][0]
    result = kernel.measure(pointer, kind, array.shape, strides, to, threads, digest)
    return int(result) if digest else 0


_SIZES = frozenset({1, 2, 4, 8, 16})  # bytes of the elements that the compiled kernel moves
PAST_CACHES = 1 << 16  # bytes from which on `copy` goes past the caches; NumPy is done with fewer before the kernel is called


def copy(array: NDArray[Any], out: NDArray[Any]) -> None:
    """Write the elements of ``array`` in logical C order to ``out``: from 64 KB on past the caches, from 1 MB on without the
    interpreter's lock.

    >>> out = np.empty(6, np.int64)
    >>> copy(np.arange(6).reshape(2, 3).T, out)
    >>> out.tolist()
    [0, 3, 1, 4, 2, 5]

    ``array`` has any shape, strides and dtype without Python objects; ``out`` is flat and shares no memory with it. Raises
    ValueError unless ``out`` is contiguous, of the same dtype and number of elements.
    """
    if out.dtype != array.dtype or out.shape != (array.size,) or not out.flags.c_contiguous or array.dtype.hasobject:
        raise ValueError(f"out: expected a row of {array.size} {array.dtype}, got {out.dtype} {out.shape}")
    kernel = native()
    if array.nbytes < PAST_CACHES or kernel is None or array.itemsize not in _SIZES:
        np.copyto(out.reshape(array.shape), array)
        return
    start, to = (each.__array_interface__["data"][0] for each in (array, out))
    kernel.copy(start, array.itemsize, array.shape, array.strides, to)


def digest(array: NDArray[Any]) -> int:
    """Return xxh3_64 (seed 0) of the bytes of ``array`` in logical C order and little-endian, unsigned. Shape and dtype do not
    enter: equal bytes have equal digests. Records hold the 16 hex digits of ``hexadecimal``."""
    value = measure(array, None, digest=True)
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
