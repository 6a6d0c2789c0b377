"""One row of statistics with Triton, in one pass over the tensor. Imported only where Triton is wanted: it costs 0.3 s."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trueup.foundation.kernels.sketch import GROUP
from trueup.recording.adapters.torch.device_row import RANGES, WIDTH, Limits, limits_of, reals
from trueup.recording.adapters.torch.triton_kernel import BRAIN, E4M3, E5M2, INTEGER, PLACES, PLAIN, measure, merge

VERSION = str(triton.__version__)

MAX_PROGRAMS = 1024
"""Enough to fill the largest devices; each writes 640 bytes."""

GROUPS_PER_PROGRAM = 8
"""What a program takes before a second one is worth it: up to 4096 elements need one launch."""

_TYPES = {torch.float64: tl.float64, torch.float32: tl.float32}
_BITS = {
    torch.bool: (torch.uint8, INTEGER), torch.bfloat16: (torch.int16, BRAIN),
    torch.float8_e4m3fn: (torch.uint8, E4M3), torch.float8_e5m2: (torch.uint8, E5M2),
}  # fmt: skip
"""Dtypes that are handed over as integers of the same bits, and how those are read."""
_WIDE = frozenset({torch.int32, torch.int64, torch.uint32, torch.uint64})
_TAKEN = frozenset({
    *_BITS, *_WIDE, torch.float64, torch.float32, torch.float16, torch.int8, torch.uint8, torch.int16, torch.uint16,
})  # fmt: skip


def takes(dtype: torch.dtype, accumulator: torch.dtype) -> bool:
    """Tell whether the kernel reads a dtype; complex ones come as their reals."""
    return dtype in _TAKEN and not (dtype is torch.float64 and accumulator is torch.float32)


def fill(tensor: torch.Tensor, row: torch.Tensor) -> None:
    """Fill ``row``, float64 ``(WIDTH,)`` or float32 ``(2 * WIDTH,)``, on the current stream without a wait; raise `TypeError` for
    dtypes not taken."""
    flat = reals(tensor)
    dtype, accumulator = flat.dtype, row.dtype
    if not takes(dtype, accumulator):
        raise TypeError(f"no Triton kernel for {dtype} with sums in {accumulator}")
    size = flat.numel()
    groups = -(-size // GROUP)
    programs = min(MAX_PROGRAMS, max(1, -(-groups // GROUPS_PER_PROGRAM)))
    out = row if programs == 1 else torch.empty((programs, row.numel()), dtype=row.dtype, device=row.device)
    if dtype in _BITS:
        flat = flat.view(_BITS[dtype][0])
    constants = _constants(dtype, accumulator)
    measure[(programs,)](flat, out, size, programs, -(-groups // programs), **constants, **_OPTIONS)
    if programs > 1:
        pair = {name: constants[name] for name in ("ACCUMULATOR", "PAIR")}
        merge[(WIDTH // PLACES,)](out, row, programs, **pair, **_OPTIONS)


_ON_GPU = torch.version.cuda is not None or torch.version.hip is not None
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False} if _ON_GPU else {}
"""Products and sums are rounded as written, so that they do not depend on Triton's version: 3.10 is to change its default."""

_CONSTANTS: dict[tuple[torch.dtype, torch.dtype], dict[str, Any]] = {}


def _constants(dtype: torch.dtype, accumulator: torch.dtype) -> dict[str, Any]:
    found = _CONSTANTS.get((dtype, accumulator))
    if found is None:
        found = _CONSTANTS[(dtype, accumulator)] = _make_constants(dtype, accumulator, limits_of(dtype))
    return found


def _make_constants(dtype: torch.dtype, accumulator: torch.dtype, limits: Limits) -> dict[str, Any]:
    bounds = RANGES[accumulator]
    pair = accumulator is torch.float32
    wide = dtype in _WIDE or dtype is torch.float64
    return {
        "KIND": _BITS[dtype][1] if dtype in _BITS else PLAIN if dtype.is_floating_point else INTEGER,
        "VALUE": _TYPES[accumulator] if wide else tl.float32, "ACCUMULATOR": _TYPES[accumulator], "PAIR": pair,
        "SCALED": dtype is torch.float64 or (pair and (wide or dtype in (torch.float32, torch.bfloat16))),
        "SPLIT": pair and wide, "TINY": limits.tiny, "LARGEST": limits.largest, "KEEP_BELOW": limits.keep_below,
        "BIG": bounds.big, "LITTLE": bounds.little, "SCALE": bounds.scale, "HINTS": _ON_GPU,
    }  # fmt: skip
