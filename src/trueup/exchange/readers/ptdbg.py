"""ptdbg_ascend 1.0 to 6.0 and its release in att: one .pkl of JSON lines for each step and rank, tensors as .npy beside it.

::

    ptdbg_dump_v2.0/rank0/dump.pkl            (from version 4 on: ptdbg_dump_v6.0/step0/rank0/dump.pkl; api_stack_dump.pkl ...)
                          dump/Functional_linear_0_forward_input.0.npy

A line is ``[name, flag, checksum or [], dtype, shape, [max, min, mean(, norm)]]``, or ``[name_stack_info, stack]``. In the backward
``input`` is the gradient of the output and ``output`` what leaves the last autograd node (`left_gradients`); in what
`trueup_compat` wrote (`ascend.Marker`) it is the gradient of that argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from trueup.exchange.readers import ascend
from trueup.exchange.readers.ascend import Left, left_gradients, told_statistics, transposed
from trueup.exchange.readers.contents import read_npy
from trueup.exchange.readers.dump import (
    Array,
    Dump,
    ForeignCall,
    ForeignTensor,
    Frames,
    Notes,
    Part,
    Tree,
    UnreadableError,
    folder_of,
    frames_of,
    numbered,
)
from trueup.foundation.model import TrueupError

LINE_LIMIT = 16 << 20
SNIFFED = 1 << 16
LOOKED_AT = 20  # bytes and lines of a file among which there has to be a row
OVERFLOW = 100  # a flag above it marks a row of the overflow check, which has no statistics
MOST_GRADIENTS = 64  # gradients of one call that are told apart

_VERSION = re.compile(r"_v(\d+\.\d+)(?:/|$)")
_UNDERSCORES = re.compile(
    r"(?P<kind>Tensor|Torch|Functional|NPU|VF|Aten|Distributed|Module)_(?P<api>.+)_(?P<index>\d+)_(?P<phase>forward|backward|pre_forward)"
    r"_(?P<side>input|output|stack_info)(?P<slot>(?:\..+)?)"
)
_DOTS = re.compile(
    r"(?P<path>.+)\.(?P<index>\d+)\.(?P<phase>forward|backward|pre_forward)[._](?P<side>input|output|stack_info)(?P<slot>(?:\..+)?)"
)


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find the files of JSON lines whose first line is a row."""
    files = [path for path in sorted(tree.files) if not path.endswith((".npy", ".npz", ".pt")) and _is_rows(tree, path)]
    if not files:
        return None
    match = next((m for path in [f"{tree.source.absolute()}/", *files] if (m := _VERSION.search(path))), None)
    steps = [_Step(tree, path, notes) for path in files]
    placed = numbered(files, notes)
    parts = [Part(*placed[step.path], step.calls) for step in sorted(steps, key=lambda s: placed[s.path][::-1])]
    if not any("step" in path for path in files):
        notes.say("the dump has no folders of steps: all of it is step 0, however many iterations it was on for")
    detail = "tensor" if any(path.endswith(".npy") for path in tree.files) else "stats"
    lacks = [
        "integers, booleans and scalars are not in the dump where filter_switch was ON",
        "the scopes are unknown: ptdbg does not say which module made a call",
    ]
    return Dump(f"ptdbg {match[1]}" if match else "ptdbg", "torch", ("module", "api", "aten"), detail, parts, notes, lacks)


def _is_rows(tree: Tree, path: str) -> bool:
    head = tree.head(path, SNIFFED)
    if head.count(b'["') == 0:
        return False
    for line in head.split(b"\n")[:LOOKED_AT]:  # the first may be damaged, and a long stack does not fit
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            match = re.match(rb'\["([^"]{1,400})", ', line)
            row = [match[1].decode("utf-8", "replace"), None] if match else None
        if isinstance(row, list) and len(row) in (2, 5, 6) and _parse(str(row[0])) is not None:
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Name:
    kind: str  # ``Functional`` ...; ``Module`` where ``api`` is a class (versions 3 to 5), empty where it is a path and a class
    api: str
    index: str
    phase: str
    side: str
    slot: str  # ``0``, ``1.0``, empty


