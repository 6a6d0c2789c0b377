"""What a capture's records tell at a glance, gathered as they are read: calls, losses, where a GradScaler worked, and how its scale
went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import pyarrow as pa

from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.operators import named
from trueup.foundation.store.columns import NONE, Numbers
from trueup.foundation.store.reader import Capture
from trueup.foundation.words.anomaly_sentence import loss_scale


class Overview:
    """The calls and losses of a capture."""

    COLUMNS = ("rank", "step", "seq", "op", "mean")

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.calls = 0
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self.scaled: set[int] = set()  # steps in which a GradScaler worked

    def add(self, table: pa.Table) -> None:
        """Count in some records: `COLUMNS` of whole steps of a rank."""
        changes = np.zeros(max(table.num_rows - 1, 0), dtype=bool)
        for name in ("rank", "step", "seq"):  # sorted by these
            column = table[name].to_numpy()
            changes |= column[1:] != column[:-1]
        self.calls += int(np.count_nonzero(changes)) + bool(table.num_rows)
        found = table.take(pa.array(_rows_of(table["op"], {*named("loss"), *named("scaler")})))
        for row in found.to_pylist():
            if row["op"] in named("scaler"):
                self.scaled.add(row["step"])
            elif row["mean"] is not None:  # else no statistics were kept
                self._losses[row["step"]].append(float(row["mean"]))

    def add_the_rest(self, seen: Collection[tuple[int, int]]) -> None:
        """Read what is missing: all but some ranks and steps."""
        left = [place for place in self._capture.sizes if place not in seen]
        for rank in sorted({rank for rank, _ in left}):
            steps = [step for other, step in left if other == rank]
            self.add(self._capture.records(columns=list(self.COLUMNS), rank=rank, step=steps))

    def told(self) -> tuple[int, dict[int, list[float]], set[int]]:
        """Return what was gathered, for `count_in` of another."""
        return self.calls, dict(self._losses), self.scaled

    def count_in(self, calls: int, losses: dict[int, list[float]], scaled: set[int]) -> None:
        """Add what was gathered of other ranks."""
        self.calls += calls
        for step, values in losses.items():
            self._losses[step] += values
        self.scaled |= scaled

    @property
    def passes(self) -> dict[int, int]:
        """How often each step went backward, on all ranks."""
        return {step: len(values) for step, values in self._losses.items()}

    @property
    def losses(self) -> dict[int, float]:
        """Loss per step: the mean over ranks and micro-batches of what ``backward()`` was called on."""
        return {step: sum(values) / len(values) for step, values in sorted(self._losses.items())}


def _rows_of(names: pa.ChunkedArray, wanted: Collection[str]) -> Numbers:
    """Return the rows of a dictionary column that hold one of some names."""
    found, start = [], 0
    for chunk in names.chunks:
        places = [n for n, name in enumerate(chunk.dictionary.to_pylist()) if name in wanted]
        indices = chunk.indices.fill_null(NONE).to_numpy(zero_copy_only=False)
        found += [start + np.flatnonzero(indices == place) for place in places]
        start += len(chunk)
    return np.sort(np.concatenate([np.empty(0, np.int64), *found]))


SCALE_COLUMNS = ("step", "slot", "max", "value")


def scales(table: pa.Table) -> list[tuple[int, float, bool]]:
    """Return ``(step, scale, skipped)`` for each step of a GradScaler, given its rows in order, with at least `SCALE_COLUMNS`."""
    found: list[tuple[int, float, bool]] = []
    overflow, scale = False, None
    for row in table.select(SCALE_COLUMNS).to_pylist():
        if row["slot"] == "input.scale":
            scale, overflow = row["max"], False
        elif (row["slot"] or "").startswith("input.found_inf"):
            overflow = overflow or bool(row["max"])
        elif row["slot"] == "arguments":
            said = decoded(row["value"])
            known = said.get("scale", scale)  # a capture of digests has the arguments only
            if known is not None:
                found.append((row["step"], float(known), bool(said.get("skipped", overflow))))
    return found


def loss_scale_in(table: pa.Table) -> str | None:
    """Say how the loss scale went, or return None where there was none."""
    return loss_scale([(scale, skipped) for _, scale, skipped in scales(table)])
