"""What a device writes for one tensor, and how the host turns it into the packed vector of `trueup.foundation.kernels`.

A device only adds, counts and compares; roots, quotients and what follows from other counts are left to the host, for a whole
flush at once. Columns 0 to 9 are `COLUMNS`, then 64 lanes, then `EXTRAS`, then padding to a multiple of 16 numbers::

    min max sum squares posinf neginf zero saturated small kept | 64 lanes | sum_big squares_big squares_small

``small`` counts |x| below the smallest normal number, zeros too.
Squares and sums of numbers near the ends of the accumulator's range would leave it, so those are scaled by a fixed power of two and
added apart, as in Blue's norm (J. L. Blue, A portable Fortran program to find the Euclidean norm, 1978; LAPACK's dnrm2).

A device with float64 writes one float64 row. One without writes two float32 rows, whose sum is the number: the second holds what
rounding took from the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trueup.foundation.kernels import MASKING
from trueup.foundation.model import LANES, NUMBERS, PACKED

COLUMNS = ("min", "max", "sum", "squares", "posinf", "neginf", "zero", "saturated", "small", "kept")
EXTRAS = ("sum_big", "squares_big", "squares_small")
WIDTH = 80
"""Numbers in a row: 77 of them mean something; rows start at multiples of 128 bytes."""

_PLACE = {name: k for k, name in enumerate(COLUMNS)} | {name: len(COLUMNS) + LANES + k for k, name in enumerate(EXTRAS)}


@dataclass(frozen=True, slots=True)
class Range:
    """Where an accumulator needs help: |x| > ``big`` enters times 1 / ``scale``, |x| < ``little`` times ``scale``."""

    big: float
    little: float
    scale: float


RANGES = {torch.float64: Range(2.0**480, 2.0**-480, 2.0**600), torch.float32: Range(2.0**40, 2.0**-40, 2.0**90)}
"""By dtype of the accumulator. Squares in the middle stay 2**47 (float32) and 2**64 (float64) additions away from overflow."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A dtype as device kernels see it; integers have no subnormals and do not saturate."""

    tiny: float  # smallest normal number; 0 for integers
    largest: float  # magnitude from which on a finite number is saturated; Inf for integers
    keep_below: float  # |x| from here on is left out of sums and sketch: Inf, or what is saturated where that is a mask


def is_masking(dtype: torch.dtype) -> bool:
    """Tell whether a saturated number of a real dtype is taken for a mask; see `trueup.foundation.kernels.summarize`."""
    return str(dtype).removeprefix("torch.") in MASKING


def limits_of(dtype: torch.dtype) -> Limits:
    """Return the limits of a real dtype."""
    if not dtype.is_floating_point:
        return Limits(0.0, float("inf"), float("inf"))
    tiny = torch.finfo(dtype).smallest_normal
    largest = torch.finfo(torch.bfloat16 if dtype is torch.float32 else dtype).max
    return Limits(tiny, largest, largest if is_masking(dtype) else float("inf"))


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return the reals of a tensor, 1-d, in logical C order; copied on its device if they are laid out differently."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)


def finish(rows: NDArray[Any], numel: Sequence[int], masking: Sequence[bool], accumulator: torch.dtype) -> NDArray[np.float64]:
    """Turn rows from a device, float64 ``(n, WIDTH)`` or both parts of the numbers as float32 ``(n, 2 * WIDTH)``, into packed
    float64 ``(n, PACKED)``: ``model.NUMBERS`` in order, then the sketch. ``numel`` counts the reals of each tensor, ``masking``
    tells whether its saturated elements were left out, ``accumulator`` is the dtype the device added in, which says how big and
    little numbers were scaled."""
    with np.errstate(all="ignore"):  # rows whose lanes left float64 are what they are
        if accumulator is torch.float32:
            first, second = rows[:, :WIDTH].astype(np.float64), rows[:, WIDTH:].astype(np.float64)
            rows = np.where(np.isfinite(first), first + second, first)
        column = {name: rows[:, k] for name, k in _PLACE.items()}
        scale = RANGES[accumulator].scale
        kept = column["kept"]
        mean = column["sum"] / kept + column["sum_big"] / kept * scale
        middle, big, little = (np.sqrt(column[name]) for name in ("squares", "squares_big", "squares_small"))
        l2 = np.hypot(np.hypot(big * scale, middle), little / scale)
    out = np.empty((len(rows), PACKED))
    left_out = column["posinf"] + column["neginf"] + np.where(masking, column["saturated"], 0.0)
    numbers = {
        "min": column["min"], "max": column["max"], "mean": mean, "l2": l2,
        "n_nan": np.asarray(numel, np.float64) - kept - left_out,
        "n_posinf": column["posinf"], "n_neginf": column["neginf"], "n_zero": column["zero"],
        "n_subnormal": np.maximum(column["small"] - column["zero"], 0.0), "n_saturated": column["saturated"],
    }  # fmt: skip
    for k, name in enumerate(NUMBERS):
        out[:, k] = numbers[name]
    out[kept == 0, :4] = np.nan
    out[:, len(NUMBERS) :] = rows[:, len(COLUMNS) : len(COLUMNS) + LANES]
    return out
