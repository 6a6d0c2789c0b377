"""Invariants that are checked while a run goes: some steps in a row are recorded by digests, read, and thrown away.

A window is three steps: the first is not whole, for it begins where the model runs, and is left out (of a TensorFlow function it is
not there at all); the two others are judged as the steps of a capture are. A window that the run's end cuts short is not judged.
The first window begins one step after the monitor does, for optimizers make their state in the first.
What ranks hold beside each other is judged one window later, when all of them have written theirs; nothing is waited for.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from trueup.analysis.invariants.learning import Violation, broken
from trueup.analysis.invariants.relations import Invariants, beside_another, neighbours
from trueup.analysis.invariants.steps import Step, read_step
from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout, open_capture

WINDOW = 3
FOLDER = "invariants"


class Live:
    """The windows of one rank; each relation of each place is told once."""

    def __init__(self, known: Invariants, directory: Path, rank: int, every: int) -> None:
        self._known, self._directory, self._rank, self._every = known, directory / FOLDER, rank, every
        self._next: int | None = None
        self._steps: list[tuple[int, list[Step]]] = []  # of the last window: its first step, and what was held
        self._told: set[tuple[str, str, str, str]] = set()
        self.levels = tuple(dict.fromkeys(one.key[0] for one in known.relations if one.key is not None)) or ("module", "api")
        shutil.rmtree(self._own(), ignore_errors=True)  # of a run that was killed

    def due(self, step: int) -> bool:
        """Tell whether a window begins with a step."""
        if self._next is None:
            self._next = step + 1
        return step >= self._next

    def folder(self, step: int) -> Path:
        """Return where a window that begins with a step is recorded."""
        self._next = step + max(self._every, WINDOW + 1)
        return self._own() / f"step-{step:06d}"

    def _own(self, rank: int | None = None) -> Path:
        return self._directory / layout.rank_name(self._rank if rank is None else rank)

    def judge(self, first: int) -> list[Violation]:
        """Judge the window that began with a step; what was told before is not told again. Raises TrueupError or OSError where
        nothing can be read."""
        now = self._read(self._rank, first)
        found = list(broken(self._known, {self._rank: now})[0])
        if self._steps:
            before, steps = self._steps[-1]
            for rank in neighbours(self._rank, range(self._rank)):
                try:
                    others = self._read(rank, before)
                except (TrueupError, OSError):  # it is late, or no such rank is checked
                    continue
                for one, step in zip(others, steps, strict=False):
                    found += broken(self._known, list(beside_another(one, step)))[0]
        self._steps.append((first, now))
        if len(self._steps) > 2:
            gone, _ = self._steps.pop(0)
            shutil.rmtree(self._own() / f"step-{gone:06d}", ignore_errors=True)
        new = [one for one in found if (one.relation, one.scope, one.op, one.slot) not in self._told]
        self._told |= {(one.relation, one.scope, one.op, one.slot) for one in new}
        return new

    def _read(self, rank: int, first: int) -> list[Step]:
        capture = open_capture(self._own(rank) / f"step-{first:06d}")
        some = len(capture.steps) < WINDOW  # the function that ran as the window began was not recorded, only what followed it
        there = capture.steps[not some : WINDOW]
        shift = first + WINDOW - 1 - max(there, default=0)
        steps = [one for number in there if (one := read_step(capture, rank, number, shift)) is not None]
        return [replace(one, whole=False) if some and one is steps[0] else one for one in steps]

    def close(self) -> None:
        """Remove what is left."""
        shutil.rmtree(self._own(), ignore_errors=True)
        try:
            self._directory.rmdir()
        except OSError:  # another rank's
            return
