"""``torch.utils.dumper`` (Ascend's PyTorch 1.5 and 1.8): one HDF5 file with all inputs and outputs of each operator.

``/{operator}/{seqid}/{input or output}/{argument}``, a vector one level deeper; ``seqid`` counts the calls of the run. Attributes
of a dataset say what it was (``Type``), its dtype (``DataType``: half is stored as float32), device and strides. Links of the file,
soft or external, and datasets whose bytes lie in other files are not followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from trueup.exchange.readers.contents import BROKEN, UNPACKED_LIMIT, believable, reason
from trueup.exchange.readers.dump import (
    Array,
    Dump,
    ForeignCall,
    ForeignTensor,
    Notes,
    Part,
    Tree,
    UnreadableError,
    numbered,
    plain,
)
from trueup.exchange.readers.ptdbg import narrowed
from trueup.foundation.model import PHASES, TrueupError

MAGIC = b"\x89HDF\r\n\x1a\n"
DEVICES = {0: "cpu", 1: "cuda", 10: "npu"}
DTYPES = {1: "float32", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}
"""``DataType``; how the tool numbers what PyTorch calls Float, Byte, Char, Short, Int, Long, Bool, Half, Double."""
TENSOR, TENSORS = 0, 1  # ``Type`` of a tensor and of a vector of tensors; the rest are scalars, sizes and options

VENDORS = ("Npu", "Cudnn", "Thnn", "Native")  # how names of one operator begin on different devices; msaccucmp passes over it
ARGUMENTS = {"self": "input", "epsilon": "eps"}  # names of arguments that differ between devices (msaccucmp's own list)

SCOPE_LIMIT = 2000
VALUE_LIMIT = 4096  # elements of an argument that is no tensor


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find HDF5 files by their magic."""
    files = [p for p in sorted(tree.files) if not p.endswith((".npy", ".npz", ".pt")) and tree.head(p).startswith(MAGIC)]
    if not files:
        return None
    try:
        import h5py  # noqa: F401
    except ImportError:
        raise TrueupError(f"{files[0]} is an HDF5 file: install h5py to read it, pip install 'trueup[hdf5]'") from None
    parts = [Part(rank, step, _File(tree, path, notes).calls) for path, (rank, step) in numbered(files, notes).items()]
    lacks = ["scopes, call stacks and the forward call of a backward operator are unknown: the dump is of operators alone"]
    return Dump("torch.utils.dumper", "torch", ("aten",), "tensor", parts, notes, lacks)