def _parse(name: str) -> _Name | None:
    """Take a name of either form apart: ``Functional_linear_145_backward_output.0``, ``Functional.linear.0.forward.input.0``."""
    if match := _UNDERSCORES.fullmatch(name):
        kind, api = match["kind"], match["api"]
    elif match := _DOTS.fullmatch(name):
        kind, _, api = match["path"].partition(".")
        if kind not in ascend.table()["prefixes"]["torch"] or not api:
            kind, api = "", match["path"].removeprefix("Module.")
    else:
        return None
    phase = "backward" if match["phase"] == "backward" else "forward"
    return _Name(kind, api, match["index"], phase, match["side"], match["slot"].removeprefix("."))


@dataclass(slots=True)
class _Rows:
    """The rows of one call, as far as they lie together."""

    name: _Name
    tensors: list[tuple[_Name, str, list[Any]]] = field(default_factory=list)
    frames: tuple[Frames | None, bool] = (None, False)


class _Step:
    """One .pkl and the folder of its tensors."""

    def __init__(self, tree: Tree, path: str, notes: Notes) -> None:
        self.tree, self.path, self.notes = tree, path, notes
        stem = path[len(folder_of(path)) :].rpartition(".")[0]
        self.tensors = f"{folder_of(path)}{stem}/"
        self.has_tensors = any(file.startswith(self.tensors) for file in tree.files)
        self.is_ours = ascend.marker_in_tree(tree, path) is not None  # by `trueup_compat`: leaving gradients bear arguments' places

    def calls(self) -> Iterator[ForeignCall]:
        held: _Rows | None = None
        for row in self._lines():
            name = _parse(row[0])
            if name is None:
                self.notes.lose("a row has a name of no known form", row[0])
                continue
            if held is None or _key(held.name) != _key(name):
                if held is not None:
                    yield self._call(held)
                held = _Rows(name)
            if name.side == "stack_info":
                held.frames = frames_of(row[1])
            else:
                held.tensors.append((name, row[0], row))
        if held is not None:
            yield self._call(held)

    def _lines(self) -> Iterator[list[Any]]:
        try:
            with self.tree.open(self.path) as file:
                while line := file.readline(LINE_LIMIT):
                    if line.strip() and (row := self._row(line)) is not None:
                        yield row
        except OSError as error:
            raise TrueupError(f"{self.path} cannot be read: {error.strerror}; check its permissions") from None

    def _row(self, line: bytes) -> list[Any] | None:
        try:
            row = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            cut = "is cut off" if not line.endswith(b"\n") else "is no JSON"
            self.notes.lose(f"a line {cut}", line[:60].decode("ascii", "replace"))
            return None
        if isinstance(row, list) and len(row) >= 2 and isinstance(row[0], str):
            return row
        self.notes.lose("a line is no row", str(row)[:60])
        return None

    def _call(self, rows: _Rows) -> ForeignCall:
        name = rows.name
        if name.kind not in ("", "Module"):
            op, level, phase = ascend.operator(name.kind, name.api)
            scope = ""
        else:
            scope, op = ascend.module_name(name.api.split(".") if not name.kind else [name.api])
            level, phase = "module", "forward"
        if name.phase == "backward":
            phase = "backward"
        elif rows.frames[1] and phase == "forward":
            phase = "recompute"
        left = {} if self.is_ours else _leaving(rows, op)
        found, arguments = [], {}
        for part, text, row in rows.tensors:
            slot, turned = _own_slot(part, op) if self.is_ours else _slot(part, op, left)
            if len(row) == 6 and isinstance(row[3], str) and row[3].startswith("<class"):
                position = ascend.argument(op, part.slot) if part.side == "input" else f"output.{part.slot}"
                arguments[position] = next(iter(row[5]), None) if isinstance(row[5], list) else None
            elif len(row) >= 5:
                tensor = self._tensor(slot, text, row)
                found.append(transposed(tensor) if turned else tensor)
            else:
                self.notes.lose("a row has no tensor", text)
        forward = _key(name, "forward") if phase == "backward" else None
        return ForeignCall(_key(name), level, phase, scope, op, found, arguments, None, forward, rows.frames[0])

    def _tensor(self, slot: str, text: str, row: list[Any]) -> ForeignTensor:
        dtype, shape = ascend.dtype(row[3]), ascend.sizes(row[4])
        if dtype is None or shape is None:
            self.notes.lose("a row has no dtype or shape that can be read", text)
        numbers = row[5] if len(row) > 5 and isinstance(row[5], list) else []
        if type(row[1]) is int and row[1] > OVERFLOW:
            self.notes.say("rows of the overflow check have no statistics", text)
        statistics, told = told_statistics([*numbers, None, None, None, None][:4], dtype, shape)
        return ForeignTensor(
            slot, text, dtype, shape, statistics, told, _checksum(row[2], dtype),
            partial(self._load, f"{text}.npy", dtype) if self.has_tensors else None,
        )  # fmt: skip

    def _load(self, file: str, dtype: str | None) -> Array:
        path = self.tree.within(self.tensors, file)
        if path is None:
            raise UnreadableError("its file is missing")
        return narrowed(read_npy(self.tree, path), dtype)


