"""Simpler arguments and elements: what may stand for a number, a flag, a list or a tensor of a call that is shrunk."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.recording.execution.chains import Chain

Place = tuple[Any, ...]
"""Way to an argument: the call's place in the chain, then keys."""


def invocation(chain: Chain, k: int) -> dict[str, Any]:
    """Return a copy of how a call was made."""
    made = chain.cases[k].made.invocation
    return {"args": []} if made is None else copy.deepcopy(dict(made))


def leaves(chain: Chain) -> Iterator[tuple[Place, Any]]:
    """Yield numbers and flags among the arguments, with the way to each."""

    def walk(node: Any, place: Place) -> Iterator[tuple[Place, Any]]:
        if isinstance(node, (bool, int, float)):
            yield place, node
        elif isinstance(node, list):
            for k, item in enumerate(node):
                yield from walk(item, (*place, k))
        elif isinstance(node, dict):
            for key in ("tuple", "size", "dict"):
                if key in node:
                    yield from walk(node[key], (*place, key))
            if place and place[-1] == "dict":
                for key, item in node.items():
                    yield from walk(item, (*place, key))

    for k in range(len(chain.cases)):
        made = invocation(chain, k)
        yield from walk(made.get("args"), (k, "args"))
        for name, value in dict(made.get("kwargs") or {}).items():
            yield from walk(value, (k, "kwargs", name))


def tensor_lists(chain: Chain) -> Iterator[tuple[Place, list[Any]]]:
    """Yield arguments that are lists of tensors."""
    for n in range(len(chain.cases)):
        made = invocation(chain, n)
        for part in ("args", "kwargs"):
            items = made.get(part) or ()
            for key, value in enumerate(items) if isinstance(items, list) else dict(items).items():
                inner = value.get("tuple", value) if isinstance(value, dict) else value
                place = (n, part, key, "tuple") if inner is not value else (n, part, key)
                if isinstance(inner, list) and len(inner) > 1 and all(isinstance(i, dict) and "tensor" in i for i in inner):
                    yield place, inner


def put(chain: Chain, place: Place, value: Any) -> Chain:
    """Return the chain with another argument."""
    changed: Any = invocation(chain, place[0])
    node = changed
    for key in place[1:-1]:
        node = node[key]
    node[place[-1]] = value
    return chain.with_invocation(place[0], changed)


def simpler(value: Any) -> list[Any]:
    """Return what may stand for a number or a flag."""
    if isinstance(value, bool):
        return [False] if value else []
    if isinstance(value, int):
        return [n for n in dict.fromkeys((0, 1, value // 2)) if 0 <= n < value]
    rounded = [0.0, 1.0, float(f"{value:.0e}")] if math.isfinite(value) else []
    return [n for n in dict.fromkeys(rounded) if n != value and len(repr(n)) < len(repr(value))]


def replaced(node: Any, slot: str) -> Any:
    """Return an invocation with None where a tensor was."""
    if isinstance(node, dict):
        if node.get("tensor") == slot:
            return None
        return {k: replaced(v, slot) for k, v in node.items()}
    return [replaced(v, slot) for v in node] if isinstance(node, list) else node


def without_keys(node: Any, keys: tuple[str, ...]) -> Any:
    """Return an invocation whose tensors lack these facts."""
    if isinstance(node, dict):
        drop = keys if "tensor" in node else ()
        return {k: without_keys(v, keys) for k, v in node.items() if k not in drop}
    return [without_keys(v, keys) for v in node] if isinstance(node, list) else node


def plainer(chain: Chain) -> Iterator[Chain]:
    """Yield it with every tensor laid out plainly, without autocast, shared memory or offsets, then with autocast."""
    arrays = {slot: t.array() for slot, t in chain.inputs.items()}
    laid = chain.with_tensors(arrays, plain=True)
    for drop in (("autocast",), ()):
        found = laid
        for k in range(len(chain.cases)):
            made: Mapping[str, Any] = without_keys(invocation(chain, k), ("offset", "shares"))
            found = found.with_invocation(k, {key: v for key, v in made.items() if key not in drop})
        yield found


def rounder(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield simpler elements: all zero, all one, then rounded ever less."""
    if not array.size:
        return
    plain: list[Callable[[], NDArray[Any]]] = [lambda: np.zeros_like(array), lambda: np.ones_like(array)]
    if array.dtype.kind not in "biuc":
        with np.errstate(all="ignore"):
            wide = array.astype(np.float64)
            scale = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
            digits = -math.floor(math.log10(scale)) if 0 < scale < 1e30 else 0
            plain += [lambda d=d: np.round(wide, d).astype(array.dtype) for d in (digits, digits + 1, digits + 2)]  # type: ignore[misc]
    for make in plain:
        made = make()
        if made.tobytes() != array.tobytes():
            yield made
        else:
            return
