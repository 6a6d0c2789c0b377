"""What a call is given: beside tensors, as JSON, the text of a slot ``arguments``; exactly, as JSON (docs/format.md), all that it
takes to execute it again; and arguments, results and modules with other tensors in their places, made anew or changed for a block.

`execution.decoding` reads the exact form. Nothing is pickled; what has no exact form is named by its type alone.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash

from trueup.foundation.redaction import conceals, redacted

MAX_LENGTH = 4000
MAX_DEPTH = 8
"""Nesting that is followed; a structure may contain itself."""

MAX_VALUES = 1 << 12
"""Encoded arguments that are kept, half a KB each; those that differ from step to step (the bounds of a slice) fill it."""

PLAIN = frozenset({int, bool, str, type(None)})


Change = Callable[[Any], Any]
Special = Callable[[Any, Change], Any]
"""Takes a value and what changes its parts; returns it changed, or `NotImplemented` where it is nothing special."""

MOST = 1 << 16
"""Longest description, without the state of generators; a longer one is left out, and the call cannot be executed again."""


class Arguments:
    """Encodes the arguments of calls of one framework, each combination once: ``tensor`` is its class of tensors, which have
    slots of their own, ``left_out`` classes expected to differ between two runs (devices, generators), ``sizes`` the class of a
    shape if no tuple, ``exact`` those whose equal values are encoded alike; ``is_named`` tells whether the text of a value is its
    name, as of a dtype."""

    def __init__(
        self, tensor: type, left_out: tuple[type, ...], sizes: type, is_named: Callable[[Any], bool], exact: tuple[type, ...] = ()
    ) -> None:
        self._tensor, self._left_out, self._is_named = tensor, left_out, is_named
        self._sequences, self._exact = (tuple, list, sizes), PLAIN.union(exact)
        self._known: dict[tuple[Any, ...], str | None] = {}

    def describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Encode the non-tensor arguments of a call as JSON, or None if there is none, without those expected to differ between
        two runs; of a text too long its length and digest, which two runs can still compare."""
        key: list[Any] = []
        try:
            for k, value in enumerate(args):
                if not isinstance(value, self._tensor):
                    key += (k, self._frozen(value))
            for name, value in kwargs.items():
                key += (name, None if isinstance(value, self._tensor) else self._frozen(value))
        except TypeError:
            return self.encode(args, kwargs)
        if not key:
            return None
        known = tuple(key)
        try:
            return self._known[known]
        except KeyError:
            if len(self._known) >= MAX_VALUES:
                self._known.clear()
            text = self._known[known] = self.encode(args, kwargs)
            return text

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Encode the non-tensor arguments of a call, which nobody has looked up before; see `describe`."""
        values = {str(k): v for k, v in enumerate(args) if self._is_value(v)}
        values |= {k: v for k, v in kwargs.items() if self._is_value(v)}
        if not values:
            return None
        text = json.dumps(redacted({k: self._encode(v) for k, v in values.items()}), sort_keys=True)
        if len(text) <= MAX_LENGTH:
            return text
        return json.dumps({"length": len(text), "xxh3": xxhash.xxh3_64_hexdigest(text.encode())})

    def _frozen(self, value: Any) -> Any:
        """Return something hashable that is equal for values encoded alike; raise `TypeError` where there is nothing so
        simple."""
        kind = type(value)
        if kind in self._exact:
            return kind, value
        if kind is float:
            return value.hex()  # tells -0.0 from 0.0, and NaN equals itself
        if kind in self._sequences:
            return tuple([self._frozen(v) for v in value])
        if kind is slice:
            return slice, self._frozen(value.start), self._frozen(value.stop), self._frozen(value.step)
        raise TypeError(kind)

    def _is_value(self, value: Any) -> bool:
        if value is None or isinstance(value, (self._tensor, *self._left_out)):
            return False
        return not (isinstance(value, (tuple, list)) and bool(value) and all(isinstance(v, self._tensor) for v in value))

    def _encode(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, self._tensor):
            return "tensor"
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (int, str)):
            return int(value) if isinstance(value, int) else str.__str__(value)
        if isinstance(value, self._left_out):
            return None
        if isinstance(value, (tuple, list)) and depth < MAX_DEPTH:
            return [self._encode(v, depth + 1) for v in value[:64]]
        if isinstance(value, dict) and depth < MAX_DEPTH:
            return {key_text(k): self._encode(v, depth + 1) for k, v in list(value.items())[:64]}
        if self._is_named(value):
            return str(value)
        if isinstance(value, slice):
            return f"{value.start}:{value.stop}:{value.step}" if _is_plain(value) else "slice of tensors"
        return type(value).__name__  # never repr(): it may be long, hold addresses, or run the user's code


def key_text(key: Any) -> str:
    """Name a key of a dict; the text of any other object may hold an address."""
    return str(key) if isinstance(key, (str, int, float)) else type(key).__name__


def _is_plain(value: slice) -> bool:
    return all(v is None or isinstance(v, int) for v in (value.start, value.stop, value.step))


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


def encode_state(state: bytes) -> str:
    """Write the state of a generator as text."""
    return base64.b64encode(zlib.compress(state, 1)).decode()


class Encoder(ABC):
    """Writes the arguments of one call."""

    tensor_type: type[Any]
    sequences: dict[type[Any], str]  # types of sequences, and under which key each is written; a list under none

    @abstractmethod
    def tensor(self, tensor: Any, slot: str) -> Any:
        """Describe a tensor, which is in that slot."""

    @abstractmethod
    def own(self, value: Any) -> Any:
        """Describe what is the framework's own: a dtype, a device; None: it is none of that."""

    def value(self, value: Any, slot: str, depth: int = 0) -> Any:
        """Write an argument."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            text = str.__str__(value)
            return {"other": "secret"} if conceals(text, slot) else text
        if isinstance(value, self.tensor_type):
            return self.tensor(value, slot)
        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if depth < MAX_DEPTH and kind in self.sequences:
            items = [self.value(v, f"{slot}.{k}", depth + 1) for k, v in enumerate(value)]
            key = self.sequences[kind]
            return {key: items} if key else items
        if kind is not int and kind is not float and (found := self.own(value)) is not None:
            return found
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if depth < MAX_DEPTH and kind is dict and all(type(k) is str for k in value):
            return {"dict": {k: self.value(v, f"{slot}.{k}", depth + 1) for k, v in value.items()}}
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return {"slice": [None if p is None else int(p) for p in parts]} if all(map(_is_bound, parts)) else {"other": "slice"}
        if value is Ellipsis:
            return {"ellipsis": True}
        return {"other": kind.__name__}


def _is_bound(part: Any) -> bool:
    return part is None or isinstance(part, (int, np.integer))
