"""The compiled kernel, where it was built: which dtypes it takes, and how to do without it."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

KINDS = {np.dtype("<f4"): 0, np.dtype("<f8"): 1, np.dtype("<f2"): 2, np.dtype(ml_dtypes.bfloat16): 3}
"""Dtypes that the kernel reads, by the numbers it knows them by; the others go through the NumPy twin."""
KINDS |= {np.dtype("<c8"): KINDS[np.dtype("<f4")], np.dtype("<c16"): KINDS[np.dtype("<f8")]}

SWITCH = "TRUEUP_NATIVE"
"""Environment variable: ``0`` keeps to the NumPy twin."""


@lru_cache(maxsize=1)
def native() -> Any:
    """Return the extension module, or None (said once) where it was not built or is switched off."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return importlib.import_module("trueup.kernels._native")
    except ImportError as error:
        warnings.warn(
            f"trueup's compiled statistics kernel is missing ({error}): the NumPy twin gives the same numbers at "
            "about a tenth of the speed; reinstall trueup with a C compiler (gcc or clang) at hand, "
            f"or set {SWITCH}=0 to be content with the twin",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def summarize(array: NDArray[Any], out: NDArray[np.float64]) -> bool:
    """Fill ``out`` from a contiguous or strided ``array``; False where the twin must: other dtypes, huge magnitudes."""
    kernel = native()
    kind = KINDS.get(array.dtype)
    if kernel is None or kind is None or not out.flags.c_contiguous:
        return False
    whole = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    reals = 2 * whole.size if whole.dtype.kind == "c" else whole.size
    pointers = whole.__array_interface__["data"][0], out.__array_interface__["data"][0]
    return bool(kernel.summarize(pointers[0], reals, kind, pointers[1]))
