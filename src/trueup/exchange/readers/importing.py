"""`trueup.import_dump`: a dump of another tool in, a capture out. The reader of its format gives calls, which are numbered as
they come in (execution order, ordinals) and become records: our kernels' statistics where the tensors are there, one tensor at a
time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from trueup.exchange.readers import array_folder, hdf5, msprobe, padiff, ptdbg, tfdbg, tfdbg2
from trueup.exchange.readers.contents import BROKEN, reason
from trueup.exchange.readers.dump import Array, Dump, ForeignCall, ForeignTensor, Frames, Notes, Part, Tree, UnreadableError
from trueup.foundation.kernels import digest, hexadecimal, summarize
from trueup.foundation.model import LEVELS, NUMBERS, PACKED, TrueupError
from trueup.foundation.progress import advance
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Writer, layout, statistics
from trueup.foundation.store.segment import numpy_dtype
from trueup.foundation.version import VERSION

READERS: dict[str, Callable[[Tree, Notes], Dump | None]] = {
    "msprobe": msprobe.find, "ptdbg": ptdbg.find, "padiff": padiff.find, "hdf5": hdf5.find, "tfdbg2": tfdbg2.find,
    "tfdbg": tfdbg.find, "tensorflow": array_folder.find_graph, "arrays": array_folder.find,
}  # fmt: skip
"""What finds the dump that lies there (None: the content is of another format), by the names that ``--format`` takes, in the order
in which they are asked: the last takes what is left."""


MAX_CALLS = 2_000_000  # calls of one rank and step, whose names are in memory; a step of a large model has some 10,000


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
    tensors: int  # tensors whose bytes were there
    lost: Sequence[str]  # what the dump should hold and does not
    lacks: Sequence[str]  # what such a dump does not tell, so how far a comparison with it goes
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
    if format is not None and format not in READERS:
        raise TrueupError(f"format {format!r} is unknown: expected {', '.join(READERS)}")
    for find in READERS.values() if format is None else (READERS[format],):
        dump = find(tree, notes)
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
        for done, call in enumerate(part.calls()):
            if done % 256 == 0:
                advance("importing", "calls", self.counts.calls + done)
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
    """Say how far comparisons with such a dump go."""
    if counts.measured:
        yield "no sketches where no tensors were kept: two such calls are compared by max, min, mean and norm"
    if counts.checksums:
        yield "the checksums are the tool's own: they compare with those of a dump of the same tool, not with our digests"


ROWS = 8192  # rows that wait for a part
PAYLOAD = 48 << 20  # bytes of payload that wait; one tensor may go beyond
FOREIGN = ("foreign_name", "foreign_checksum", "foreign_statistics")
"""Columns of an imported capture beside those of every capture."""

_CALL = ("seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "forward_seq", "site")
_TENSOR = ("dtype", "shape", "strides", "device", "numel", "digest", "payload_segment", "payload_key", "value")
MAX_TEXT = 4096
MAX_VALUE = 4000
MAX_DEPTH = 16  # characters and depth of what is kept of a call's arguments


@dataclass(slots=True)
class Counts:
    """What was imported."""

    calls: int = 0
    rows: int = 0
    tensors: int = 0  # tensors whose bytes were there
    measured: int = 0  # tensors of which the tool's numbers were there, and no bytes
    checksums: int = 0


@dataclass(slots=True)
class _Columns:
    """Rows that wait to be written."""

    values: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in (*_CALL, *_TENSOR, *FOREIGN)})
    packed: list[np.ndarray[Any, Any]] = field(default_factory=list)
    packed_rows: list[int] = field(default_factory=list)
    told: dict[int, Mapping[str, float]] = field(default_factory=dict)
    bytes: int = 0

    def __len__(self) -> int:
        return len(self.values["seq"])


class RankWriter:
    """Writes the calls of one rank, by a writer that is made when there is something to write, and adds to ``counts``."""

    def __init__(self, writer: Callable[[], Writer], notes: Notes, counts: Counts) -> None:
        self._make, self._notes, self._counts = writer, notes, counts
        self._writer: Writer | None = None
        self._sites: dict[Frames, int] = {}
        self._rows = _Columns()

    @property
    def writer(self) -> Writer:
        """The rank's writer."""
        if self._writer is None:
            self._writer = self._make()
        return self._writer

    def add(self, step: int, call: ForeignCall, place: Place, numbering: Numbering) -> None:
        """Add a call, or a piece of one."""
        shared = {
            "seq": place.seq, "parent": numbering.seq(call.parent), "phase": call.phase, "level": call.level,
            "scope": _text(call.scope), "op": _text(call.op), "ordinal": place.ordinal,
            "forward_seq": numbering.seq(call.forward), "site": self._site(call.frames),
        }  # fmt: skip
        for tensor in call.tensors:
            self._add_tensor(shared, tensor)
            if len(self._rows) >= ROWS or self._rows.bytes >= PAYLOAD:
                self.flush(step)
        if call.arguments or not call.tensors:
            self._add(shared, slot="arguments", value=_encoded(call.arguments) if call.arguments else None)

    def flush(self, step: int) -> None:
        """Write the rows that wait."""
        rows, self._rows = self._rows, _Columns()
        if not len(rows):
            return
        columns: dict[str, Any] = dict(rows.values)
        for name in FOREIGN:
            columns[name] = pa.array(columns[name], pa.string())
        packed = np.array(rows.packed).reshape(-1, PACKED)
        columns |= _with_told(statistics(packed, np.array(rows.packed_rows, np.int64), len(rows)), rows.told)
        self.writer.write_records(step, columns)
        self._counts.rows += len(rows)

    def close(self, told: Mapping[str, Any]) -> None:
        """Write the rest, and notes, which every report shows: losses, gaps of such a dump, remarks."""
        for sentence in self._notes.lost:
            self.writer.note(f"lost: {sentence}")
        for sentence in (*told["lacks"], *self._notes.said):
            self.writer.note(f"imported from {told['tool']}: {sentence}")
        self.writer.update(imported=dict(told))
        self.writer.close()

    def _site(self, frames: Frames | None) -> int | None:
        if frames is None:
            return None
        number = self._sites.get(frames)
        if number is None:
            number = self._sites[frames] = len(self._sites)
            self.writer.add_sites([(number, [_text(frame) or "" for frame in frames[0]], _text(frames[1]))])
        return number

    def _add(self, shared: Mapping[str, Any], **fields: Any) -> int:
        row = {**shared, **fields}
        for name, values in self._rows.values.items():
            values.append(row.get(name))
        return len(self._rows) - 1

    def _add_tensor(self, shared: Mapping[str, Any], tensor: ForeignTensor) -> None:
        array = self._read(tensor)
        dtype = tensor.dtype if array is None else array.dtype.name
        shape = tensor.shape if array is None else array.shape
        fields: dict[str, Any] = {
            "slot": _text(tensor.slot), "dtype": _text(dtype), "shape": shape, "strides": tensor.strides,
            "device": tensor.device, "value": _text(tensor.value),
            "foreign_name": _text(tensor.name), "foreign_checksum": tensor.checksum,
            "foreign_statistics": _text(tensor.told) if array is None else None,
            "numel": None if shape is None else min(math.prod(shape), 2**63 - 1),
        }  # fmt: skip
        if tensor.checksum is not None:
            self._counts.checksums += 1
        if array is None:
            row = self._add(shared, **fields)
            if tensor.statistics:
                self._rows.told[row] = tensor.statistics
                self._counts.measured += 1
            return
        number = digest(array)
        fields["digest"] = hexadecimal(number)
        raw = np.ascontiguousarray(array).reshape(-1)
        if _is_mapped(raw):
            raw = raw.copy()  # it is kept until the segment is written, and the file may change
        segment, key = self.writer.add_payload(fields["digest"], array.dtype.name, array.shape, raw.view(np.uint8))
        row = self._add(shared, **fields, payload_segment=segment, payload_key=key)
        packed = np.empty(PACKED)
        summarize(array, packed)
        self._rows.packed.append(packed)
        self._rows.packed_rows.append(row)
        self._rows.bytes += raw.nbytes
        self._counts.tensors += 1

    def _read(self, tensor: ForeignTensor) -> Array | None:
        """Read a tensor; one that cannot be had leaves its row, and a note."""
        if tensor.load is None:
            if tensor.shape is not None and 0 in tensor.shape and tensor.dtype is not None:
                return _empty(tensor)
            return None
        try:
            array = tensor.load()
            summarize(array.reshape(-1)[:0], np.empty(PACKED))  # refuses dtypes that hold no numbers
        except UnreadableError as error:
            self._notes.lose(f"tensors could not be read: {error}", tensor.name)
            return None
        except BROKEN as error:
            self._notes.lose(f"tensors could not be read: {reason(error)}", tensor.name)
            return None
        if tensor.shape is not None and array.shape != tensor.shape and array.size == math.prod(tensor.shape):
            self._notes.say("files hold tensors of a different shape than the dump says; the dump's shape is used", tensor.name)
            return array.reshape(tensor.shape)
        if tensor.shape not in (None, array.shape):
            self._notes.lose("files hold a tensor of a different shape than the dump says; they were left out", tensor.name)
            return None
        if tensor.dtype not in (None, array.dtype.name):
            self._notes.say(f"tensors of {tensor.dtype} lie in their files as {array.dtype.name}", tensor.name)
        return array


