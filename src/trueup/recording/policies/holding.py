"""What a module, or Layer, is made to hold while it runs under a rule: another forward, other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Place = tuple[Any, Any]
"""A dict or a list, and the key of a tensor in it."""


@contextmanager
def forward_replaced(module: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let a module's forward be another function in a block; whoever replaced it on the object before is still called."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = make(module.forward)
    try:
        yield
    finally:
        if before is None:
            own.pop("forward", None)
        else:
            own["forward"] = before


@contextmanager
def holding(places: Sequence[Place], before: Sequence[Any], now: Sequence[Any]) -> Iterator[None]:
    """Let modules hold other tensors in a block; what the block itself put in their place stays."""
    changed = [(where, key, old, new) for (where, key), old, new in zip(places, before, now, strict=True) if old is not new]
    for where, key, _, new in changed:
        where[key] = new
    try:
        yield
    finally:
        for where, key, old, new in changed:
            if (isinstance(where, list) or key in where) and where[key] is new:
                where[key] = old
