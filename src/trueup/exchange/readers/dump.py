"""What a reader gives: a dump as parts of one rank and step, each a stream of calls with their tensors.

This is the interface between the readers, one file for each format, and `importing`, which makes a capture of what any of them
found. Names are Trueup's already; numbers (execution order, ordinals) are given by the importer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.tree import Tree

Array = NDArray[Any]
Frames = tuple[tuple[str, ...], str | None]
"""A call stack: frames ``file:line in function``, innermost first, and the text of the innermost line."""


class UnreadableError(Exception):
    """A tensor that cannot be had; the message says why, in a few words."""


@dataclass(slots=True)
class ForeignTensor:
    """A tensor of a call as the dump tells it; what it does not tell is None or empty."""

    slot: str
    name: str
    """As the tool called it."""
    dtype: str | None = None
    """Without a framework's prefix, as in a record."""
    shape: tuple[int, ...] | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Columns of a record (``min``, ``l2``, ``n_nan`` ...) that the tool's numbers say."""
    told: str | None = None
    """JSON: the tool's numbers where they do not mean what ours do."""
    checksum: str | None = None
    """``algorithm:value``."""
    load: Callable[[], Array] | None = None
    """Reads the elements; raises UnreadableError."""
    value: str | None = None
    """JSON: of a local shard, its part in the whole."""
    device: str | None = None
    strides: tuple[int, ...] | None = None


@dataclass(slots=True)
class ForeignCall:
    """A call, or a piece of one: pieces of the same key are one call."""

    key: str
    """What names the call in its part."""
    level: str
    phase: str
    scope: str
    op: str
    tensors: Sequence[ForeignTensor] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Non-tensor arguments by position or name."""
    parent: str | None = None
    """Key of the enclosing call."""
    forward: str | None = None
    """Key of the forward call of a backward call."""
    frames: Frames | None = None


@dataclass(slots=True)
class Part:
    """One rank and step."""

    rank: int
    step: int
    calls: Callable[[], Iterator[ForeignCall]]
    """Reads the calls, in order of the file, as often as it is asked for."""
    order: Callable[[], Iterable[str]] | None = None
    """Gives the keys in order of execution, where that is not the file's."""


@dataclass(slots=True)
class Dump:
    """What a reader found in a folder."""

    tool: str
    """Name and, where it is known, version: ``msprobe``, ``ptdbg 2.0``."""
    framework: str | None
    levels: tuple[str, ...]
    detail: str
    parts: list[Part]
    notes: Notes
    lacks: list[str] = field(default_factory=list)
    """One sentence for each thing that such a dump does not tell, so how far a comparison goes."""


class Reader(Protocol):
    """A format: a module of this package."""

    NAME: str
    """As ``--format`` takes it."""

    def find(self, tree: Tree, notes: Notes) -> Dump | None:
        """Return the dump that lies there, None where the files are of another format; told by content."""


def plain(array: Array) -> Array:
    """Return an array as the kernels take it: native byte order.

    Raises:
        UnreadableError: it holds no numbers.
    """
    if array.dtype.hasobject or array.dtype.kind in "OSUmM" or array.dtype.names is not None:
        raise UnreadableError(f"dtype {array.dtype} holds no numbers")
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return np.asarray(array)
