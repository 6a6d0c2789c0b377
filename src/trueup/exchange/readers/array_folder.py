"""A folder of .npy, .npz and .pt files: each array is an output of a call whose scope is the file's name.

``step1/rank0/encoder.layers.0.npy`` is ``encoder.layers.0`` of rank 0, step 1; ``encoder/attn.output.1.npy`` has slot ``output.1``
of ``encoder.attn``; members of a .npz and of a dictionary in a .pt file are slots by their keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from trueup.exchange.readers.arrays import EMPTY_ZIP, NPY, ZIP, has_torch, npz_members, pt_tensors, read_npy, read_npz
from trueup.exchange.readers.dump import Array, Dump, ForeignCall, ForeignTensor, Part, UnreadableError
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.tree import Tree, places
from trueup.foundation.model import TrueupError

NAME = "arrays"

_PLACES = re.compile(r"(?:step|rank|proc)[-_]?\d{1,9}|rank", re.IGNORECASE)
_SLOT = re.compile(r"(?P<scope>.+?)[._](?P<slot>(?:input|output|grad_input|grad_output|param|grad_param)(?:\.\w+)*)$")


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find arrays by their magic."""
    kinds = {path: kind for path in sorted(tree.files) if (kind := _kind(tree, path)) is not None}
    if not kinds:
        return None
    if set(kinds.values()) == {"pt"} and not has_torch():
        raise TrueupError(f"{tree.source} holds .pt files: install PyTorch to read them, pip install 'trueup[torch]'")
    placed: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for path, kind in kinds.items():
        place = places(path)
        at = place.get("rank", 0), place.get("step", 0)
        placed.setdefault(at, []).append((path, kind))
    parts = [Part(rank, step, _Files(tree, files, notes).calls) for (rank, step), files in sorted(placed.items())]
    lacks = ["what the tensors are is known by their names alone, and the order in which they were computed is unknown"]
    return Dump("a folder of arrays", None, ("module",), "tensor", parts, notes, lacks)


def _kind(tree: Tree, path: str) -> str | None:
    head = tree.head(path)
    if head.startswith(NPY):
        return "npy"
    if head.startswith((ZIP, EMPTY_ZIP)):
        return "npz" if path.lower().endswith(".npz") else "pt"
    return {".npy": "npy", ".npz": "npz"}.get(path[-4:].lower(), "pt" if path.lower().endswith((".pt", ".pth")) else None)


class _Files:
    """The files of one rank and step."""

    def __init__(self, tree: Tree, files: list[tuple[str, str]], notes: Notes) -> None:
        self.tree, self.files, self.notes = tree, files, notes

    def calls(self) -> Iterator[ForeignCall]:
        """Yield a call for each scope, in the order of names."""
        for path, kind in self.files:
            scope, slot = _named(path)
            tensors = list(self._tensors(path, kind, slot))
            if tensors:
                yield ForeignCall(scope, "module", "forward", scope, "tensor", tensors)

    def _tensors(self, path: str, kind: str, slot: str | None) -> Iterator[ForeignTensor]:
        if kind == "npy":
            yield ForeignTensor(slot or "output.0", path, load=partial(read_npy, self.tree, path))
            return
        try:
            if kind == "npz":
                for member in npz_members(self.tree, path):
                    key = member.removesuffix(".npy")
                    load = partial(read_npz, self.tree, path, member)
                    yield ForeignTensor(f"{slot or 'output'}.{key}", f"{path}/{key}", load=load)
            else:
                for key, array in pt_tensors(self.tree, path):
                    name = f"{slot or 'output'}.{key}" if key else slot or "output.0"
                    yield ForeignTensor(name, f"{path}/{key}" if key else path, load=partial(_given, array))
        except UnreadableError as error:
            self.notes.lose(f"files could not be read: {error}", path)


def _given(array: Array) -> Array:
    return array


def _named(path: str) -> tuple[str, str | None]:
    """Return the scope that a path names, and its slot where it names one."""
    parts = path.split("/")
    stem = re.sub(r"\.(npy|npz|pt|pth)$", "", parts[-1], flags=re.IGNORECASE)
    scope = ".".join([*(part for part in parts[:-1] if not _PLACES.fullmatch(part)), stem])
    match = _SLOT.fullmatch(scope)
    return (match["scope"], match["slot"]) if match else (scope, None)
