"""The capture directory, format 2: its layout, its columns, how it is written and how it is read.

A recorder makes a ``Writer`` on the rank that ``claim`` gives it; everybody else calls ``open_capture``. No framework
is imported here, and nothing that is read is trusted. docs/format.md says the same for readers without this package.
Each name is loaded when it is first used: a training that begins to be captured waits for no Arrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.foundation.store.durable import Displaced as Displaced
    from trueup.foundation.store.durable import claim as claim
    from trueup.foundation.store.layout import FORMAT_VERSION as FORMAT_VERSION
    from trueup.foundation.store.reader import Capture as Capture
    from trueup.foundation.store.reader import Piece as Piece
    from trueup.foundation.store.reader import open_capture as open_capture
    from trueup.foundation.store.schema import RECORDS as RECORDS
    from trueup.foundation.store.schema import sketch_matrix as sketch_matrix
    from trueup.foundation.store.schema import statistics as statistics
    from trueup.foundation.store.schema import table as table
    from trueup.foundation.store.writer import Writer as Writer

_HOMES = {
    "Capture": "trueup.foundation.store.reader",
    "Displaced": "trueup.foundation.store.durable",
    "FORMAT_VERSION": "trueup.foundation.store.layout",
    "Piece": "trueup.foundation.store.reader",
    "RECORDS": "trueup.foundation.store.schema",
    "Writer": "trueup.foundation.store.writer",
    "claim": "trueup.foundation.store.durable",
    "open_capture": "trueup.foundation.store.reader",
    "sketch_matrix": "trueup.foundation.store.schema",
    "statistics": "trueup.foundation.store.schema",
    "table": "trueup.foundation.store.schema",
}

__all__ = [
    "FORMAT_VERSION", "RECORDS", "Capture", "Displaced", "Piece", "Writer", "claim", "open_capture",
    "sketch_matrix", "statistics", "table",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trueup.foundation.store' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
