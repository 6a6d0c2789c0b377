"""The files of ptdbg_ascend, made of a native capture: ``dump.pkl`` of JSON lines, ``dump/*.npy``, and a marker beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from trueup.exchange.readers.ascend import MARKER, NAMES, Marker
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.version import VERSION
from trueup_compat.files import Row, calls_of, frames_of, numbers_of, payload_of, savable
from trueup_compat.names import CallName, tool_slot
from trueup_compat.ptdbg_ascend.layout import Layout
from trueup_compat.ptdbg_ascend.modes import Dump

COLUMNS = (
    "step", "seq", "level", "phase", "op", "slot", "dtype", "shape", "numel", "min", "max", "mean", "l2", "n_nan", "n_posinf",
    "n_neginf", "digest", "payload_segment", "payload_key", "payload_view", "value", "site",
)  # fmt: skip
CALLS = 2_000
"""Calls whose rows are read at a time."""
SEVERAL = "several-captures"
"""Named by the marker of a file that holds calls of more than one capture; there is none of that name, so the file is read."""
SCALARS = {bool: "<class 'bool'>", int: "<class 'int'>", float: "<class 'float'>"}


def in_tree(row: Mapping[str, Any], filtered: bool, sides: Sequence[str]) -> str | None:
    """Return the tool's name of a slot, ``input.0``; None where its files have none."""
    slot = tool_slot(row["op"], row["slot"])
    if slot is None or row["dtype"] is None:
        return None
    if filtered and (row["dtype"].startswith(("int", "uint", "bool")) or not row["shape"] or row["numel"] == 0):
        return None
    direction = "backward" if row["phase"] == "backward" else "forward"
    if "all" in sides:
        return slot
    directions = {side for side in sides if side in ("forward", "backward")} or {direction}
    ends = {side for side in sides if side in ("input", "output")} or {slot.partition(".")[0]}
    return slot if direction in directions and slot.partition(".")[0] in ends else None


