"""FSDP1's flat parameters cut into what they are made of.

A flat parameter has all parameters of one module in one row, in the order of the model, and no names: names and shapes are those of
a checkpoint of the model as it is. Each begins at the next element, or (``use_orig_params=True``) at the next multiple of 16 bytes;
the sum of their sizes says which (``torch/distributed/fsdp/_flat_param.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from trueup.foundation.checkpoint.folders import FLAT
from trueup.foundation.checkpoint.reading import Array, Held
from trueup.foundation.model import TrueupError
from trueup.foundation.store.segment import numpy_dtype
from trueup.migration.checkpoint.naming import unwrapped


def unflattened(held: Mapping[str, Held], wanted: Mapping[str, Held], source: str) -> dict[str, Held]:
    """Return tensors with each flat parameter cut into those of the model; raises TrueupError where their sizes do not sum up."""
    plain = unwrapped(held)
    flats = {new.removesuffix(new.rpartition(".")[2]): held[name] for name, new in plain.items() if name.endswith(FLAT)}
    if not flats:
        return dict(held)
    own = {name: held[name] for name, new in plain.items() if new in wanted and held[name].shape == wanted[new].shape}
    found, there = dict(own), {plain[name] for name in own}
    parts: dict[str, list[str]] = {prefix: [] for prefix in flats}
    for name in wanted:
        owner = max((prefix for prefix in flats if name.startswith(prefix)), key=len, default=None)
        if owner is not None and name not in there:
            parts[owner].append(name)
    for prefix, flat in flats.items():
        begins = _begins([math.prod(wanted[name].shape) for name in parts[prefix]], flat)
        if begins is None:
            total = sum(math.prod(wanted[name].shape) for name in parts[prefix])
            raise TrueupError(
                f"A flat parameter of FSDP cannot be cut.\n  where:    {source}, {prefix or 'the outermost module'}\n"
                f"  expected: the {total:,} elements that the model has there by --like\n  got:      {math.prod(flat.shape):,}\n"
                "  next:     --like a checkpoint of the same model, saved without FSDP"
            )
        for name, begin in zip(parts[prefix], begins, strict=True):
            shape = wanted[name].shape
            found[name] = Held(shape, flat.dtype, partial(_cut, flat, begin, shape))
    return found


def _begins(sizes: list[int], flat: Held) -> list[int] | None:
    for step in (1, max(1, 16 // numpy_dtype(flat.dtype).itemsize)):
        begins, end = [], 0
        for size in sizes:
            begins.append(-(-end // step) * step)
            end = begins[-1] + size
        if 0 <= math.prod(flat.shape) - end < (1 if step == 1 else max(1, len(flat.pieces))):
            return begins
    return None


def _cut(flat: Held, begin: int, shape: tuple[int, ...]) -> Array:
    array: Array = flat.read()[begin : begin + math.prod(shape)].reshape(shape)
    return array
