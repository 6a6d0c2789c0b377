"""Execution order and ordinals: what names a call in its step, given as the calls of a dump come in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from trueup.exchange.readers.dump import ForeignCall


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call stands in its rank and step."""

    seq: int
    ordinal: int


class Numbering:
    """Numbers the calls of one part.

    Args:
        order: keys in order of execution; calls that it lacks come after them, in the order in which they are met.
        first: number of the first call, for ``seq`` goes on from step to step.
    """

    def __init__(self, order: Iterable[str], first: int) -> None:
        self._seqs: dict[str, int] = {}
        for key in order:
            self._seqs.setdefault(key, first + len(self._seqs))
        self._first = first
        self._places: dict[str, Place] = {}
        self._ordinals: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)

    @property
    def next(self) -> int:
        """The number after the last."""
        return self._first + len(self._seqs)

    @property
    def calls(self) -> int:
        """Calls that were placed."""
        return len(self._places)

    def place(self, call: ForeignCall) -> Place:
        """Return the place of a call; pieces of one call share it."""
        known = self._places.get(call.key)
        if known is None:
            kind = call.phase, call.level, call.scope, call.op
            known = self._places[call.key] = Place(self._seq(call.key), self._ordinals[kind])
            self._ordinals[kind] += 1
        return known

    def seq(self, key: str | None) -> int | None:
        """Return the number of another call, None where the dump does not hold it."""
        return None if key is None else self._seqs.get(key)

    def _seq(self, key: str) -> int:
        return self._seqs.setdefault(key, self._first + len(self._seqs))
