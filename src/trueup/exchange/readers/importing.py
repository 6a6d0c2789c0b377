"""`trueup.import_dump`: a dump of another tool in, a capture out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trueup.exchange.readers import array_folder, hdf5, msprobe, padiff, ptdbg, tensorflow_npy, tfdbg, tfdbg2
from trueup.exchange.readers.dump import Dump, Part, Reader
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.numbering import Numbering
from trueup.exchange.readers.tree import Tree
from trueup.exchange.readers.writing import Counts, RankWriter
from trueup.foundation.model import LEVELS, TrueupError
from trueup.foundation.store import Writer, layout
from trueup.foundation.version import VERSION

READERS: tuple[Reader, ...] = (msprobe, ptdbg, padiff, hdf5, tfdbg2, tfdbg, tensorflow_npy, array_folder)
"""In the order in which they are asked: the last takes what is left."""


MAX_CALLS = 2_000_000
"""Calls of one rank and step, whose names are in memory; a step of a large model has some 10,000."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What `import_dump` made."""

    path: Path
    tool: str
    framework: str | None
    ranks: int
    steps: int
    calls: int
    rows: int
    tensors: int
    """Tensors whose bytes were there."""
    lost: Sequence[str]
    """What the dump should hold and does not."""
    lacks: Sequence[str]
    """What such a dump does not tell, so how far a comparison with it goes."""
    notes: Sequence[str]

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.calls:,} calls of {self.ranks} rank{'s'[: self.ranks != 1]}, {self.steps} "
            f"step{'s'[: self.steps != 1]}, from {self.tool}; {self.tensors:,} tensors with their bytes"
        ]
        for title, sentences in (("lost", self.lost), ("lacks", self.lacks), ("note", self.notes)):
            lines += [f"  {title + ':':6} {sentence}" for sentence in sentences]
        return "\n".join(lines)


def import_dump(source: str | Path, output: str | Path, *, format: str | None = None) -> Imported:
    """Make a capture of what another tool dumped.

        >>> print(trueup.import_dump("dump_npu", "runs/npu"))      # doctest: +SKIP
        runs/npu: 570 calls of 1 rank, 1 step, from msprobe; 0 tensors with their bytes
          lacks: no sketches: two such runs are compared by max, min, mean and norm
        >>> trueup.compare("runs/gpu", "runs/npu")                 # doctest: +SKIP

    Args:
        source: the folder of a dump (all its ranks and steps), or one file of it.
        output: where the capture goes; must not hold one yet.
        format: ``msprobe``, ``ptdbg``, ``padiff``, ``hdf5``, ``tfdbg2``, ``tfdbg``, ``tensorflow`` or ``arrays``; told by the
            files' content by default.

    Raises:
        TrueupError: nothing there can be read, or the capture cannot be written.
    """
    notes = Notes()
    target = Path(output)
    if (target / layout.MANIFEST).exists() or any(target.glob("rank-*")):
        raise TrueupError(f"{target} already holds a capture: nothing was imported; choose another -o or remove it")
    tree = Tree(Path(source), notes)
    dump = _find(tree, notes, format)
    try:
        return _Import(dump, tree, target).run()
    except OSError as error:
        raise TrueupError(
            f"{target} cannot be written: {error.strerror or error}; it is not complete: remove it, make room and import again"
        ) from None


def _find(tree: Tree, notes: Notes, format: str | None) -> Dump:
    by_name = {reader.NAME: reader for reader in READERS}
    if format is not None and format not in by_name:
        raise TrueupError(f"format {format!r} is unknown: expected {', '.join(by_name)}")
    for reader in READERS if format is None else (by_name[format],):
        dump = reader.find(tree, notes)
        if dump is not None and dump.parts:
            return dump
    expected = format or "a dump of msprobe, ptdbg, PaDiff, torch.utils.dumper, tfdbg, or a folder of .npy, .npz or .pt files"
    some = ", ".join(itertools.islice(tree.files, 5))
    raise TrueupError(f"{tree.source} is no dump that can be read: expected {expected}, got {len(tree.files):,} files ({some})")


class _Import:
    def __init__(self, dump: Dump, tree: Tree, target: Path) -> None:
        self.dump, self.tree, self.source, self.target = dump, tree, tree.source, target
        self.counts = Counts()
        self.levels: set[str] = set()
        self.run_id = os.urandom(8).hex()
        self.world = max(part.rank for part in dump.parts) + 1

    def run(self) -> Imported:
        writers: list[RankWriter] = []
        for rank, parts in itertools.groupby(sorted(self.dump.parts, key=lambda p: (p.rank, p.step)), key=lambda p: p.rank):
            writer = RankWriter(partial(self._writer, rank), self.dump.notes, self.counts)
            first = 0
            for part in parts:
                first = self._part(writer, part, first)
            writers.append(writer)
        if not self.counts.calls:
            why = (self.dump.notes.lost or self.dump.notes.said or ["it holds no calls"])[0]
            raise TrueupError(f"{self.source} holds nothing that can be read, though it is of {self.dump.tool}: {why}")
        for path in self.tree.unopened():
            self.dump.notes.say("files were left out, for they are no part of such a dump or no call names them", path)
        told = self._told()
        for writer in writers:
            writer.close(told)
        steps = {part.step for part in self.dump.parts}
        return Imported(
            self.target, self.dump.tool, self.dump.framework, len(writers), len(steps), self.counts.calls, self.counts.rows,
            self.counts.tensors, self.dump.notes.lost, told["lacks"], self.dump.notes.said,
        )  # fmt: skip

    def _part(self, writer: RankWriter, part: Part, first: int) -> int:
        order = part.order() if part.order is not None else ()
        numbering = Numbering(itertools.islice(order, MAX_CALLS), first)
        for call in part.calls():
            if numbering.calls >= MAX_CALLS:
                self.dump.notes.lose(f"a step holds more than {MAX_CALLS:,} calls, and what follows was left out", call.key)
                break
            writer.add(part.step, call, numbering.place(call), numbering)
            self.levels.add(call.level)
        writer.flush(part.step)
        self.counts.calls += numbering.calls
        return numbering.next

    def _writer(self, rank: int) -> Writer:
        root = {
            "trueup_version": VERSION, "command": ["trueup", "import", str(self.source), "-o", str(self.target)],
            "run": self.run_id, "levels": [level for level in LEVELS if level in self.dump.levels], "detail": self.dump.detail,
            "config": {}, "imported": {"tool": self.dump.tool, "from": str(self.source)},
        }  # fmt: skip
        manifest: dict[str, Any] = {"devices": [], "versions": {}, "seeds": {}, "world_size": self.world, "environment": {}}
        if self.dump.framework is not None:
            manifest["framework"] = self.dump.framework
        return Writer(self.target, rank, root, manifest)

    def _told(self) -> Mapping[str, Any]:
        lacks = [*self.dump.lacks, *_general(self.counts)]
        return {"tool": self.dump.tool, "from": str(self.source), "lacks": lacks, "lost": self.dump.notes.lost}


def _general(counts: Counts) -> Iterator[str]:
    """Say what follows from what was there and what not."""
    if counts.measured:
        yield "no sketches where no tensors were kept: two such calls are compared by max, min, mean and norm"
    if counts.checksums:
        yield "the checksums are the tool's own: they compare with those of a dump of the same tool, not with our digests"
