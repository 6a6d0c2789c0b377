"""Tensors with which a rank begins and that one rank hands out to all: DDP's first weights and buffers, a loop of broadcasts.

What the root gives is where a difference starts: in what that rank began with. What another rank had is replaced, and no reason for
anything; a capture holds no input of its broadcast.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers, Row, Stream, is_input, is_output

FROM_ROOT = ("broadcast", "scatter")
"""What only the root gives, by the operator's name."""

SAME = 1e-9
"""Relative difference of the norms of the same elements, added in another order."""

Use = Literal["handed out", "moved", "read"]
"""What becomes of a tensor: this rank gives it to all; a call shows or copies it, and nobody reads that; it is computed with."""


def gives_only_root(op: str) -> bool:
    """Tell whether a collective takes what one rank gives and no other: ``c10d::broadcast_``."""
    return op.rpartition(":")[2].rpartition(".")[2].startswith(FROM_ROOT)


def replaced_note(call: Row, slot: str) -> str:
    """Say of a tensor that differs that it does no harm."""
    return f"{slot} of {call.key} differs when the run begins, and what another rank hands out replaces it before anything reads it"


def from_root(stream: Stream) -> Array:
    """Tell which calls hand something out from one rank to all."""
    return np.asarray(stream.during("collective") & stream.names.table(gives_only_root)[stream.op])


def receives(stream: Stream) -> bool:
    """Tell whether this rank gets something that another one hands out."""
    return any(_root(stream, int(call)) not in (None, stream.rank) for call in np.flatnonzero(from_root(stream)))


def use_of(stream: Stream, call: int) -> Use:
    """Tell what a call does with a tensor that no recorded call made."""
    if _hands_out(stream, [call]):
        return "handed out"
    if not _moves(stream, call):
        return "read"
    readers = _readers(stream, call)
    return "handed out" if _hands_out(stream, readers) else "read" if readers else "moved"


def _hands_out(stream: Stream, calls: list[int]) -> bool:
    collective, from_one = stream.names.number("collective"), stream.names.table(gives_only_root)
    return any(
        stream.phase[call] == collective and from_one[stream.op[call]] and _root(stream, call) == stream.rank for call in calls
    )


def _root(stream: Stream, call: int) -> int | None:
    root = stream.given(call).get("root")
    return root if isinstance(root, int) else None


def _readers(stream: Stream, call: int) -> list[int]:
    at = np.flatnonzero((stream.producer == stream.seq[call]) & (stream.call != call))
    return list(np.unique(stream.call[at[stream.names.table(is_input)[stream.slot[at]]]]).tolist())


def _moves(stream: Stream, call: int) -> bool:
    """Tell whether a call returns the elements that it got and no others: a view, a concatenation."""
    slots = np.arange(*stream.starts[call : call + 2].tolist())
    sides: list[Numbers] = [slots[stream.names.table(of)[stream.slot[slots]]] for of in (is_input, is_output)]
    numel, squares = ([float(column.sum()) for column in columns] for columns in (
        [stream.numel[side] for side in sides], [stream.l2[side] ** 2 for side in sides]
    ))  # fmt: skip
    return len(sides[1]) > 0 and numel[0] == numel[1] and bool(np.isclose(squares[1], squares[0], rtol=SAME, atol=0.0))
