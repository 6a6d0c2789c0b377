"""What each rank holds of a tensor, and the pieces of several ranks put together, one axis of the mesh after the other.

Along an axis a tensor is

    replicated   every rank holds the same numbers
    sharded      each rank holds a part of one dimension, in the order of the ranks or in another (`Way.order`)
    partial      the tensor is the sum (mean, maximum, norm) of what the ranks hold

so that a tensor on a mesh is as many of these as the mesh has dimensions (torch.distributed.tensor calls them placements). Bytes
are joined exactly. Of statistics alone, what can be joined is: extremes, counts, sums and sums of squares of shards; the sketch,
which is linear, of partial sums. The sketch of shards cannot, for its signs belong to the place in the shard.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Kind = Literal["replicated", "sharded", "partial"]

SUM, AVERAGE, NORM = "sum", "avg", "norm"

FOLDED: dict[str, Callable[[Array], Array]] = {
    SUM: lambda terms: terms.sum(axis=0), AVERAGE: lambda terms: terms.sum(axis=0), "max": lambda terms: terms.max(axis=0),
    "min": lambda terms: terms.min(axis=0), NORM: lambda terms: np.sqrt(np.square(terms).sum(axis=0)),
}  # fmt: skip
"""What terms of all ranks make, by `Way.reduce`; a mean is scaled beside."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a tensor lies along one axis. ``order`` of a sharded one: ``natural``; ``zigzag``: of 2n chunks rank r holds r and
    2n - 1 - r; ``strided``: its dimension is cut in ``split`` parts first, and rank r holds the r-th piece of each;
    ``interleaved``: likewise, of weights packed into one, as large as ``parts`` in proportion (queries, keys and values)."""

    kind: Kind
    dim: int = 0
    order: str = "natural"
    split: int = 1
    parts: tuple[int, ...] = ()
    reduce: str = SUM
    outer: int = 1  # of a dimension of several flattened into one: how many parts of it lie along those before the one that is cut

    def __str__(self) -> str:
        if self.kind == "sharded":
            return f"cut along dimension {self.dim}" + (f" ({self.order})" if self.order != "natural" else "")
        return "a partial sum" if self.kind == "partial" else "replicated"


REPLICATED, MASKED = Way("replicated"), Way("partial", reduce="masked")


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is known of a tensor's numbers; ``l2`` and the extremes are NaN where partial sums were added without their bytes."""

    low: float
    high: float
    mean: float
    l2: float
    counts: tuple[int, ...]  # n_nan, n_posinf, n_neginf, n_zero, n_subnormal, n_saturated


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank, or several together, hold of a tensor. ``load`` reads the bytes, None where they were not kept; ``part`` makes
    a range of rows of what is put together, None where `rows` takes it from all of them."""

    dtype: str
    shape: tuple[int, ...]
    digest: str | None = None
    numbers: Statistics | None = None
    sketch: Array | None = None
    load: Callable[[], Array] | None = None
    changed: bool = False  # whether it was put together, or scaled: digest and place of the bytes are no longer a row's
    part: Callable[[int, int], Array] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def measured(self) -> bool:
        """Whether anything is known of its numbers."""
        return self.digest is not None or self.numbers is not None

    def rows(self, start: int, stop: int) -> Array:
        """Return a range of the first dimension. What lies in a file is mapped, so that the rest of it takes no memory."""
        if self.part is not None:
            return self.part(start, stop)
        assert self.load is not None
        return self.load()[start:stop]

    def same(self, other: Piece) -> bool:
        """Tell whether two pieces hold the same numbers, as far as was recorded."""
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
        if self.digest is not None and other.digest is not None:
            return self.digest == other.digest
        return self.numbers == other.numbers and _same_sketches(self.sketch, other.sketch)


def _same_sketches(first: Array | None, second: Array | None) -> bool:
    return first is second or (first is not None and second is not None and np.array_equal(first, second))


_PLACEMENT = re.compile(r"(Shard|StridedShard|Replicate|Partial|MaskPartial|NormPartial)\(([^)]*)\)")

_NORMS = {"2": NORM, "2.0": NORM, "inf": "max", "-inf": "min"}
"""What norms of pieces make together, by their order."""


def way_in(text: Any) -> Way | None:
    """Return the way that a recorded placement names, ``Shard(0)``, ``StridedShard(0, 2)``, ``Partial(sum)``; None: of no
    known kind."""
    found = _PLACEMENT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    kind, told = found[1], [part.strip() for part in found[2].split(",")] if found[2] else []
    if kind == "Replicate":
        return REPLICATED
    if kind == "MaskPartial":
        return MASKED
    if kind == "NormPartial":
        return Way("partial", reduce=_NORMS.get(told[1], told[1]) if len(told) > 1 else NORM)
    if kind.endswith("Partial"):
        return Way("partial", reduce=told[0].lower() if told and not told[0].isdigit() else SUM)
    numbers = [int(part) for part in told if part.isdigit()]
    if len(numbers) != len(told) or not numbers:
        return None
    if kind == "Shard":
        return Way("sharded", numbers[0])
    return Way("sharded", numbers[0], "strided", numbers[1]) if len(numbers) == 2 else None


def put_together(pieces: Sequence[Piece], way: Way, scale: float = 1.0) -> Piece | None:
    """Return what pieces along an axis, in the order of their ranks, make together, each times ``scale``; None where they do not
    fit: another dtype, or sizes that differ beside the dimension that is cut."""
    first = pieces[0]
    if way.kind == "replicated":
        return first if scale == 1 else scaled(first, scale)
    if any(piece.dtype != first.dtype or len(piece.shape) != len(first.shape) for piece in pieces):
        return None
    if way.kind == "partial":
        if any(piece.shape != first.shape for piece in pieces) or way.reduce not in FOLDED:
            return None
        return _added(pieces, way.reduce, scale / len(pieces) if way.reduce == AVERAGE else scale)
    if way.dim >= len(first.shape):
        return None
    if any(piece.shape[way.dim] % sum(way.parts or (1,)) for piece in pieces):
        return None
    beside = {piece.shape[: way.dim] + piece.shape[way.dim + 1 :] for piece in pieces}
    if len(beside) != 1:
        return None
    return _joined(pieces, way, scale)


def _joined(pieces: Sequence[Piece], way: Way, scale: float) -> Piece:
    first, dim = pieces[0], way.dim
    shape = (*first.shape[:dim], sum(piece.shape[dim] for piece in pieces), *first.shape[dim + 1 :])
    loads = [piece.load for piece in pieces]

    def load() -> Array:
        arrays = [one() for one in loads if one is not None]
        if way.outer > 1:
            arrays = [one.reshape(*one.shape[:dim], way.outer, -1, *one.shape[dim + 1 :]) for one in arrays]
            whole = np.concatenate(in_order(arrays, replace(way, dim=dim + 1)), axis=dim + 1).reshape(shape)
        else:
            whole = np.concatenate(in_order(arrays, way), axis=dim)
        return _times(whole, scale)

    def part(start: int, stop: int) -> Array:
        if dim:
            return _times(np.concatenate(in_order([piece.rows(start, stop) for piece in pieces], way), axis=dim), scale)
        ends = list(itertools.accumulate(piece.shape[0] for piece in pieces))
        begins = [end - piece.shape[0] for piece, end in zip(pieces, ends, strict=True)]
        held = [
            piece.rows(max(start - begin, 0), min(stop, end) - begin)
            for piece, begin, end in zip(pieces, begins, ends, strict=True) if start < end and stop > begin
        ]  # fmt: skip
        return _times(np.concatenate(held) if held else pieces[0].rows(0, 0), scale)

    whole = None in loads
    in_parts = not whole and way.outer == 1 and (dim > 0 or way.order not in ("zigzag", "interleaved"))
    numbers = _of_shards([(piece.numbers, piece.numel) for piece in pieces], scale)
    return Piece(
        first.dtype, shape, None, numbers, None, None if whole else load, changed=True, part=part if in_parts else None
    )


def in_order(arrays: Sequence[Array], way: Way) -> list[Array]:
    """Return shards, or parts of them, in the order in which the whole has them."""
    if way.order == "zigzag":
        halves = [np.array_split(array, 2, axis=way.dim) for array in arrays]
        return [first for first, _ in halves] + [second for _, second in reversed(halves)]
    if way.order == "interleaved":
        parts = [np.split(array, _edges(array.shape[way.dim], way.parts), axis=way.dim) for array in arrays]
        return [one[n] for n in range(len(way.parts)) for one in parts]
    return list(arrays)


def _edges(length: int, parts: Sequence[int]) -> list[int]:
    return [length * before // sum(parts) for before in itertools.accumulate(parts[:-1])]


def _of_shards(held: Sequence[tuple[Statistics | None, int]], scale: float) -> Statistics | None:
    known = [(numbers, size) for numbers, size in held if numbers is not None]
    if len(known) != len(held):
        return None
    finite = [size - sum(numbers.counts[:3]) for numbers, size in known]
    total = sum(finite)
    some = [numbers for (numbers, _), count in zip(known, finite, strict=True) if count]
    mean = (
        sum(numbers.mean * count for (numbers, _), count in zip(known, finite, strict=True) if count) / total if total else math.nan
    )
    return Statistics(
        min((one.low for one in some), default=math.nan) * scale, max((one.high for one in some), default=math.nan) * scale,
        mean * scale, math.sqrt(sum(one.l2**2 for one in some)) * scale,
        tuple(sum(column) for column in zip(*(numbers.counts for numbers, _ in known), strict=True)),
    )  # fmt: skip


def _added(pieces: Sequence[Piece], reduce: str, scale: float) -> Piece:
    first = pieces[0]
    loads = [piece.load for piece in pieces]
    sketches, fold = [piece.sketch if reduce in (SUM, AVERAGE) else None for piece in pieces], FOLDED[reduce]

    def load() -> Array:
        arrays = [one() for one in loads if one is not None]
        return np.asarray(fold(np.stack([_wide(array) for array in arrays])) * scale).astype(arrays[0].dtype)

    def part(start: int, stop: int) -> Array:
        arrays = [piece.rows(start, stop) for piece in pieces]
        return np.asarray(fold(np.stack([_wide(array) for array in arrays])) * scale).astype(arrays[0].dtype)

    known = [piece.numbers for piece in pieces if piece.numbers is not None]
    numbers = None
    if len(known) == len(pieces) and not any(sum(one.counts[:3]) for one in known):
        scalar = first.numel == 1
        linear = scalar or reduce in (SUM, AVERAGE)
        mean = float(fold(np.array([one.mean for one in known]))) * scale if linear else math.nan
        numbers = Statistics(*((mean, mean, mean, abs(mean)) if scalar else (math.nan, math.nan, mean, math.nan)), (0,) * 6)
    sketch = None if any(one is None for one in sketches) else np.asarray(sum(one for one in sketches if one is not None) * scale)
    made = None if None in loads else load
    return Piece(first.dtype, first.shape, None, numbers, sketch, made, changed=True, part=part if made and first.shape else None)


def scaled(piece: Piece, scale: float) -> Piece:
    """Return a piece times a number."""
    held, load = piece.numbers, piece.load
    numbers = None
    if held is not None:
        numbers = replace(held, low=held.low * scale, high=held.high * scale, mean=held.mean * scale, l2=held.l2 * scale)
    sketch = None if piece.sketch is None else piece.sketch * scale
    return Piece(
        piece.dtype, piece.shape, None, numbers, sketch, None if load is None else lambda: _times(load(), scale), changed=True,
        part=lambda start, stop: _times(piece.rows(start, stop), scale),
    )  # fmt: skip


def _wide(array: Array) -> Array:
    return array if array.dtype.kind in "iub" else array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _times(array: Array, scale: float) -> Array:
    return array if scale == 1 else np.asarray(_wide(array) * scale).astype(array.dtype)
