"""Arguments, results and modules with other tensors in their places, made anew or changed for a block where needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trueup.recording.recorder.arguments import MAX_DEPTH

Change = Callable[[Any], Any]
Special = Callable[[Any, Change], Any]
"""Takes a value and what changes its parts; returns it changed, or `NotImplemented` where it is nothing special."""


def mapped(value: Any, change: Change, is_leaf: Callable[[Any], bool], special: Special | None = None, depth: int = 0) -> Any:
    """Return a value with every leaf changed, itself where none did; ``special`` maps a framework's own containers."""
    if is_leaf(value):
        return change(value)
    if depth > MAX_DEPTH:
        return value

    def inner(item: Any) -> Any:
        return mapped(item, change, is_leaf, special, depth + 1)

    if special is not None and (made := special(value, inner)) is not NotImplemented:
        return made
    if isinstance(value, (tuple, list)):
        return same_or(value, [inner(item) for item in value], list(value), lambda new: _sequence(value, new))
    if isinstance(value, dict):
        return _mapping(value, inner)
    if hasattr(type(value), "__dataclass_fields__") and not isinstance(value, type):
        return _fields(value, inner)
    return value


def leaves(value: Any, is_leaf: Callable[[Any], bool], special: Special | None = None) -> list[Any]:
    """Return every leaf of a nested value, in order; see `mapped`."""
    found: list[Any] = []

    def take(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(value, take, is_leaf, special)
    return found


def same_or(value: Any, new: list[Any], old: list[Any], make: Callable[[list[Any]], Any]) -> Any:
    """Return a value as it is where none of its parts changed, else what ``make`` gives of the new ones."""
    return value if all(a is b for a, b in zip(new, old, strict=True)) else make(new)


def _sequence(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items) if type(value) is tuple or isinstance(value, list) else tuple(items)


def _mapping(value: dict[Any, Any], inner: Change) -> Any:
    new = {key: inner(item) for key, item in value.items()}
    changed = [key for key in new if new[key] is not value[key]]
    if not changed:
        return value
    other = copy.copy(value)
    for key in changed:
        other[key] = new[key]  # the results of transformers keep their attributes in step
    return other


def _fields(value: Any, inner: Change) -> Any:
    names = [name for name in value.__dataclass_fields__ if hasattr(value, name)]
    new = {name: inner(getattr(value, name)) for name in names}
    changed = [name for name in names if new[name] is not getattr(value, name)]
    if not changed:
        return value
    other = copy.copy(value)
    for name in changed:
        object.__setattr__(other, name, new[name])
    return other


Place = tuple[Any, Any]
"""A dict or a list, and the key of a tensor in it."""


@contextmanager
def forward_replaced(module: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a module's forward in a block; an earlier replacement on the object is still called."""
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
    """Give modules different tensors in a block; tensors that the block itself put there stay."""
    changed = [(where, key, old, new) for (where, key), old, new in zip(places, before, now, strict=True) if old is not new]
    for where, key, _, new in changed:
        where[key] = new
    try:
        yield
    finally:
        for where, key, old, new in changed:
            if (isinstance(where, list) or key in where) and where[key] is new:
                where[key] = old
