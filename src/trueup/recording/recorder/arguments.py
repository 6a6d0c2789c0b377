"""What a call is given beside tensors, as JSON: the text of a slot ``arguments``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from trueup.foundation.redaction import redacted

MAX_LENGTH = 4000
MAX_DEPTH = 8
"""Nesting that is followed; a structure may contain itself."""

MAX_VALUES = 1 << 12
"""Encoded arguments that are kept, half a KB each; those that differ from step to step (the bounds of a slice) fill it."""

PLAIN = frozenset({int, bool, str, type(None)})


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
