"""The rows of a capture between the call that made them and the part that holds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.model import PACKED, packed_columns

FIELDS = (
    "step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "strides", "device",
    "numel", "value", "producer_seq", "producer_slot", "forward_seq", "site",
)  # fmt: skip
"""Fields of a row as the recorder makes it; the last element of the tuple is its `Statistics` or None."""


class Statistics:
    """What was measured of one buffer, shared by every slot that shows the same bytes.

    ``values`` is the packed float64 vector of `trueup.kernels`, as a NumPy array or still on its device; ``data`` holds the
    bytes (a copy) until the writer has taken them.
    """

    __slots__ = ("data", "digest", "values")

    def __init__(self, values: Any = None, digest: int | None = None, data: np.ndarray[Any, Any] | None = None) -> None:
        self.values = values
        self.digest = digest
        self.data = data


def columns(rows: list[tuple[Any, ...]], places: list[tuple[str, str] | None]) -> dict[str, Any]:
    """Turn rows into the columns of a part.

    Args:
        rows: tuples of `FIELDS` and a `Statistics`, whose values are NumPy arrays by now.
        places: segment and key of each row's payload.
    """
    *fields, statistics = zip(*rows, strict=True)
    table: dict[str, Any] = dict(zip(FIELDS, fields, strict=True))
    packed = np.full((len(rows), PACKED), np.nan)
    known = np.zeros(len(rows), dtype=bool)
    for k, stats in enumerate(statistics):
        if stats is not None and stats.values is not None:
            packed[k] = stats.values
            known[k] = True
    for name, column in packed_columns(np.where(known[:, None], packed, 0.0)).items():
        table[name] = column if known.all() else _masked(column, known)
    table["digest"] = [None if s is None or s.digest is None else f"{s.digest:016x}" for s in statistics]
    table["payload_segment"] = [None if p is None else p[0] for p in places]
    table["payload_key"] = [None if p is None else p[1] for p in places]
    return table


def _masked(column: np.ndarray[Any, Any], known: np.ndarray[Any, Any]) -> list[Any]:
    return [value if is_known else None for value, is_known in zip(column, known, strict=True)]
