"""The file of ``torch.utils.dumper``, made of a capture of operators: ``/{operator}/{seqid}/{input or output}/{argument}``.

A group of a call has two attributes that the tool did not write, ``Phase`` and ``Scope``, by which our reader names it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trueup.exchange.readers.hdf5 import DEVICES, DTYPES
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup_compat.files import Row, calls_of, payload_of, savable

TENSOR, TENSORS, INTEGERS, INTEGER, BOOLEAN, DOUBLE = range(6)
"""``Type`` of a dataset."""
FORMAT_ND = 2
NATIVE = ".trueup"
"""What the native capture's name has behind that of the file."""
TAKEN = "Capture"
"""Attribute of a file that holds some operators of another one: where that one's capture is, seen from here."""
DATA_TYPES = {name: number for number, name in DTYPES.items()}
DEVICE_TYPES = {name: number for number, name in DEVICES.items()}
CALLS = 2_000
"""Calls whose rows are read at a time."""

Key = tuple[int, str, str, str, int]
Seqids = Mapping[Key, int]
"""Numbers of operators by step, phase, scope, operator and ordinal."""

COLUMNS = (
    "step", "seq", "phase", "scope", "op", "ordinal", "slot", "dtype", "shape", "strides", "device", "payload_segment",
    "payload_key", "payload_view", "digest", "value",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Numbered:
    """An operator of a capture, and its number in the file."""

    seq: int
    step: int
    phase: str
    scope: str
    op: str
    ordinal: int
    seqid: int

    @property
    def key(self) -> Key:
        """What names it in another run of the same program."""
        return self.step, self.phase, self.scope, self.op, self.ordinal

    @property
    def path(self) -> str:
        """Its group in the file."""
        return f"{self.op.removeprefix('aten::').replace('/', '_')}/{self.seqid}"


def h5py() -> Any:
    """Return the library that reads and writes these files.

    Raises:
        TrueupError: it is not installed.
    """
    try:
        import h5py as library
    except ImportError:
        raise TrueupError("HDF5 files need h5py: pip install 'trueup[hdf5]'") from None
    return library


def numbered(path: Path) -> Iterator[Numbered]:
    """Yield the operators of a capture of one process, in the order of their execution, numbered from 1."""
    capture = open_capture(path)
    seqids = itertools.count(1)
    for step in capture.steps:
        columns = ["seq", "phase", "scope", "op", "ordinal"]
        rows = capture.records(columns, rank=min(capture.ranks), step=step, level="aten").to_pylist()
        for row in {row["seq"]: row for row in rows}.values():
            yield Numbered(row["seq"], step, row["phase"], row["scope"], row["op"], row["ordinal"], next(seqids))


def seqids_of(path: Path, groups: Collection[str]) -> Seqids:
    """Return the numbers of a capture's operators, those that a file has."""
    return {call.key: call.seqid for call in numbered(path) if call.path in groups}


def groups_of(path: str) -> set[str]:
    """Return the operators of a file, ``addmm/9``; none where there is no such file."""
    if not Path(path).is_file():
        return set()
    try:
        with h5py().File(path, "r") as file:
            return {f"{op}/{seqid}" for op in file if hasattr(file[op], "keys") for seqid in file[op]}
    except (OSError, KeyError) as error:
        raise TrueupError(f"{path} cannot be read: {error}") from None


def taken_from(path: str) -> Path | None:
    """Return the capture of the file that a file was taken out of; None where it does not say."""
    try:
        with h5py().File(path, "r") as file:
            said = file.attrs.get(TAKEN)
    except OSError:
        return None
    return Path(path).parent / said if isinstance(said, str) else None


def write(
    capture_path: Path, file_path: Path, *, known: Seqids | None = None, inputs: bool = True, only: Collection[str] | None = None
) -> int:
    """Write the file of a capture; return how many operators are in it.

    Args:
        capture_path: of levels aten and api, detail tensor.
        file_path: is written over.
        known: numbers of another run's operators: the file has those alone, under these numbers.
        inputs: whether inputs are written.
        only: groups of operators to write.

    Raises:
        TrueupError: the file cannot be written, or h5py is not installed.
    """
    calls = {call.seq: call for call in numbered(capture_path)}
    chosen = {}
    for seq, call in calls.items():
        seqid = call.seqid if known is None else known.get(call.key)
        if seqid is not None and (only is None or call.path in only):
            chosen[seq] = f"{call.path.partition('/')[0]}/{seqid}"
    capture = open_capture(capture_path)
    rank = min(capture.ranks)
    extra = [name for name in ("invocation",) if name in capture.names]
    try:
        with h5py().File(file_path, "w") as file:
            for start in range(0, len(chosen), CALLS):
                wanted = list(chosen)[start : start + CALLS]
                for rows in calls_of(capture.records([*COLUMNS, *extra], rank=rank, seq=wanted)):
                    _write_call(file.create_group(chosen[rows[0]["seq"]]), capture, rank, rows, inputs=inputs)
    except OSError as error:
        raise TrueupError(f"{file_path} cannot be written: {error}") from None
    return len(chosen)


def _write_call(group: Any, capture: Capture, rank: int, rows: Sequence[Row], *, inputs: bool) -> None:
    first = rows[0]
    group.attrs["Phase"], group.attrs["Scope"] = first["phase"], first["scope"]
    overload = _overload(first["op"], rows)
    for row in rows:
        side, _, rest = row["slot"].partition(".")
        if side == "arguments" and inputs:
            _write_values(group, overload, row["value"])
        elif row["dtype"] is not None and (side == "output" or (side == "input" and inputs)):
            array = payload_of(capture, rank, row)
            if array is not None:
                names, several = _names(overload, side, rest.split("."))
                _write_tensor(group, [side, *names], savable(array), row, TENSORS if several else TENSOR)


def _write_tensor(group: Any, path: Sequence[str], array: Any, row: Row, kind: int) -> None:
    stored = array.astype(np.float32) if array.dtype == np.float16 else array
    name = "/".join(path)
    if name in group:  # an argument that is written is an output, too
        return
    dataset = group.create_dataset(name, data=stored)
    dataset.attrs["DeviceType"] = DEVICE_TYPES.get(str(row["device"]).partition(":")[0], 0)
    dataset.attrs["DataType"] = DATA_TYPES.get(row["dtype"], 1)  # bfloat16 and narrower are stored as, and called, float32
    dataset.attrs["FormatType"], dataset.attrs["Type"] = FORMAT_ND, kind
    dataset.attrs["Stride"] = np.array(row["strides"] or [], np.int64)


def _write_values(group: Any, overload: str | None, text: str | None) -> None:
    """Write numbers that an operator was given; text and lists of other things are left out, as they are in the capture."""
    given = json.loads(text) if text else {}
    for key, value in given.items() if isinstance(given, dict) else ():
        flags = {bool: BOOLEAN, int: INTEGER, float: DOUBLE}
        is_list = isinstance(value, list) and value and all(type(one) is int for one in value)
        kind = INTEGERS if is_list else flags.get(type(value))
        if kind is not None:
            (name, *_), _ = _names(overload, "input", [key])
            dataset = group.create_dataset(f"input/{name}", data=np.asarray(value))
            dataset.attrs["Type"] = kind


def _overload(op: str, rows: Sequence[Row]) -> str | None:
    """Return ``aten::add.Tensor``, as far as the capture tells."""
    for row in rows:
        if row["slot"] == "arguments" and row.get("invocation"):
            made = json.loads(row["invocation"])
            return f"{op}.{made['overload']}" if isinstance(made, dict) and isinstance(made.get("overload"), str) else None
    return None


def _names(overload: str | None, side: str, parts: Sequence[str]) -> tuple[list[str], bool]:
    """Return the path of an argument below ``input`` or ``output``, and whether it is one of a list.

    A list's members lie below it: ``tensors/tensors_0``.
    """
    known = _schema(overload) if overload is not None else {"input": (), "output": ()}
    first = parts[0]
    if first.isdigit():
        place = int(first)
        usual = "result" if not place else f"result{place}"
        name = known[side][place] if place < len(known[side]) else ""
        first = name or (f"arg{place}" if side == "input" else usual)
    first = first.replace("/", "_")
    rest = [f"{first}_{part.replace('/', '_')}" for part in parts[1:]]
    return [first, *rest], bool(rest)


@lru_cache(maxsize=4096)
def _schema(overload: str) -> Mapping[str, tuple[str, ...]]:
    """Return the names of an operator's arguments and results; empty where this PyTorch has no such operator."""
    import torch

    name, _, kind = overload.partition(".")
    space, _, op = name.partition("::")
    found = getattr(getattr(getattr(torch.ops, space, None), op, None), kind or "default", None)
    schema = getattr(found, "_schema", None)
    if schema is None:
        return {"input": (), "output": ()}
    return {"input": tuple(a.name for a in schema.arguments), "output": tuple(r.name for r in schema.returns)}
