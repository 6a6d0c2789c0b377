"""The rows of a capture between the call that made them and the part that holds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.model import PACKED
from trueup.store import statistics as spread

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
    known = [k for k, s in enumerate(statistics) if s is not None and s.values is not None]
    packed = np.stack([statistics[k].values for k in known]) if known else np.empty((0, PACKED))
    table |= spread(packed, np.array(known, dtype=np.int64), len(rows))
    table["digest"] = [None if s is None or s.digest is None else f"{s.digest:016x}" for s in statistics]
    table["payload_segment"] = [None if p is None else p[0] for p in places]
    table["payload_key"] = [None if p is None else p[1] for p in places]
    return table
