"""The compiled kernel, where it was built: which dtypes it takes, and how to do without it."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "complex32",
)  # fmt: skip

KINDS = {name: number for number, name in enumerate(_NAMES)}
"""Dtypes that the compiled kernel reads, by the names of PyTorch and NumPy: the numbers it knows them by (native/base.h)."""

SWITCH = "TRUEUP_NATIVE"
"""Environment variable: ``0`` keeps to the NumPy twin."""


@lru_cache(maxsize=1)
def native() -> Any:
    """Return the extension module, or None (said once) where it was not built or is switched off.

    Its one entrance, for whoever has an address instead of an array::

        digest = native().measure(pointer, KINDS["float32"], shape, strides, out_pointer, threads)

    ``shape`` and ``strides`` are tuples (``torch.Size`` is one), strides count elements, of which ``pointer`` is the first in
    logical C order; any stride will do, 0 and negative ones too. A complex element is one element. The 74 float64 of
    ``model.PACKED`` are written to ``out_pointer``, unless it is 0; returned is the digest (a seventh argument, False,
    leaves it out: None). From 256 KB on up to ``threads`` threads of the process's OpenMP team work, from 1 MB on the
    interpreter's lock is released; what comes out does not depend on the number of threads. ``measured`` does the same into
    memory of the kernel's own (native/results.h), ``spent`` tells what all calls took.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return importlib.import_module("trueup.foundation.kernels._native")
    except ImportError as error:
        warnings.warn(
            f"trueup's compiled statistics kernel is missing ({error}): the NumPy twin gives the same numbers at "
            "about a tenth of the speed; reinstall trueup with a C compiler (gcc or clang) at hand, "
            f"or set {SWITCH}=0 to be content with the twin",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


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