@dataclass(slots=True)
class Tree:
    """One dump of this process, written whenever a capture has more."""

    layout: Layout
    root: Path
    native: Path
    rank: int
    levels: tuple[str, ...] = ("api",)
    _begun: dict[Path, Path] = field(default_factory=dict)
    """The capture that each file of records was begun with."""

    def write(self, dump: Dump, native_rank: int, names: Mapping[int, CallName]) -> int:
        """Add calls of the capture to the files; return how many had rows.

        Args:
            dump: what the script asked for.
            native_rank: of this process in the capture.
            names: of the calls, by their `seq`.

        Raises:
            TrueupError: the files cannot be written.
        """
        capture = open_capture(self.native)
        written = 0
        try:
            for step in capture.steps:
                rows = capture.records(["seq"], rank=native_rank, step=step)["seq"].to_numpy()
                seqs = [seq for seq in np.unique(rows).tolist() if seq in names]
                if seqs:
                    written += self._write_step(dump, capture, native_rank, step, seqs, names)
        except OSError as error:
            raise TrueupError(f"the dump cannot be written to {error.filename or self.root}: {error.strerror}") from None
        return written

    def pkl(self, dump: Dump, step: int) -> Path:
        """Return the file of records of a step."""
        return self.layout.folder(self.root, step, self.rank) / f"{self.layout.stem(dump.mode)}dump.pkl"

    def _write_step(
        self, dump: Dump, capture: Capture, rank: int, step: int, seqs: Sequence[int], names: Mapping[int, CallName]
    ) -> int:  # fmt: skip
        pkl = self.pkl(dump, step)
        self._begin(pkl, dump, rank, step)
        sites = capture.sites(rank) if dump.stacks else {}
        written = 0
        with pkl.open("a", encoding="utf-8") as records, pkl.with_name(NAMES).open("a", encoding="utf-8") as told:
            for start in range(0, len(seqs), CALLS):
                found = capture.records(list(COLUMNS), rank=rank, step=step, seq=seqs[start : start + CALLS])
                for call in calls_of(found):
                    name = names[call[0]["seq"]].text(self.layout.separator)
                    if call[0]["level"] in self.levels and self._write_call(dump, capture, rank, call, name, records, sites):
                        told.write(f"{json.dumps([call[0]['seq'], name])}\n")
                        written += 1
        return written

    def _begin(self, pkl: Path, dump: Dump, rank: int, step: int) -> None:
        """Make the folder of a step ready; what an earlier run left there is written over, as the tool did."""
        if pkl in self._begun:
            if self._begun[pkl] != self.native:  # the script went on with another kind of dump: one capture is not all of the file
                self._mark(pkl, dump, rank, step, self.root.with_name(SEVERAL))
            return
        self._begun[pkl] = self.native
        tensors = pkl.with_suffix("")
        tensors.mkdir(parents=True, exist_ok=True)
        for old in (pkl, pkl.with_name(NAMES), *tensors.glob("*.npy")):
            old.unlink(missing_ok=True)
        self._mark(pkl, dump, rank, step, self.native)

    def _mark(self, pkl: Path, dump: Dump, rank: int, step: int, native: Path) -> None:
        capture = os.path.relpath(native, pkl.parent)
        marker = Marker(capture, rank, step if self.layout.has_steps else None, dump.filtered, dump.sides, self.levels)
        pkl.with_name(MARKER).write_text(json.dumps(marker.to_json(VERSION), indent=1) + "\n")

    def _write_call(
        self, dump: Dump, capture: Capture, rank: int, call: list[Row], name: str, records: TextIO, sites: Mapping[int, Any]
    ) -> bool:  # fmt: skip
        folder = Path(records.name).with_suffix("")
        found = [] if dump.mode == "stack" else self._lines(dump, capture, rank, call, name, folder)
        lines = [line for _, line in sorted(found, key=lambda one: _place(one[0]))]
        if dump.stacks and (stack := sites.get(call[0]["site"])) is not None:
            lines.append([f"{name}{self.layout.separator}stack_info", frames_of(*stack)])
        for line in lines:
            records.write(f"{json.dumps(line)}\n")
        return bool(lines)

    def _lines(
        self, dump: Dump, capture: Capture, rank: int, call: list[Row], name: str, folder: Path
    ) -> Iterator[tuple[str, list[Any]]]:
        """Yield slots and their rows; the tensors are written."""
        separator = self.layout.separator
        for row in call:
            if row["slot"] == "arguments":
                yield from self._scalars(dump, row, name)
                continue
            slot = in_tree(row, dump.filtered, dump.sides)
            if slot is None:
                continue
            whole = f"{name}{separator}{slot}"
            array = payload_of(capture, rank, row)
            if array is not None:
                np.save(folder / f"{whole}.npy", savable(array), allow_pickle=False)
            checksum = row["digest"] if dump.summary == "md5" and row["digest"] else []
            numbers = [] if dump.summary == "md5" else numbers_of(row, norm=self.layout.has_norm)
            yield slot, [whole, self.layout.flag, checksum, f"torch.{row['dtype']}", row["shape"], numbers]

    def _scalars(self, dump: Dump, row: Row, name: str) -> Iterator[tuple[str, list[Any]]]:
        """Yield what a call was given beside tensors, which the tool writes where nothing is filtered."""
        if dump.filtered or not _has_inputs(dump.sides) or row["value"] is None:
            return
        try:
            given = json.loads(row["value"])
        except ValueError:
            return
        for key, value in given.items() if isinstance(given, dict) else ():
            kind = SCALARS.get(type(value))
            slot = tool_slot(row["op"], f"input.{key}")
            if kind is not None and slot is not None:
                times = 4 if self.layout.has_norm else 3
                yield slot, [f"{name}{self.layout.separator}{slot}", self.layout.flag, [], kind, "[]", [value] * times]


def _place(slot: str) -> tuple[bool, list[tuple[int, str]]]:
    """Order the slots of a call: what comes to it before what leaves it, by their places."""
    return slot.startswith("output"), [(int(part), "") if part.isdigit() else (1 << 30, part) for part in slot.split(".")]


def _has_inputs(sides: Sequence[str]) -> bool:
    return "all" in sides or "input" in sides or ("forward" in sides and "output" not in sides)
