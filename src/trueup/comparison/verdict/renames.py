"""Scopes that one side lacks: a module that has another name there, found by what it executes."""

from __future__ import annotations

from collections import Counter
from difflib import SequenceMatcher

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.kernels.sketch import splitmix64

MANY = 2000
"""Scopes of a side beyond which only equal names are looked for: sequences are matched in quadratic time."""


def renamed(baseline: Stream, candidate: Stream, scopes: tuple[Numbers, Numbers], ops: tuple[Numbers, Numbers]) -> dict[int, int]:
    """Pair scopes that one side lacks: candidate's number -> baseline's.

    Two scopes are one when they execute the same operators on the same shapes, at the same place in the order of such scopes. What
    their names have in common then names those that are left: ``blocks.0`` is ``layers.0``, so ``blocks.1`` may be ``layers.1``.

    Args:
        baseline: one side.
        candidate: the other.
        scopes: by call of each side, the number of the scope by which it is matched.
        ops: likewise of the operator.
    """
    if baseline.mixed:  # frameworks make other functions of a layer
        module = baseline.names.number("module")
        one, two = (np.where(s.level == module, side, NONE) for s, side in zip((baseline, candidate), scopes, strict=True))
        scopes = one, two
    held = [set(np.unique(side[side != NONE]).tolist()) for side in scopes]
    alone = [np.array(sorted(one - other), np.int64) for one, other in (held, held[::-1])]
    if not all(0 < len(one) <= MANY for one in alone):
        return {}
    orders = [_executed(*side) for side in zip((baseline, candidate), scopes, ops, alone, strict=True)]
    first, second = ([key for _, key in order] for order in orders)
    found: dict[int, int] = {}
    for block in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        for n in range(block.size):
            found[orders[1][block.b + n][0]] = orders[0][block.a + n][0]
    return found | _by_name(baseline, found, [set(one.tolist()) for one in alone])


def _executed(stream: Stream, scopes: Numbers, ops: Numbers, wanted: Numbers) -> list[tuple[int, int]]:
    """Return ``(scope, what it executes)`` in order of execution."""
    slots = splitmix64(stream.shapes.squeezed ^ splitmix64(stream.slot.astype(np.uint64)))
    kind = _summed(slots, stream.call, len(stream))
    for numbers in (stream.phase, stream.level, ops):
        kind = splitmix64(kind ^ splitmix64(numbers.astype(np.uint64)))
    at = np.flatnonzero(np.isin(scopes, wanted))
    which = np.searchsorted(wanted, scopes[at])
    keys = _summed(kind[at], which, len(wanted))
    order = dict.fromkeys(which.tolist())
    return [(int(wanted[n]), int(keys[n])) for n in order]


def _summed(values: Array, of: Numbers, count: int) -> Array:
    found = np.zeros(count, np.uint64)
    np.add.at(found, of, values)
    return found


def _by_name(stream: Stream, found: dict[int, int], alone: list[set[int]]) -> dict[int, int]:
    """Apply the most frequent change of a name's beginning to the scopes that are left."""
    names = stream.names
    left = alone[0] - set(found.values()), alone[1] - set(found)
    changes = Counter(_change(names.names[c], names.names[b]) for c, b in found.items())
    more: dict[int, int] = {}
    for (before, after), _ in changes.most_common():
        for number in sorted(left[1] - set(more)):
            name = names.names[number]
            if name == before or name.startswith(f"{before}."):
                other = names.number(after + name[len(before) :])
                if other in left[0] - set(more.values()):
                    more[number] = other
    return more


def _change(candidate: str, baseline: str) -> tuple[str, str]:
    """Return what is left of two names without the end that they share: ``a`` and ``b`` of ``a.0.fc`` and ``b.0.fc``."""
    first, second = candidate.split("."), baseline.split(".")
    while len(first) > 1 and len(second) > 1 and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return ".".join(first), ".".join(second)
