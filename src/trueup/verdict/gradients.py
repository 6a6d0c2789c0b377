"""The norm of the gradients of each step, as training logs have it, told from a capture's records.

Three ways, the first that the records allow:

1. *What the optimizer is given*: the gradients that are recorded by name before an optimizer's step, where there are ranks.
2. *What the optimizer reads*: each tensor that a call of phase ``optimizer`` reads and a call of phase ``backward`` of the
   same step made. Clipping and unscaling read it before they write it, so the norm is that before them.
3. *Leaf gradients*: each gradient that an api call's backward returns for an input which no forward call of the step made.
   Uses of one parameter in several calls are not summed before the norm.

All are sqrt(sum of l2²), the l2 of each tensor being that of its finite elements.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.store import Capture

Array = np.ndarray[Any, Any]

COLUMNS = ("seq", "phase", "level", "slot", "producer_seq", "producer_slot", "l2")
FINEST = ("aten", "api", "module")
LEAVES = ("api",)
"""A module's inputs may be made by functions between modules, and an aten call in backward has no forward call."""

WAYS = {
    "given": "gradients that the optimizer was given, by the names of their parameters",
    "read": "gradients that the optimizer reads and a recorded backward call made, before clipping and unscaling",
    "leaf": "gradients of what no recorded forward call made; several uses of one parameter are not summed first",
}
PARTIAL = "; a gradient that is summed over several uses is recorded at level aten only, and left out here"
ABSENT = "no gradient of a parameter was recorded with statistics: record levels api or aten, phases backward and optimizer"


def gradient_norms(capture: Capture) -> tuple[tuple[tuple[int, float], ...], str]:
    """Return ``((step, norm), ...)``, the mean over ranks where there are several, and which tensors they are of.

    Steps where another way than the most frequent one was taken are left out: their numbers would not compare.
    """
    found: list[tuple[int, str, float]] = []
    for step in capture.steps:
        for rank in sorted(capture.ranks):
            one = _of_step(capture, rank, step)
            if one is not None:
                found.append((step, *one))
    if not found:
        return (), ABSENT
    way = Counter(way for _, way, _ in found).most_common(1)[0][0]
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for step, taken, norm in found:
        if taken == way:
            steps[step].append(norm)
    several = "; mean over ranks" if len(capture.ranks) > 1 else ""
    name, _, level = way.partition(" ")
    partial = PARTIAL if name == "read" and level != "aten" else ""
    return tuple((step, sum(norms) / len(norms)) for step, norms in sorted(steps.items())), WAYS[name] + partial + several


def _of_step(capture: Capture, rank: int, step: int) -> tuple[str, float] | None:
    """Return the way taken (with the level that was read) and the norm, None where the records tell nothing."""
    columns = _Columns(capture.records(list(COLUMNS), rank=rank, step=step))
    for way, rows in (("given", columns.given), ("read", columns.read)):
        for level in FINEST:
            chosen = rows(level)
            if len(chosen):
                return f"{way} {level}", columns.norm(chosen)
    forward = pc.fill_null(capture.records(["forward_seq"], rank=rank, step=step)["forward_seq"], -1).to_numpy()
    for level in LEAVES:
        chosen = columns.leaf(level, forward)
        if len(chosen):
            return f"leaf {level}", columns.norm(chosen)
    return None


class _Columns:
    """The rows of one rank and step as arrays; text as codes of its dictionary."""

    def __init__(self, table: pa.Table) -> None:
        self.seq = table["seq"].to_numpy()
        self.producer = pc.fill_null(table["producer_seq"], -1).to_numpy()
        self.l2 = pc.fill_null(table["l2"], math.nan).to_numpy()
        self.phase, self.level, self.slot = (_Words(table[name]) for name in ("phase", "level", "slot"))
        self.producer_slot = _Words(table["producer_slot"])
        self.known = ~np.isnan(self.l2)

    def norm(self, rows: Array) -> float:
        return math.sqrt(float(np.sum(self.l2[rows] ** 2)))

    def given(self, level: str) -> Array:
        wanted = self.phase.equal("optimizer") & self.level.equal(level) & self.known
        return np.flatnonzero(wanted & self.slot.beginning("input.") & self.slot.ending(".grad"))

    def read(self, level: str) -> Array:
        made = self.seq[self.phase.equal("backward")]
        wanted = self.phase.equal("optimizer") & self.level.equal(level) & self.known & self.slot.beginning("input.")
        rows = np.flatnonzero(wanted & np.isin(self.producer, made))
        return rows[_first_of_each(self.producer[rows], self.producer_slot.codes[rows])]

    def leaf(self, level: str, forward: Array) -> Array:
        """Gradients whose forward input, the slot of the same name, is no output of a forward call of the step."""
        made = self.seq[self.phase.equal("forward")]
        inputs = self.phase.equal("forward") & self.level.equal(level) & self.slot.beginning("input.")
        leaves = np.flatnonzero(inputs & ~np.isin(self.producer, made))
        names = {(int(self.seq[k]), self.slot.text(k).removeprefix("input.")) for k in leaves}
        gradients = np.flatnonzero(
            self.phase.equal("backward") & self.level.equal(level) & self.known & self.slot.beginning("grad_input.")
        )
        kept = [
            k for k in gradients if (int(forward[k]), self.slot.text(k).removeprefix("grad_input.")) in names
        ]
        return np.array(kept, dtype=np.int64)


class _Words:
    """A column of names as codes into a short list."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        encoded = column.combine_chunks()
        encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
        if not pa.types.is_dictionary(encoded.type):
            encoded = encoded.dictionary_encode()
        self.codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        self.words: list[str] = [word or "" for word in encoded.dictionary.to_pylist()]

    def text(self, k: Any) -> str:
        return self.words[self.codes[k]] if self.codes[k] >= 0 else ""

    def equal(self, word: str) -> Array:
        return self._where([w == word for w in self.words])

    def beginning(self, start: str) -> Array:
        return self._where([w.startswith(start) for w in self.words])

    def ending(self, end: str) -> Array:
        return self._where([w.endswith(end) for w in self.words])

    def _where(self, accepted: list[bool]) -> Array:
        found: Array = np.array([*accepted, False])[self.codes]  # code -1, null, is the last
        return found


def _first_of_each(*keys: Array) -> Array:
    """Return the places of the first of each distinct combination of keys."""
    if not len(keys[0]):
        return np.empty(0, dtype=np.int64)
    return np.sort(np.unique(np.stack(keys, axis=1), axis=0, return_index=True)[1])