def _encoded(arguments: Mapping[str, Any]) -> str:
    """Encode arguments as a native capture does: numbers that JSON lacks as text, long ones by their digest."""
    text = json.dumps(redacted({key: _finite(value) for key, value in arguments.items()}), sort_keys=True, default=str)
    if len(text) <= MAX_VALUE:
        return text
    return json.dumps({"length": len(text), "xxh3": xxhash.xxh3_64_hexdigest(text.encode("utf-8", "replace"))})


def _finite(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_finite(one, depth + 1) for one in value] if depth < MAX_DEPTH else "list"
    if isinstance(value, dict):
        return {str(key): _finite(one, depth + 1) for key, one in value.items()} if depth < MAX_DEPTH else "dict"
    return value


def _is_mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def _empty(tensor: ForeignTensor) -> Array | None:
    """A tensor without elements is known as a whole."""
    try:
        return np.empty(tensor.shape or (0,), numpy_dtype(str(tensor.dtype)))
    except (TypeError, ValueError):
        return None


def _with_told(columns: dict[str, Any], told: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Add the numbers that the tool gave to the columns that the kernels filled."""
    for name in NUMBERS:
        given = {row: numbers[name] for row, numbers in told.items() if name in numbers}
        values, absent = np.ma.getdata(columns[name]), np.ma.getmaskarray(np.ma.asarray(columns[name])).copy()
        if given:
            absent[list(given)] = False
            values[list(given)] = list(given.values())
        columns[name] = np.ma.MaskedArray(values, absent)
    return columns


def _text(text: str | None, limit: int = MAX_TEXT) -> str | None:
    """Return text as a table can hold it."""
    if text is None:
        return None
    return text[:limit].encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call stands in its rank and step."""

    seq: int
    ordinal: int


class Numbering:
    """Numbers the calls of one part, from ``first``, for ``seq`` goes on from step to step. ``order`` has keys in order of
    execution; calls that it lacks come after them, in the order in which they are met."""

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
            known = self._places[call.key] = Place(self._seqs.setdefault(call.key, self.next), self._ordinals[kind])
            self._ordinals[kind] += 1
        return known

    def seq(self, key: str | None) -> int | None:
        """Return the number of another call, None where the dump does not hold it."""
        return None if key is None else self._seqs.get(key)
