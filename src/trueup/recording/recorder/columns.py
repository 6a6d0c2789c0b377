"""The columns that the store takes, made of rows on the writer's thread.

Apart from `rows` because it needs Arrow, which takes longer to load than all that a training waits for before its first step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.foundation.model import PACKED
from trueup.foundation.store import statistics as spread
from trueup.foundation.store import table
from trueup.recording.recorder.rows import FIELDS, Call, Place, Rows, Slot, Statistics, fields


def parts(rows: Rows, places: Sequence[Place | None]) -> dict[int, pa.Table]:
    """Return the rows of each step as a table, statistics on the host by now; made as one and taken apart, for few rows cost as
    much as many."""
    steps = np.array(rows[::FIELDS], np.int64)
    whole = table(columns(rows, places))
    edges = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    spans: defaultdict[int, list[pa.Table]] = defaultdict(list)
    for start, stop in pairwise(edges):  # as a rule the rows of a step lie together
        spans[int(steps[start])].append(whole.slice(start, stop - start))
    return {step: pa.concat_tables(tables) for step, tables in spans.items()}


def columns(rows: Rows, places: Sequence[Place | None]) -> dict[str, Any]:
    """Turn rows into the columns of a part."""
    _, calls, slots, values, producers, statistics = fields(rows)
    found = _of_calls(calls) | _of_slots(slots) | _of_producers(producers) | _of_statistics(statistics)
    found |= _of_values(values)
    if any(places):
        for k, name in enumerate(("payload_segment", "payload_key", "payload_view")):
            found[name] = [None if place is None else place[k] for place in places]
    return found


def _of_values(values: Sequence[Any]) -> dict[str, Any]:
    """Return the non-tensor arguments; where detail `tensor` keeps how calls were made, in a column of its own."""
    if tuple not in set(map(type, values)):
        return {"value": values}
    pairs = [v if type(v) is tuple else (v, None) for v in values]
    return {"value": [given for given, _ in pairs], "invocation": [made for _, made in pairs]}


def _of_calls(calls: Sequence[Call]) -> dict[str, Any]:
    distinct, number = _distinct(calls)
    kinds, kind = _distinct([call.kind for call in distinct])
    kind = kind.take(number)
    return {name: _taken([getattr(one, name) for one in kinds], kind) for name in ("level", "phase", "scope", "op")} | {
        name: _taken(map(attrgetter(name), distinct), number, pa.int64())
        for name in ("seq", "parent", "ordinal", "forward_seq", "site")
    }


def _of_slots(slots: Sequence[Slot]) -> dict[str, Any]:
    distinct, numbers = _distinct(slots)
    found = {"slot": _taken([slot.name for slot in distinct], numbers)}
    for name, kind in (
        ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("strides", pa.list_(pa.int64())), ("device", pa.string()),
        ("numel", pa.int64()),
    ):  # fmt: skip
        found[name] = _taken([None if s.tensor is None else getattr(s.tensor, name) for s in distinct], numbers, kind)
    return found


def _of_producers(producers: Sequence[tuple[int, str] | None]) -> dict[str, Any]:
    return {
        "producer_seq": [None if p is None else p[0] for p in producers],
        "producer_slot": [None if p is None else p[1] for p in producers],
    }


def _of_statistics(statistics: Sequence[Statistics | None]) -> dict[str, Any]:
    known = [k for k, s in enumerate(statistics) if s is not None and s.values is not None]
    packed = np.frombuffer(b"".join([bytes(statistics[k].values) for k in known]))  # type: ignore[union-attr]
    found = spread(packed.reshape(-1, PACKED), np.array(known, dtype=np.int64), len(statistics))
    found["digest"] = _hexadecimal([None if s is None else s.digest for s in statistics])
    return found


def _hexadecimal(digests: Sequence[int | None]) -> pa.Array:
    """Write each number with 16 digits."""
    text = np.array([0 if number is None else number for number in digests], ">u8").tobytes().hex().encode()
    ends = np.arange(0, len(text) + 1, 16, dtype=np.int64)
    known = np.packbits([number is not None for number in digests], bitorder="little")
    buffers = (pa.py_buffer(ends), pa.py_buffer(text), pa.py_buffer(known))
    return pa.LargeStringArray.from_buffers(len(digests), *buffers).cast(pa.string())


def _distinct(objects: Sequence[Any]) -> tuple[list[Any], pa.Array]:
    """Return the distinct objects, and for each object its number among them."""
    number = {found: k for k, found in enumerate(dict.fromkeys(objects))}
    return list(number), pa.array([number[one] for one in objects], pa.int32())


def _taken(values: Iterable[Any], numbers: pa.Array, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, kind or pa.string()).take(numbers)
