"""Where the state of a random generator begins to differ, of captures that keep it: detail ``tensor`` (docs/format.md).

A dropout whose generator stands elsewhere draws another mask. Then the difference begins in the random state, not in the call; and
a call that draws, among other things (attention with dropout), is known by the state that it leaves behind.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.comparison.graph.streams import NONE, Numbers, Stream

MOST_TEXT = 1 << 20
MOST_STATE = 1 << 16
"""Characters of a description and bytes of a state that are read; the largest known state (of the CPU) has 5,056."""

Known = dict[bytes, int]
"""Numbers of states: the same on both sides."""


@dataclass
class States:
    """The generators of one side, by device: the number of the state before each call, `NONE` where it is not known."""

    stream: Stream
    before: dict[str, Numbers] = field(default_factory=dict)
    described: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    """Calls of which it is known how they were made, in order."""

    def draws(self, call: int, device: str) -> bool:
        """Tell whether the state after a call is another one than before."""
        before = self.before[device]
        for later in self.described[np.searchsorted(self.described, call, "right") :].tolist():
            if self.stream.step[later] != self.stream.step[call]:
                return False
            if not self._is_inside(later, call):
                return bool(before[later] != before[call])
        return False

    def _is_inside(self, inner: int, outer: int) -> bool:
        above = int(self.stream.parents[inner])
        while above > outer:
            above = int(self.stream.parents[above])
        return above == outer


def states_of(stream: Stream, known: Known) -> States:
    """Read the states that a capture keeps; it keeps one where it is not what it was at the call before, anew in each step."""
    column = stream.invocations
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return States(stream)
    told: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for k in np.flatnonzero(pc.fill_null(pc.match_substring(column, '"random"'), False).to_numpy()).tolist():
        for device, state in _read(column[k].as_py()).items():
            told[device].append((int(stream.call[k]), known.setdefault(state, len(known))))
    found = States(stream, described=np.unique(stream.call[np.flatnonzero(column.is_valid().to_numpy())]))
    found.before = {device: _carried(stream, places) for device, places in told.items()}
    return found


def _carried(stream: Stream, told: list[tuple[int, int]]) -> Numbers:
    """Return, by call, the state that was described last in its step."""
    calls, states = (np.array(side, np.int64) for side in zip(*told, strict=True))
    last = np.searchsorted(calls, np.arange(len(stream)), "right") - 1
    at = np.maximum(last, 0)
    return np.where((last >= 0) & (stream.step[calls[at]] == stream.step), states[at], NONE)


def _read(text: str) -> dict[str, bytes]:
    found = {}
    try:
        random = json.loads(text).get("random") if len(text) <= MOST_TEXT else None
        for device, state in random.items() if isinstance(random, dict) else ():
            if isinstance(state, str) and len(state) <= 2 * MOST_STATE:
                found[str(device)] = zlib.decompressobj().decompress(base64.b64decode(state, validate=True), MOST_STATE)
    except (ValueError, AttributeError, RecursionError, zlib.error):
        return {}
    return found


class RandomStates:
    """The generators of both sides.

    Args:
        streams: baseline and candidate.
        calls: the matched calls, indices into either.
    """

    def __init__(self, streams: tuple[Stream, Stream], calls: tuple[Numbers, Numbers]) -> None:
        known: Known = {}
        self.sides = tuple(states_of(stream, known) for stream in streams)
        self._calls = calls
        self.devices = sorted(self.sides[0].before.keys() & self.sides[1].before.keys())

    def differ(self, pair: int) -> bool | None:
        """Tell whether a generator stands elsewhere when a matched call begins; None where that is not known."""
        told = [self._at(pair, device) for device in self.devices]
        known = [first != second for first, second in told if NONE not in (first, second)]
        return any(known) if known else None

    def draw(self, pair: int) -> bool:
        """Tell whether a matched call draws random numbers, on either side."""
        return any(
            side.draws(int(calls[pair]), device)
            for device in self.devices for side, calls in zip(self.sides, self._calls, strict=True)
        )  # fmt: skip

    def first(self) -> tuple[int, str] | None:
        """Return the first matched call before which a generator stands elsewhere, and its device; None where there is none."""
        found = []
        for device in self.devices:
            first, second = (side.before[device][calls] for side, calls in zip(self.sides, self._calls, strict=True))
            apart = np.flatnonzero((first != second) & (first != NONE) & (second != NONE))
            found += [(int(apart[0]), device)] if len(apart) else []
        return min(found, default=None)

    def _at(self, pair: int, device: str) -> tuple[int, int]:
        first, second = (int(side.before[device][calls[pair]]) for side, calls in zip(self.sides, self._calls, strict=True))
        return first, second
