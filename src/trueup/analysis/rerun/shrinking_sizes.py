"""Smaller sizes: what has one size in several tensors and arguments is one thing, and others may follow it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.rerun.shrinking_arguments import Place, leaves, put
from trueup.recording.execution.chains import Chain, Slot

COMBINATIONS = 48
"""Ways in which the other sizes may follow one that is shrunk, at most."""


def resized(chain: Chain, size: int, smaller: int) -> Iterator[Chain]:
    """Yield a chain with one size shrunk: everywhere, with the others that may follow it, then in the n-th dimensions."""
    others = sorted({n for t in chain.inputs.values() for n in t.shape if n > 1} - {size}, reverse=True)
    ways = [_following(n, size, smaller) for n in others]
    scaled, shifted = ({n: way[k] for n, way in zip(others, ways, strict=True) if k in way} for k in ("scaled", "shifted"))
    simple: list[dict[int, int]] = [scaled, {}, shifted]
    choices = [dict.fromkeys([n, *way.values()]) for n, way in zip(others, ways, strict=True)]
    combined = itertools.islice(itertools.product(*choices), COMBINATIONS)
    plans = [*simple, *(dict(zip(others, chosen, strict=True)) for chosen in combined)]
    done: set[Any] = set()
    for plan in plans:
        sizes = {size: smaller} | {n: m for n, m in plan.items() if n != m}
        if (mark := tuple(sorted(sizes.items()))) not in done:
            done.add(mark)
            yield cut(chain, sizes)
            yield cut(chain, sizes, last=True)
    places = [(slot, k) for slot, t in chain.inputs.items() for k, n in enumerate(t.shape) if n == size]
    dimensions = sorted({k for _, k in places})  # not single tensors: kernels broadcast what is no valid call any more
    for dimension in dimensions if len(dimensions) > 1 else ():
        yield cut(chain, {size: smaller}, only={p for p in places if p[1] == dimension})


def _following(other: int, size: int, smaller: int) -> dict[str, int]:
    found = {}
    if other * smaller % size == 0 and (scaled := other * smaller // size) >= 1:
        found["scaled"] = scaled
    if other - size + smaller >= 1:
        found["shifted"] = other - size + smaller
    return found


def halved(chain: Chain, place: Place, nodes: list[Any], half: list[Any]) -> Iterator[Chain]:
    """Yield a chain with a list of tensors halved, alone and with a number and sizes that may go along: layers, directions."""
    base = chain
    for node in nodes:
        if node not in half:
            base = base.without((place[0], str(node["tensor"])))
    base = put(base, place, half)
    numbers: list[dict[Place, Any]] = [{}]
    for where, value in leaves(base):
        if isinstance(value, bool):
            numbers.append({where: not value})
        elif isinstance(value, int) and value > 1 and value % 2 == 0:
            numbers.append({where: value // 2})
    sizes = sorted({n for t in base.inputs.values() for n in t.shape if n > 1 and n % 2 == 0})
    for change in numbers:
        changed = base
        for where, value in change.items():
            changed = put(changed, where, value)
        yield changed
        for several in (1, 2):
            for chosen in itertools.combinations(sizes, several):
                yield cut(changed, {n: n // 2 for n in chosen})


def cut(chain: Chain, sizes: Mapping[int, int], *, only: set[tuple[Slot, int]] | None = None, last: bool = False) -> Chain:
    """Return a chain with sizes replaced, in tensors and, where all of them are meant, in arguments."""
    arrays = {}
    for slot, tensor in chain.inputs.items():
        cuts = []
        for k, n in enumerate(tensor.shape):
            m = sizes.get(n, n) if only is None or (slot, k) in only else n
            cuts.append(slice(n - m, n) if last else slice(0, m))
        if any(c.stop - c.start != n for c, n in zip(cuts, tensor.shape, strict=True)) or _is_index(tensor.array(), sizes):
            arrays[slot] = _within(np.ascontiguousarray(tensor.array()[tuple(cuts)]), sizes)
    changed = chain.with_tensors(arrays)
    if only is not None:
        return changed
    for place, value in list(leaves(changed)):
        if type(value) is int and value in sizes:
            changed = put(changed, place, sizes[value])
    return changed


def _is_index(array: NDArray[Any], sizes: Mapping[int, int]) -> bool:
    return array.dtype.kind in "iu" and array.size > 0 and any(int(array.max()) < n for n in sizes)


def _within(array: NDArray[Any], sizes: Mapping[int, int]) -> NDArray[Any]:
    """Keep integers that are all below a size, such as indices of rows, below what it becomes; negative ones stay (padding)."""
    if array.dtype.kind not in "iu" or not array.size:
        return array
    above = [m for n, m in sizes.items() if array.max() < n]
    return np.where(array >= 0, array % max(above), array).astype(array.dtype) if above else array
