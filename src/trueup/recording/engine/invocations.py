"""How a call was made, exactly, as JSON (docs/format.md): what it takes, beside its tensors, to execute it again.

`trueup.recording.execution.decoding` reads it. Nothing is pickled; what has no exact form is named by its type alone.
"""

from __future__ import annotations

import base64
import math
import zlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from trueup.foundation.redaction import conceals
from trueup.recording.recorder.arguments import MAX_DEPTH

MOST = 1 << 16
"""Longest description, without the state of generators; a longer one is left out, and the call cannot be executed again."""


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
