"""One row of statistics with PyTorch operators: for a device that has no kernel of its own and no Triton.

About 25 operators on a tensor of at most a million elements; a larger one goes block by block, so that the memory in use beside it
stays near 80 MB. Nothing here waits for the device: no number is looked at, every shape is known, tables are computed there.
"""

from __future__ import annotations

import torch

from trueup.foundation.kernels.sketch import GOLDEN, GROUP, MIX, ROWS_PER_GROUP
from trueup.foundation.model import LANES
from trueup.recording.adapters.torch.device_row import COLUMNS, RANGES, WIDTH, Limits, limits_of, reals

BLOCK = 1 << 20
"""Elements taken at a time; a multiple of the sketch's group."""

REMEMBERED = 8
"""Blocks of a device whose signs and rotations are kept: 2 MB each."""

INF = float("inf")


def fill(tensor: torch.Tensor, row: torch.Tensor) -> None:
    """Fill ``row``, float64 ``(WIDTH,)`` on the tensor's device, as `device_row` describes it.

    Raises:
        RuntimeError, TypeError: the device has no float64, or no operator for this dtype.
    """
    flat = reals(tensor)
    limits = limits_of(flat.dtype)
    parts = [_block(part, limits, block) for block, part in enumerate(flat.split(BLOCK))] if flat.numel() else [_nothing(row)]
    row.copy_(parts[0] if len(parts) == 1 else _join(torch.stack(parts)))


def _nothing(row: torch.Tensor) -> torch.Tensor:
    return torch.cat([row.new_full((1,), INF), row.new_full((1,), -INF), row.new_zeros(WIDTH - 2)])


def _join(parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([parts[:, :1].amin(0), parts[:, 1:2].amax(0), parts[:, 2:].sum(0)])


def _block(part: torch.Tensor, limits: Limits, block: int) -> torch.Tensor:
    """Return the row of one block, float64 ``(WIDTH,)``."""
    x = part.to(torch.float64)
    extras: list[torch.Tensor] = []
    if part.dtype.is_floating_point:
        magnitude = x.abs()
        equal, below = _bounds(limits, x.device)
        is_below = magnitude < below
        keep = is_below[1]
        low, high, kept = torch.where(keep, x, INF).amin(), torch.where(keep, x, -INF).amax(), torch.where(keep, x, 0.0)
        beneath = is_below.sum(1)
        counts = [(x == equal).sum(1), beneath[3:] - beneath[2:3], beneath[:2]]
    else:
        low, high, kept = x.amin(), x.amax(), x
        none = x.new_zeros(3)
        counts = [none[:2], (x == 0).sum().view(1), none[:2], x.new_full((1,), x.numel())]
    if part.dtype is torch.float64:
        total, squares, extras = _scaled_sums(kept, magnitude)
    else:
        total, squares = kept.sum(), torch.linalg.vector_norm(kept).square()
    padding = x.new_zeros(WIDTH - len(COLUMNS) - LANES - len(extras))
    lanes = _sketch(kept, block)
    return torch.cat([torch.stack([low, high, total, squares]), *counts, lanes, *[e.view(1) for e in extras], padding])


_BOUNDS: dict[tuple[Limits, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _bounds(limits: Limits, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers that are counted, ``(3, 1)``, and those that |x| is held against, ``(4, 1)``; filled on the device."""
    found = _BOUNDS.get((limits, device))
    if found is None:
        values = (INF, -INF, 0.0, limits.tiny, limits.keep_below, limits.largest, INF)
        column = torch.cat([torch.full((1, 1), value, dtype=torch.float64, device=device) for value in values])
        found = _BOUNDS[(limits, device)] = column[:3], column[3:]
    return found


def _scaled_sums(kept: torch.Tensor, magnitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return sum and squares of the middle of float64's range, then `EXTRAS`."""
    bounds = RANGES[torch.float64]
    is_big, is_little = magnitude > bounds.big, magnitude < bounds.little
    big = torch.where(is_big, kept / bounds.scale, 0.0)
    rest = torch.where(is_big, 0.0, kept)
    middle = torch.where(is_little, 0.0, rest)
    little = torch.where(is_little, kept * bounds.scale, 0.0)
    squares, big_squares, little_squares = (torch.linalg.vector_norm(v).square() for v in (middle, big, little))
    return rest.sum(), squares, [big.sum(), big_squares, little_squares]


def _sketch(kept: torch.Tensor, block: int) -> torch.Tensor:
    groups = -(-kept.numel() // GROUP)
    sign, source = _tables(block, kept.device)
    padded = torch.nn.functional.pad(kept, (0, groups * GROUP - kept.numel())).view(groups, ROWS_PER_GROUP, LANES)
    columns = (padded * sign[:groups]).sum(1)
    return columns.flatten()[source[: groups * LANES]].view(groups, LANES).sum(0)


_TABLES: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _tables(block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs, int8 ``(groups, 8, 64)``, of a block, and where each lane of a group finds its share."""
    found = _TABLES.get((block, device))
    if found is None:
        found = _make_tables(block, device)
        if block < REMEMBERED:
            _TABLES[(block, device)] = found
    return found


def _make_tables(block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    groups = BLOCK // GROUP
    rows = torch.arange(block * groups * ROWS_PER_GROUP, (block + 1) * groups * ROWS_PER_GROUP, device=device)
    lane = torch.arange(LANES, device=device)
    bits = (_splitmix64(rows)[:, None] >> lane) & 1
    group = torch.arange(groups, device=device)
    shift = 8 * _logical_shift(_splitmix64((group + block * groups) ^ _signed(GOLDEN)), 61)
    source = (lane - shift[:, None]) % LANES + LANES * group[:, None]
    return (1 - 2 * bits).to(torch.int8).view(groups, ROWS_PER_GROUP, LANES), source.flatten()


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


def _logical_shift(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """Hash int64 as `kernels.sketch.splitmix64` does unsigned ones: wrapping products, shifts that bring in zeros."""
    z = x + _signed(GOLDEN)
    z = (z ^ _logical_shift(z, 30)) * _signed(MIX[0])
    z = (z ^ _logical_shift(z, 27)) * _signed(MIX[1])
    return z ^ _logical_shift(z, 31)
