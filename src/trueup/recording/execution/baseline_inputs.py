"""What a baseline's calls were given: the tensors that `trueup capture --inputs-from BASE` puts in place of a run's own.

Knows no framework: arrays by the key of the forward call, read from a capture of detail ``tensor`` when a step is reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.model import LEVELS, TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.recording.execution.recorded import home_of, read_invocation, states_of

Key = tuple[str, str, str, int]
"""Phase, scope, operator (module class, function) and ordinal of a call."""

COLUMNS = ("seq", "phase", "scope", "op", "ordinal", "slot", "dtype", "shape", "forward_seq", "payload_segment", "payload_key",
           "payload_view", "digest")  # fmt: skip


@dataclass(slots=True)
class Kept:
    """Where the tensors of a call lie, by slot: rows of the capture."""

    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``input.0``, and its weights, ``param.weight``."""
    gradients: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the call's outputs, as its backward got them: ``grad_output.0``."""
    random: dict[str, bytes] = field(default_factory=dict)
    """States of the generators that were noted when it began, by type of device."""
    place: tuple[Key | None, int] | None = None
    """Of an operator: the function that it is executed for, and its number among that one's operators."""


class BaselineInputs:
    """The baseline of a forced run, a step at a time; ``level`` tells whose calls lend their inputs, None: ``module`` where the
    baseline has it, else ``api``, else ``aten``. Raises TrueupError where it is no capture, or lacks the level or tensors."""

    def __init__(self, path: str | Path, level: str | None = None) -> None:
        self.path = Path(path)
        self._capture: Capture = open_capture(self.path)
        root = self._capture.root
        levels, detail = root.get("levels"), root.get("detail")
        there = [name for name in LEVELS if isinstance(levels, list) and name in levels and level in (None, name)]
        if detail != "tensor" or not there:
            wanted = level or "module"
            raise TrueupError(
                f"{path} cannot lend its inputs.\n  expected: a capture of level {wanted} with --detail tensor\n"
                f"  got:      levels {levels}, detail {detail}\n"
                f"  next:     trueup capture --level {wanted} --detail tensor -o BASE -- COMMAND, where the run is trusted"
            )
        self.level = there[0]
        both = [name for name in ("api", "aten") if isinstance(levels, list) and name in levels]
        self.levels = (self.level,) if self.level == "module" else tuple(both) if self.level == "aten" else ("api",)
        """Levels whose calls are forced: with operators the functions around them, whose records are then of the same inputs."""
        self.home = home_of(self._capture.ranks.values())
        self._step: tuple[int, int] | None = None
        self._calls: dict[Key, Kept] = {}

    def step(self, rank: int, step: int) -> dict[Key, Kept]:
        """Return the calls of a step; the last step asked for is kept."""
        if self._step != (rank, step):
            self._step, self._calls = (rank, step), self._read(rank, step)
        return self._calls

    def holds(self, step: int) -> bool:
        """Tell whether the baseline has a step."""
        return step in self._capture.steps

    def array(self, rank: int, row: dict[str, Any]) -> NDArray[Any]:
        """Return a tensor as a read-only array of its shape; raise `TrueupError` where it was not kept, or is damaged."""
        if row["payload_segment"] is None:
            raise TrueupError("its bytes were not kept")
        place = (row[name] for name in ("payload_segment", "payload_key", "payload_view", "digest"))
        array = self._capture.payload(rank, *place)
        shape = [int(size) for size in row["shape"] or ()]
        if int(np.prod(shape)) != array.size:
            raise TrueupError(f"its {array.size} elements are not those of shape {shape}")
        return array.reshape(shape)

    def _read(self, rank: int, step: int) -> dict[Key, Kept]:
        if step not in self._capture.steps or rank not in self._capture.ranks:
            return {}
        rows = self._capture.records(COLUMNS, rank=rank, step=step, level=self.level).to_pylist()
        found: dict[Key, Kept] = {}
        by_seq: dict[int, Key] = {}
        for row in rows:
            key = row["phase"], row["scope"], row["op"], row["ordinal"]
            if row["slot"].startswith(("input.", "param.")) and not (self.level == "module" and row["phase"] == "backward"):
                by_seq[row["seq"]] = key
                found.setdefault(key, Kept()).inputs[row["slot"]] = row
        for row in rows:
            key_of = by_seq.get(row["forward_seq"]) if row["phase"] == "backward" else None
            if key_of is not None and row["slot"].startswith("grad_output."):
                found[key_of].gradients.setdefault(row["slot"], row)
        if self.level == "aten":
            self._place(rank, step, found, by_seq)
        for seq, states in self._states(rank, step) if self.level != "module" else ():
            if seq in by_seq:
                found[by_seq[seq]].random = states
        return found

    def _place(self, rank: int, step: int, found: dict[Key, Kept], by_seq: dict[int, Key]) -> None:
        """Note of each operator what it is executed for, and its number there."""
        names = ["seq", "parent", "forward_seq", "level", "phase", "scope", "op", "ordinal"]
        rows = {row["seq"]: row for row in self._capture.records(names, rank=rank, step=step, level=["api", "aten"]).to_pylist()}
        functions = {s: (r["phase"], r["scope"], r["op"], r["ordinal"]) for s, r in rows.items() if r["level"] == "api"}
        counts: Counter[int | None] = Counter()
        for seq, row in sorted(rows.items()):
            if row["level"] == "aten":
                owner = functions.get(row["forward_seq"] if row["phase"] == "backward" else row["parent"])
                if seq in by_seq:
                    found[by_seq[seq]].place = owner, counts[row["parent"]]
                counts[row["parent"]] += 1

    def _states(self, rank: int, step: int) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yield execution numbers of a step's calls of all levels, with the generators' states when each began, as far as noted."""
        if "invocation" not in self._capture.names:
            return
        rows = self._capture.records(["seq", "slot", "invocation"], rank=rank, step=step).to_pylist()
        states: dict[str, bytes] = {}
        for row in rows:
            if row["slot"] == "arguments":
                if '"random"' in (row["invocation"] or "") and (made := read_invocation(row["invocation"])) is not None:
                    states = states | dict(states_of(made))
                yield row["seq"], states
