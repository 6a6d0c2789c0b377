"""The files of msprobe, made of a native capture: ``dump.json``, ``stack.json``, ``construct.json``, ``dump_tensor_data/*.pt``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueup.exchange.readers.ascend import MARKER, NAMES, Marker
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.version import VERSION
from trueup_compat.files import Row, calls_of, frames_of, payload_of
from trueup_compat.msprobe.config import Config
from trueup_compat.msprobe.entries import entry_of, require_gradients
from trueup_compat.msprobe.gradients import Entries, with_gradients
from trueup_compat.msprobe.selection import entry_name, is_listed
from trueup_compat.names import CallName

COLUMNS = (
    "step", "seq", "parent", "level", "phase", "op", "scope", "slot", "dtype", "shape", "numel", "min", "max", "mean", "l2",
    "n_nan", "n_posinf", "n_neginf", "digest", "payload_segment", "payload_key", "payload_view", "value", "site",
)  # fmt: skip
CALLS = 2_000
"""Calls whose rows are read at a time."""


@dataclass(slots=True)
class _Step:
    """What the files of the present step hold."""

    number: int = -1
    data: dict[str, Any] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    stacks: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    names: dict[int, CallName] = field(default_factory=dict)


@dataclass(slots=True)
class Tree:
    """The dump of this process, written step by step."""

    config: Config
    native: Path
    place: str
    """Name of this process's folder in a step's: ``rank0``, or ``proc4711`` where there is no process group."""
    trained: Container[str] = ()
    """Parameters that require gradients, by scope and name: ``head.weight``."""
    gradients: Callable[[int], Entries] = lambda _: {}
    """Gives the entries of a step's gradients of parameters."""
    _step: _Step = field(default_factory=_Step)
    _begun: set[int] = field(default_factory=set)

    def write(self, native_rank: int, names: Mapping[int, CallName]) -> None:
        """Add calls of the capture to the files.

        Raises:
            TrueupError: they cannot be written.
        """
        capture = open_capture(self.native)
        try:
            for step in capture.steps:
                rows = capture.records(["seq"], rank=native_rank, step=step)["seq"].to_numpy()
                seqs = [seq for seq in np.unique(rows).tolist() if seq in names]
                if seqs:
                    self._write_step(capture, native_rank, step, seqs, names)
        except OSError as error:
            raise TrueupError(f"the dump cannot be written to {error.filename or self.config.path}: {error.strerror}") from None

    def folder(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.config.path / f"step{step}" / self.place

    def tensors(self, step: int) -> Path:
        """Return the folder of a step's tensors, without those of an earlier run: they are written over, as the tool does."""
        found = self.folder(step) / "dump_tensor_data"
        if step not in self._begun:
            self._begun.add(step)
            found.mkdir(parents=True, exist_ok=True)
            for old in (*found.glob("*.pt"), found.parent / NAMES):
                old.unlink(missing_ok=True)
        return found

    def _write_step(self, capture: Capture, rank: int, step: int, seqs: list[int], names: Mapping[int, CallName]) -> None:
        folder, tensors = self.folder(step), self.tensors(step)
        if self._step.number != step:
            self._step = _Step(step)
        self._step.names |= {seq: names[seq] for seq in seqs}
        extra = ["invocation"] if "invocation" in capture.names else []
        with (folder / NAMES).open("a", encoding="utf-8") as told:
            for start in range(0, len(seqs), CALLS):
                found = capture.records([*COLUMNS, *extra], rank=rank, step=step, seq=seqs[start : start + CALLS])
                for call in calls_of(found):
                    if self._add(capture, rank, call, tensors):
                        told.write(f"{json.dumps([call[0]['seq'], entry_name(names[call[0]['seq']])])}\n")
        require_gradients(self._step.data)
        self._save(folder, tensors)
        where = os.path.relpath(self.native, folder)
        marker = Marker(where, rank, step, filtered=False, sides=self.config.sides, levels=self.config.captured)
        (folder / MARKER).write_text(json.dumps(marker.to_json(VERSION), indent=1) + "\n")

    def keeps(self, name: str) -> bool:
        """Tell whether an entry's elements are kept."""
        return self.config.task == "tensor" or bool(self.config.tensor_list and is_listed(name, self.config.tensor_list))

    def _add(self, capture: Capture, rank: int, call: list[Row], tensors: Path) -> bool:
        """Add an entry; return whether there is one. The model itself has none, as in the tool."""
        first, held = call[0], self._step
        name = entry_name(held.names[first["seq"]])
        if first["level"] == "module" and "." not in held.names[first["seq"]].api:
            return False
        kept = self.keeps(name)

        def keep(whole: str, row: Row) -> str | None:
            array = payload_of(capture, rank, row) if kept else None
            if array is None:
                return None
            torch.save(_tensor(array, row["dtype"]), tensors / f"{whole}.pt")
            return f"{whole}.pt"

        entry = entry_of(call, name, self.config.sides, self.config.summary, keep)
        if not entry:
            return False
        for parameter, leaf in entry.get("parameters", {}).items():
            leaf["requires_grad"] = f"{first['scope']}.{parameter}" in self.trained
        if self.config.task != "structure":
            held.data[name] = entry
        above = held.names.get(first["parent"]) if first["parent"] is not None else None
        held.parents[name] = entry_name(above) if above is not None and not above.kind and "." in above.api else None
        if first["site"] is not None and first["phase"] != "backward":
            frames, text = capture.sites(rank).get(first["site"], ((), None))
            lines = tuple(f"File {file}, line {line}, in {function}, \n {code or ''}" for file, line, function, code in
                          frames_of(frames, text))  # fmt: skip
            held.stacks.setdefault(lines, []).append(name)
        return True

    def _save(self, folder: Path, tensors: Path) -> None:
        data_dir = str(tensors.absolute()) if self.config.detail == "tensor" else None
        header = {"task": self.config.task, "level": self.config.level, "framework": "pytorch", "dump_data_dir": data_dir}
        files: dict[str, Any] = {"dump.json": header | {"data": with_gradients(self._step.data, self.gradients(self._step.number))}}
        if self.config.extra_info:
            stacks = {str(k): [names, list(lines)] for k, (lines, names) in enumerate(self._step.stacks.items())}
            files |= {"stack.json": stacks, "construct.json": self._step.parents}
        for name, content in files.items():
            temporary = folder / f"{name}.tmp"
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            temporary.replace(folder / name)


def _tensor(array: Any, dtype: str) -> torch.Tensor:
    """Return a tensor of the recorded dtype, of which NumPy may know nothing."""
    kind = getattr(torch, dtype)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat = torch.frombuffer(bytearray(raw.tobytes()), dtype=kind) if raw.size else torch.empty(0, dtype=kind)
    return flat.reshape(array.shape)
