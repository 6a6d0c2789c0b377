"""The states of random generators that a capture of detail ``tensor`` keeps (docs/format.md), each before a call."""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from trueup.foundation.store.call_columns import CallColumns
from trueup.foundation.store.columns import NONE, Numbers, distinct

MOST_TEXT = 1 << 20
MOST_STATE = 1 << 16
"""Characters of a description and bytes of a state that are read; the largest known state (of the CPU) has 5,056."""


def random_states(invocations: pa.ChunkedArray) -> Iterator[tuple[int, str, bytes]]:
    """Yield ``(row, device, state)``, in order."""
    import pyarrow.compute as pc  # here: it takes 0.1 s, for which a process that only records need not wait

    if not (pa.types.is_string(invocations.type) or pa.types.is_large_string(invocations.type)):
        return
    for k in np.flatnonzero(pc.fill_null(pc.match_substring(invocations, '"random"'), False).to_numpy()).tolist():
        yield from ((k, device, state) for device, state in _states_of(invocations[k].as_py()).items())


def _states_of(text: str) -> dict[str, bytes]:
    found = {}
    try:
        random = json.loads(text).get("random") if len(text) <= MOST_TEXT else None
        for device, state in random.items() if isinstance(random, dict) else ():
            if isinstance(state, str) and len(state) <= 2 * MOST_STATE:
                found[str(device)] = zlib.decompressobj().decompress(base64.b64decode(state, validate=True), MOST_STATE)
    except (ValueError, AttributeError, RecursionError, zlib.error):
        return {}
    return found


Known = dict[bytes, int]  # numbers of states: the same on both sides


@dataclass
class States:
    """The generators of one side, by device: the number of the state before each call, `NONE` where it is not known."""

    before: dict[str, Numbers] = field(default_factory=dict)
    described: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # calls whose making is known, in order


def states_of(columns: CallColumns, known: Known) -> States:
    """Read the states that a capture keeps; it keeps one where it is not what it was at the call before, anew in each step."""
    told: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for k, device, state in random_states(columns.invocations):
        told[device].append((int(columns.call[k]), known.setdefault(state, len(known))))
    found = States(described=distinct(columns.call[np.flatnonzero(columns.invocations.is_valid().to_numpy())]))
    found.before = {device: _carried(columns, places) for device, places in told.items()}
    return found


def _carried(columns: CallColumns, told: list[tuple[int, int]]) -> Numbers:
    """Return, by call, the state that was described last in its step."""
    calls, states = (np.array(side, np.int64) for side in zip(*told, strict=True))
    last = np.searchsorted(calls, np.arange(len(columns)), "right") - 1
    at = np.maximum(last, 0)
    return np.where((last >= 0) & (columns.step[calls[at]] == columns.step), states[at], NONE)
