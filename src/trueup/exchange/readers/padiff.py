"""PaDiff (Paddle and PyTorch models side by side): a ``report.json`` with a tree of layers for each step and rank, .npy beside it.

::

    padiff_dump/model/step_0/rank_0/report.json      outputs of each layer, gradients of its inputs
                                    params.json      weights and gradients of the parameters (weights.json, grads.json)
                                    tensors/tensor_0.npy ...  weights/  grads/

The paths inside are absolute and of the machine that wrote them: only their last two parts are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from trueup.exchange.readers import ascend
from trueup.exchange.readers.contents import BROKEN, read_npy, reason, whole
from trueup.exchange.readers.dump import (
    Array,
    Dump,
    ForeignCall,
    ForeignTensor,
    Notes,
    Part,
    Tree,
    UnreadableError,
    folder_of,
    frames_of,
    numbered,
)
from trueup.exchange.readers.ptdbg import narrowed
from trueup.foundation.model import TrueupError

SIZE_LIMIT = 64 << 20  # largest report that is read; its tree has to be in memory as a whole
MAX_NODES = 1_000_000
PARAMETERS = ("params.json", "weights.json", "grads.json")

_MARKS = (b'"model_name"', b'"framework"')
_FRAME = re.compile(r'File "?[^\n]*\n?[^\n]*')


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find reports by what stands at their top."""
    reports = [path for path in tree.ending(".json") if all(mark in tree.head(path, 4096) for mark in _MARKS)]
    main = {folder_of(path): path for path in sorted(reports, key=lambda p: not p.endswith("report.json"))[::-1]}
    if not main:
        return None
    placed = numbered(main.values(), notes)
    read = [_Report(tree, path, notes) for path in placed]
    framework = next((name for report in read if (name := report.framework()) is not None), None)
    parts = [Part(*placed[report.path], report.calls) for report in read]
    lacks = ["inputs of layers are not in the dump: a layer's own error cannot be told from that of its input"]
    return Dump("PaDiff", framework, ("module", "api"), "tensor", parts, notes, lacks)


