"""One-pass statistics, sketch and digest of a tensor, one-pass measures of two, and the distance of two sketches.

Plain NumPy arrays in, plain numbers out: no framework is imported here. Recorders call ``summarize`` and ``digest``, or both at
once by address (``native().measure``); comparisons call ``pair`` and ``distance``; device kernels take their constants from
``sketch``.
"""

from trueup.foundation.kernels._compiled import KINDS, PAST_CACHES, copy, digest, hexadecimal, native
from trueup.foundation.kernels._pair import Pair, Positions, coarser_dtype, pair, subtracted
from trueup.foundation.kernels._summary import (
    ABOVE,
    ALIKE,
    APART,
    MASKING,
    SPREAD,
    STREAMED,
    is_mask,
    streams,
    summarize,
)  # fmt: skip
from trueup.foundation.kernels.sketch import at_least, distance, distances

__all__ = [
    "ABOVE",
    "ALIKE",
    "APART",
    "KINDS",
    "MASKING",
    "PAST_CACHES",
    "SPREAD",
    "STREAMED",
    "Pair",
    "Positions",
    "at_least",
    "coarser_dtype",
    "copy",
    "digest",
    "distance",
    "distances",
    "hexadecimal",
    "is_mask",
    "native",
    "pair",
    "streams",
    "subtracted",
    "summarize",
]  # fmt: skip