def narrowed(array: Array, dtype: str | None) -> Array:
    """Return a tensor that was widened to be saved, as NumPy has no bfloat16, in its own dtype, unless that lost something."""
    if dtype not in ("bfloat16", "float16") or array.dtype != np.float32:
        return array
    with np.errstate(all="ignore"):
        own = array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
        return own if np.array_equal(own.astype(np.float32), array, equal_nan=True) else array


def _key(name: _Name, phase: str | None = None) -> str:
    return f"{name.kind}.{name.api}.{name.index}.{phase or name.phase}"


def _leaving(rows: _Rows, op: str) -> dict[str, Left]:
    """Return whose gradients those are that left a call in the backward, by their place; of modules only version 6 hooks all."""
    if rows.name.phase != "backward" or not rows.name.kind:
        return {}
    shapes = {part.slot or "0": ascend.sizes(row[4]) for part, _, row in rows.tensors if part.side == "output" and len(row) > 4}
    places = [place for place in shapes if place.isdigit() and int(place) < MOST_GRADIENTS]
    count = 1 + max(map(int, places), default=-1)  # one that is not there has no row
    known = left_gradients(op, [shapes.get(str(k)) for k in range(count)])
    return {str(k): left for k, left in enumerate(known)}


def _slot(name: _Name, op: str, left: Mapping[str, Left]) -> Left:
    first, dot, rest = (name.slot or "0").partition(".")
    if name.phase == "forward":
        return Left(f"{name.side}.{ascend.argument(op, first) if name.side == 'input' else first}{dot}{rest}")
    if name.side == "input":
        return Left(f"grad_output.{first}{dot}{rest}")
    of = left.get(first, Left(f"grad_input.{'node.' if name.kind else ''}{first}"))
    return Left(f"{of.slot}{dot}{rest}", of.transposed and not rest)


def _own_slot(name: _Name, op: str) -> Left:
    first, dot, rest = (name.slot or "0").partition(".")
    if (name.phase, name.side) != ("backward", "output"):
        return _slot(name, op, {})
    return Left(f"grad_input.{ascend.argument(op, first)}{dot}{rest}")


def _checksum(text: Any, dtype: str | None) -> str | None:
    """Return the checksum, a CRC-32 whatever the tool calls it, of the elements as float32 where the dtype is bfloat16."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-fA-F]{1,8}|[0-9a-fA-F]{16}|[0-9a-fA-F]{32}", text):
        return None
    if len(text) == 16:  # what `trueup_compat` writes there
        return f"xxh3:{text.lower()}"
    if len(text) == 32:
        return f"md5:{text.lower()}"
    return f"{'crc32-as-float32' if dtype == 'bfloat16' else 'crc32'}:{text.lower().zfill(8)}"