class _Report:
    """The reports of one step and rank."""

    def __init__(self, tree: Tree, path: str, notes: Notes) -> None:
        self.tree, self.path, self.notes = tree, path, notes
        self.folder = folder_of(path)

    def framework(self) -> str | None:
        head = self.tree.head(self.path, 4096).decode("utf-8", "replace")
        match = re.search(r'"framework"\s*:\s*"(\w+)"', head)
        return match[1].lower() if match else None

    def calls(self) -> Iterator[ForeignCall]:
        """Read the layers, outer ones first, forward and then backward; then the parameters."""
        layers = self._read("report.json")
        backward: list[tuple[float, ForeignCall]] = []
        scopes: dict[str | None, str] = {None: ""}
        for key, parent, node in self._nodes(None if layers is None else layers.get("tree")):
            scopes[key] = str(node.get("route") or scopes[parent])
            forward, gradients = self._layer(key, parent, node, scopes[key])
            yield forward
            if gradients is not None:
                backward.append((_step(node), gradients))
        yield from (call for _, call in sorted(backward, key=lambda pair: -pair[0]))  # numbered in the forward pass
        for name in PARAMETERS:
            if self.tree.within(self.folder, name) is not None:
                yield from self._parameters(name)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.tree.within(self.folder, name)
        if path is None:
            return None
        try:
            with self.tree.open(path) as file:
                content = whole(file, self.tree.files[path], SIZE_LIMIT)
        except OSError as error:
            raise TrueupError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
        except BROKEN as error:
            self.notes.lose(f"{name} cannot be read: {reason(error)}", path)
            return None
        if isinstance(content, dict):
            return content
        self.notes.lose(f"{name} is no object", path)
        return None

    def _nodes(self, tree: Any) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
        """Yield each layer with its key and its parent's, in the order of execution."""
        pending: list[tuple[str, str | None, Any]] = []
        pending += [(str(k), None, node) for k, node in enumerate(_list(tree))][::-1]
        count = 0
        while pending:
            key, parent, node = pending.pop()
            count += 1
            if not isinstance(node, dict) or count > MAX_NODES:
                why = "a node of the report is no layer" if count <= MAX_NODES else "the report has too many layers"
                self.notes.lose(why, key[:80])
                continue
            yield key, parent, node
            children = _list(node.get("children"))
            pending += [(f"{key}.{k}", key, child) for k, child in enumerate(children)][::-1]

    def _layer(self, key: str, parent: str | None, node: dict[str, Any], scope: str) -> tuple[ForeignCall, ForeignCall | None]:
        """Return the forward and the backward of a layer, or of a function (``type`` is api), whose scope is its layer's."""
        level, op = ("api", str(node.get("name"))) if node.get("type") == "api" else ("module", _class(node.get("name")))
        stack = node.get("stack")
        frames, _ = frames_of(_FRAME.findall(stack) if isinstance(stack, str) else stack)
        outputs = [self._tensor("output", k, one, scope) for k, one in enumerate(_list(node.get("fwd_outputs")))]
        gradients = [self._tensor("grad_input", k, one, scope) for k, one in enumerate(_list(node.get("bwd_grads")))]
        around = None if parent is None else f"{parent}.backward"
        outer = None if parent is None else f"{parent}.forward"
        forward = ForeignCall(f"{key}.forward", level, "forward", scope, op, outputs, {}, outer, None, frames)
        if not gradients:
            return forward, None
        return forward, ForeignCall(
            f"{key}.backward", level, "backward", scope, op, gradients, {}, around, f"{key}.forward", frames
        )  # fmt: skip

    def _tensor(self, side: str, position: int, told: Any, scope: str) -> ForeignTensor:
        told = told if isinstance(told, dict) else {}
        dtype, shape = ascend.dtype(str(told.get("dtype") or "")), _shape(told.get("shape"))
        place = str(told.get("place") or "").lower()
        device = next((d for d in ("cpu", "gpu", "npu", "cuda", "xpu") if d in place), None)
        return ForeignTensor(
            f"{side}.{position}", f"{scope}.{side}.{position}", dtype, shape, load=partial(self._load, told.get("path"), dtype),
            device=device,
        )  # fmt: skip

    def _parameters(self, file: str) -> Iterator[ForeignCall]:
        content = self._read(file)
        for key, _, node in self._nodes(None if content is None else [content.get("tree")]):
            scope, op = str(node.get("route") or ""), _class(node.get("name"))
            for group, slot, phase in (("weights", "param", "forward"), ("grads", "grad_param", "backward")):
                held = node.get(group)
                found = [
                    ForeignTensor(f"{slot}.{name}", f"{scope}.{name}", load=partial(self._load, path, None))
                    for name, path in (held.items() if isinstance(held, dict) else ())
                    if path is not None
                ]
                if found:  # a call of its own: which of a layer's calls they belong to is not said
                    yield ForeignCall(f"{file}.{key}.{phase}", "module", phase, scope, f"{op}.parameters", found)

    def _load(self, path: Any, dtype: str | None) -> Array:
        parts = [part for part in re.split(r"[/\\]", str(path)) if part]
        found = self.tree.within(self.folder, "/".join(parts[-2:])) or self.tree.within(self.folder, parts[-1] if parts else "")
        if found is None:
            raise UnreadableError("its file is missing")
        return narrowed(read_npy(self.tree, found), dtype)


def _step(node: dict[str, Any]) -> float:
    metas = node.get("metas")
    step = metas.get("bwd_step") if isinstance(metas, dict) else None
    return float(step) if isinstance(step, (int, float)) and abs(step) < 1e15 else 0.0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _class(name: Any) -> str:
    """Return the class of a layer: ``(torch) Linear`` and ``Linear(in=3, out=4)`` are ``Linear``."""
    text = re.sub(r"^\s*\([^)]*\)\s*", "", str(name or "layer"))
    return (re.match(r"[\w.]+", text) or re.match(r".*", text))[0].rpartition(".")[2] or "layer"  # type: ignore[index]


def _shape(text: Any) -> tuple[int, ...] | None:
    """Read ``torch.Size([2, 3])`` or ``[2, 3]``."""
    match = re.search(r"\[([\d,\s]*)\]", str(text))
    return (
        ascend.sizes([int(size) for size in match[1].split(",") if size.strip()][:65]) if match and len(match[1]) < 1000 else None
    )