class _File:
    def __init__(self, tree: Tree, path: str, notes: Notes) -> None:
        self.tree, self.path, self.notes = tree, path, notes

    def calls(self) -> Iterator[ForeignCall]:
        """Read the calls, in the order of their seqids."""
        import h5py

        try:
            with self.tree.open(self.path) as raw, h5py.File(raw, "r") as file:
                for seqid, op in sorted(self._calls(file)):
                    if (call := self._whole_call(file, op, seqid)) is not None:
                        yield call
        except BROKEN as error:
            self.notes.lose(f"the file is damaged: {reason(error)}", self.path)

    def _whole_call(self, file: Any, op: str, seqid: int) -> ForeignCall | None:
        try:
            return self._call(file[op][str(seqid)], op, seqid)
        except BROKEN as error:
            self.notes.lose(f"a call cannot be read: {reason(error)}", f"{op}/{seqid}")
            return None

    def _calls(self, file: Any) -> Iterator[tuple[int, str]]:
        for op, group in self._members(file, "/"):
            if not hasattr(group, "keys"):
                self.notes.say("a dataset lies outside of an operator and was left out", op)
                continue
            for seqid, _ in self._members(group, op):
                if seqid.isdigit() and str(int(seqid)) == seqid:
                    yield int(seqid), op
                else:
                    self.notes.say("a group that is not a call (its name is not a number) was left out", f"{op}/{seqid}")

    def _members(self, group: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Yield what lies in a group itself; links lead elsewhere."""
        import h5py

        try:
            keys = list(group)
        except BROKEN as error:
            self.notes.lose(f"a group cannot be read: {reason(error)}", name)
            return
        for key in keys:
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                self.notes.lose("links in HDF5 files are not followed", f"{name}/{key}")
                continue
            try:
                yield key, group[key]
            except BROKEN as error:
                self.notes.lose(f"a member of the file cannot be read: {reason(error)}", f"{name}/{key}")

    def _call(self, group: Any, name: str, seqid: int) -> ForeignCall:
        backward = name.rstrip("0123456789").endswith("Backward")
        op = next((name.removeprefix(vendor) for vendor in VENDORS if name.startswith(vendor)), name)
        tensors: list[ForeignTensor] = []
        arguments: dict[str, Any] = {}
        for side, inner in self._members(group, f"{name}/{seqid}"):
            if side not in ("input", "output") or not hasattr(inner, "keys"):
                self.notes.say("a member of a call is neither input nor output and was left out", f"{name}/{seqid}/{side}")
                continue
            for path, dataset in self._datasets(inner, ()):
                whole = "/".join((name, str(seqid), side, *path))
                slot = ".".join((side, ARGUMENTS.get(path[0], path[0]), *(p.removeprefix(f"{path[0]}_") for p in path[1:])))
                if _attribute(dataset, "Type", TENSOR) in (TENSOR, TENSORS):
                    tensors.append(self._tensor(slot, whole, dataset))
                else:
                    arguments[slot.removeprefix("input.")] = self._value(dataset, whole)
        phase, scope = _told(group)
        phase = phase or ("backward" if backward else "forward")
        return ForeignCall(f"{op}.{seqid}", "aten", phase, scope, op if backward else f"aten::{op}", tensors, arguments)

    def _datasets(self, group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for key, member in self._members(group, "/".join(path)):
            if not hasattr(member, "keys"):
                yield (*path, key), member
            elif len(path) < 3:
                yield from self._datasets(member, (*path, key))
            else:
                self.notes.say("groups deeper than a vector of vectors were left out", "/".join((*path, key)))

    def _tensor(self, slot: str, name: str, dataset: Any) -> ForeignTensor:
        dtype = DTYPES.get(_attribute(dataset, "DataType", -1))
        shape = tuple(int(size) for size in dataset.shape or ())
        strides = dataset.attrs.get("Stride") if "Stride" in dataset.attrs else None
        steps = tuple(int(s) for s in np.ravel(strides)[:64]) if strides is not None else None
        device = DEVICES.get(_attribute(dataset, "DeviceType", -1))
        return ForeignTensor(
            slot, name, dtype, shape, load=partial(load, dataset, dtype), device=device,
            strides=steps if steps is not None and len(steps) == len(shape) else None,
        )  # fmt: skip

    def _value(self, dataset: Any, name: str) -> Any:
        try:
            if dataset.size is not None and dataset.size > VALUE_LIMIT:
                self.notes.say("long arguments were left out", name)
                return None
            value = load(dataset, None)
        except (UnreadableError, *BROKEN) as error:
            self.notes.lose(f"an argument cannot be read: {error}", name)
            return None
        return value.item() if value.size == 1 else value.tolist()


def _told(group: Any) -> tuple[str | None, str]:
    """Return phase and scope of a call, which `trueup_compat.dumper` writes; a phase is one that there is."""
    try:
        phase, scope = (group.attrs.get(name) for name in ("Phase", "Scope"))
    except BROKEN:
        return None, ""
    is_known = isinstance(phase, str) and phase in PHASES
    return (phase if is_known else None), (scope[:SCOPE_LIMIT] if is_known and isinstance(scope, str) else "")


def _attribute(dataset: Any, name: str, default: int) -> int:
    try:
        return int(np.ravel(dataset.attrs[name])[0])
    except BROKEN:
        return default


def load(dataset: Any, dtype: str | None) -> Array:
    """Read a dataset as the dtype that it was; raises UnreadableError if its bytes lie elsewhere, or fewer than it claims."""
    if dataset.external is not None or dataset.is_virtual:
        raise UnreadableError("its bytes lie in other files, which are not opened")
    if dataset.dtype.hasobject or dataset.shape is None:
        raise UnreadableError("it holds no numbers")
    needed = int(np.prod([int(s) for s in dataset.shape], dtype=object)) * dataset.dtype.itemsize
    believable(needed, int(dataset.id.get_storage_size()))
    if needed > UNPACKED_LIMIT and dataset.chunks is not None:
        raise UnreadableError(f"it would unpack to {needed:,} bytes")
    array = narrowed(plain(np.asarray(dataset[()])), dtype)
    if dtype == "bool" and array.dtype.kind in "iu":
        return array.astype(bool)
    return array
