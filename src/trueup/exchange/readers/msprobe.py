"""msprobe (mindstudio-probe): a ``dump.json`` for each step and rank, with call stacks and module parents beside it.

::

    step0/rank0/dump.json            what was computed, in the order in which calls ended
                stack.json           call stacks, each with the calls that share it
                construct.json       which module call is around a call
                dump_tensor_data/    a .pt (PyTorch) or .npy (MindSpore) for each tensor, where tensors were kept

Statistics are Max, Min, Mean and Norm; a field called ``md5`` holds a CRC-32 of the bytes, or an XOR of them. Of an API's backward
msprobe sees what leaves its last autograd node, which `left_gradients` tells apart from gradients of its inputs; where a module
is one function and nothing else, the function has the module's (`msprobe_modules`).

One entry of msprobe's dump.json: tensors with their numbers, and the arguments that are none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from trueup.exchange.readers import ascend
from trueup.exchange.readers.ascend import Left, left_gradients, told_statistics, transposed
from trueup.exchange.readers.contents import NPY, Members, read_npy, read_pt
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
from trueup.exchange.readers.msprobe_modules import SoleFunctions, key_of, parse
from trueup.foundation.model import TrueupError

LEVELS = {"L0": ("module",), "L1": ("api",), "mix": ("module", "api"), "debug": ("module",)}
FRAMEWORKS = {"pytorch": "torch", "mindspore": "mindspore", "mindtorch": "torch"}
_SAVED = re.compile(r"(?P<name>.+?)(?P<grad>_grad)?\.(?P<index>\d+)\.debug")
LEFT_OUT = (
    "functions that msprobe does not list are not in the dump, and unless its risk_level was ALL views, casts and copies are not; "
    "nested calls and the model itself never are"
)
BUFFERS = "buffers that a module updates are not in the dump"
MAX_ENTRIES = 4_000_000  # entries of one dump.json that are put in order: a module has three, an API two
LACKS = {
    "L0": ("functions are not in a dump of level L0, nor is the model itself", BUFFERS),
    "mix": (LEFT_OUT, BUFFERS),
    "L1": (LEFT_OUT, "the scopes are unknown: level L1 does not say which module made a call (mix does)"),
    "debug": ("only what the script saved is in a dump of level debug",),
}
"""Gaps of a dump, by its level."""
HEADER = frozenset({"task", "level", "framework", "dump_data_dir", "data"})


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find the dumps by what stands at the top of JSON files."""
    headers: dict[str, dict[str, Any]] = {}
    for path in tree.ending(".json"):
        if tree.head(path).lstrip()[:1] == b"{" and (header := _header(tree, path)) is not None:
            headers[path] = header
    if not headers:
        return None
    for path in [p for p in headers if p.endswith("debug.json") and f"{folder_of(p)}dump.json" in headers]:
        notes.say("debug.json was left out, for a dump.json lies beside it; import it by its own path", path)
        del headers[path]
    first = next(iter(headers.values()))
    framework = FRAMEWORKS.get(str(first.get("framework")), "torch")
    parts = [
        Part(rank, step, reader.calls, reader.order)
        for path, (rank, step) in numbered(headers, notes).items()
        if (reader := _Step(tree, path, framework, notes))
    ]
    level = str(first.get("level"))
    detail = "tensor" if first.get("task") == "tensor" else "stats"
    lacks = list(LACKS.get(level, (LEFT_OUT,)))
    return Dump("msprobe", framework, LEVELS.get(level, ("module", "api")), detail, parts, notes, lacks)


def _header(tree: Tree, path: str) -> dict[str, Any] | None:
    """Return the members before the data, None where the file is no dump."""
    found: dict[str, Any] = {}
    try:
        with tree.open(path) as file:
            for group, key, value in Members(file, enter="data"):
                if group == "data":
                    return found if found.keys() & HEADER else None
                found[key] = value
                if len(found) > 32 or (not found.keys() & HEADER):
                    return None
    except OSError:
        return None
    return found if {"task", "level"} <= found.keys() else None  # cut off before the data


class _Step:
    """One dump.json and what lies beside it."""

    def __init__(self, tree: Tree, path: str, framework: str, notes: Notes) -> None:
        self.tree, self.path, self.framework, self.notes = tree, path, framework, notes
        self.folder = folder_of(path)
        self.is_ours = ascend.marker_in_tree(tree, path) is not None
        self._parents: dict[str, str] = {}
        self._stacks: dict[str, tuple[Frames | None, bool]] = {}
        self._sole = SoleFunctions({})

    def order(self) -> Iterator[str]:
        """Give calls in the order in which they began: a module is written when it ends, after what ran inside. What is around
        each call is read here, and kept for `calls`."""
        self._parents = dict(self._read_parents())
        self._sole = SoleFunctions(self._parents)
        known: dict[str, None] = {}
        for name, entry in islice(self._entries(quiet=True), MAX_ENTRIES):
            self._sole.look(name, entry)
            known[key_of(name)] = None
        for key in known:
            chain = [key]
            while (parent := self._parents.get(chain[-1])) in known and parent not in chain:
                chain.append(str(parent))
            yield from reversed(chain)

    def calls(self) -> Iterator[ForeignCall]:
        self._stacks = dict(self._read_stacks())
        self._sole.repeated = {key_of(name) for name, (_, repeats) in self._stacks.items() if repeats}
        for name, entry in self._entries():
            if not isinstance(entry, dict):
                self.notes.lose("an entry of dump.json is no object", name)
            elif (call := self._call(name, entry)) is not None:
                yield call
                if (more := self._sole.gradients(name, call)) is not None:
                    yield more

    def _entries(self, quiet: bool = False) -> Iterator[tuple[str, Any]]:
        try:
            with self.tree.open(self.path) as file:
                members = Members(file, enter="data")
                yield from ((key, value) for group, key, value in members if group == "data" and key)
        except OSError as error:
            raise TrueupError(f"{self.path} cannot be read: {error.strerror}; check its permissions") from None
        if members.problem and not quiet:
            self.notes.lose(f"dump.json was read as far as it is whole: {members.problem}", self.path)

    def _call(self, name: str, entry: dict[str, Any]) -> ForeignCall | None:
        parsed = parse(name)
        if parsed is None:
            return self._watched(name, entry)
        key = parsed.key()
        frames, repeats = self._stacks.get(name, (None, False))
        if parsed.kind in ascend.MODULES:
            scope, op = ascend.module_name(parsed.parts)
            level, phase = "module", "forward"
        else:
            op, level, phase = ascend.operator(parsed.kind, ".".join(parsed.parts), self.framework)
            scope = self._scope(key) or self._scope(parsed.forward() or key)
        if parsed.backward:
            phase = "backward"
        elif repeats and phase == "forward":
            phase = "recompute"
        tensors, arguments = tensors_and_arguments(
            name, entry, op, level, parsed.backward, self._load, self.notes, by_argument=self.is_ours
        )
        return ForeignCall(
            key, level, phase, scope, op, tensors, arguments, self._parents.get(key), parsed.forward(), frames
        )  # fmt: skip

    def _watched(self, name: str, entry: dict[str, Any]) -> ForeignCall:
        """Read what ``PrecisionDebugger.save`` kept, or an entry of a kind that is not known: as tensors of that name."""
        tensors, arguments = tensors_and_arguments(name, {"output": entry}, "", "module", False, self._load, self.notes)
        match = _SAVED.fullmatch(name)
        if match is None:
            self.notes.say("an entry has a name of no known form; its tensors are kept under it", name)
            return ForeignCall(name, "module", "forward", name, "tensor", tensors, arguments)
        phase, value = ("backward", f"{match['name']}.{match['index']}.debug") if match["grad"] else ("forward", None)
        return ForeignCall(name, "module", phase, match["name"], "msprobe.save", tensors, arguments, forward=value)

    def _scope(self, key: str) -> str:
        seen = {key}
        while (parent := self._parents.get(key)) is not None and parent not in seen:
            parsed = parse(parent)
            if parsed is not None and parsed.kind in ascend.MODULES:
                return ascend.module_name(parsed.parts)[0]
            seen.add(parent)
            key = parent
        return ""

    def _read_parents(self) -> Iterator[tuple[str, str]]:
        for name, parent in self._beside("construct.json"):
            if isinstance(parent, list):  # versions that add the micro-batch: [parent, number]
                parent = parent[0] if parent else None
            if isinstance(parent, str):
                yield key_of(name), key_of(parent)

    def _read_stacks(self) -> Iterator[tuple[str, tuple[Frames | None, bool]]]:
        for name, value in self._beside("stack.json"):
            if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list) and isinstance(value[1], list):
                found = frames_of(value[1])
                yield from ((one, found) for one in value[0] if isinstance(one, str))
            else:  # versions that list the stack of each call
                yield name, frames_of(value)

    def _beside(self, name: str) -> Iterator[tuple[str, Any]]:
        path = self.tree.within(self.folder, name)
        if path is None:
            if not self.path.endswith("debug.json"):
                self.notes.say(f"there is no {name} beside dump.json", self.path)
            return
        try:
            with self.tree.open(path) as file:
                members = Members(file)
                yield from ((key, value) for _, key, value in members)
        except OSError as error:
            self.notes.lose(f"{name} cannot be read: {error.strerror}", path)
            return
        if members.problem:
            self.notes.lose(f"{name} was read as far as it is whole: {members.problem}", path)

    def _load(self, name: str) -> Array:
        path = self.tree.within(f"{self.folder}dump_tensor_data/", name)
        if path is None:
            raise UnreadableError("its file is missing")
        return read_npy(self.tree, path) if self.tree.head(path).startswith(NPY) else read_pt(self.tree, path)


TENSORS = frozenset({
    "torch.Tensor", "DTensor", "FakeTensor", "AsyncCollectiveTensor", "NestedTensor", "BatchedTensor", "GradTrackingTensor",
    "numpy.ndarray", "mindspore.Tensor",
})  # fmt: skip

GROUPS = {
    "input_args": "input", "input_kwargs": "input", "output": "output", "input": "grad_output", "parameters": "param",
    "grad_input": "grad_input", "grad_output": "grad_output",
}  # fmt: skip
"""Members of an entry and the slots that they are; in a backward entry ``output`` is what leaves, and a name that is none of these
is a parameter with its gradient."""

_CHECKSUM = re.compile(r"(0x)?[0-9a-fA-F]{8,128}")

Found = tuple[list[ForeignTensor], dict[str, Any]]
Loader = Callable[[str], Array]


def tensors_and_arguments(
    name: str, entry: dict[str, Any], op: str, level: str, backward: bool, load: Loader, notes: Notes, *,
    by_argument: bool = False,
) -> Found:  # fmt: skip
    """Read the entry ``name``, decoded, of a call ``op`` (in our words). ``load`` reads the tensor in the file of a name; it
    raises UnreadableError. ``notes`` take what is odd. ``by_argument``: gradients that leave a call bear the places of its
    arguments (`ascend.Marker`)."""
    tensors: list[ForeignTensor] = []
    arguments: dict[str, Any] = {}
    for group, content in entry.items():
        if group == "output" and level == "module" and not backward:
            content = _of_names(content)
        leaves_node = backward and group in ("output", "grad_input")
        left = _leaving(content, op, level, by_argument=by_argument) if leaves_node else []
        for path, leaf in ascend.leaves(content):
            if leaf is None:
                continue
            slot, turned = _slot(group, path, op, left)
            if isinstance(leaf, dict) and isinstance(leaf.get("tensor"), dict):  # an operation of batch_isend_irecv
                arguments |= {f"{slot}.{key}": leaf[key] for key in ("op", "peer", "tag") if key in leaf}
                leaf = leaf["tensor"]
            if isinstance(leaf, dict) and ("shape" in leaf or leaf.get("type") in TENSORS) and "dtype" in leaf:
                tensor = _tensor(_named(name, group, path), slot, leaf, load, notes)
                tensors.append(transposed(tensor) if turned else tensor)
            elif slot.startswith("input.") and isinstance(leaf, dict):
                _keep(arguments, slot.removeprefix("input.").split("."), value_of(leaf))
            elif not isinstance(leaf, dict):
                notes.say("a member of an entry is neither tensor nor argument", f"{name}.{group}")
    return tensors, {key: _as_list(value) for key, value in arguments.items()}


def _of_names(content: Any) -> Any:
    """Return what a module returned: one object with names (a ``ModelOutput``) is no list of one, as a native capture has it."""
    lone = content[0] if isinstance(content, list) and len(content) == 1 else None
    return lone if isinstance(lone, dict) and not ascend.is_leaf(lone) else content


def _named(name: str, group: str, path: tuple[str, ...]) -> str:
    """Return the tensor's name as msprobe's own results and files have it."""
    if group not in GROUPS:
        return ".".join((name, group, *path[1:]))
    return ".".join((name, "input" if group in ("input_args", "input_kwargs") else group, *path))


def _leaving(content: Any, op: str, level: str, *, by_argument: bool) -> list[Left]:
    """Return whose gradients the members of a list are that left a call in the backward."""
    gradients = content if isinstance(content, list) else [content]
    if by_argument:
        return [Left(f"grad_input.{ascend.argument(op, str(k))}") for k in range(len(gradients))]
    if level == "module":
        return [Left(f"grad_input.{k}") for k in range(len(gradients))]
    return left_gradients(op, [ascend.sizes(one.get("shape")) if isinstance(one, dict) else None for one in gradients])


def _slot(group: str, path: tuple[str, ...], op: str, left: Sequence[Left]) -> Left:
    first, rest = (path[0], path[1:]) if path else ("0", ())
    if group not in GROUPS:
        return Left(".".join(("grad_param", group, *path[1:])))  # {parameter: [gradient]}
    kind = GROUPS[group]
    if kind == "input":
        return Left(".".join(("input", ascend.argument(op, first) if group == "input_args" else first, *rest)))
    if left:
        of = left[int(first)] if first.isdigit() and int(first) < len(left) else Left(f"grad_input.{first}")
        return Left(".".join((of.slot, *rest)), of.transposed and not rest)
    return Left(".".join((kind, first, *rest)))


def _tensor(name: str, slot: str, leaf: dict[str, Any], load: Loader, notes: Notes) -> ForeignTensor:
    shape, dtype = ascend.sizes(leaf.get("shape")), ascend.dtype(leaf.get("dtype"))
    if shape is None or dtype is None:
        notes.lose("a tensor has no shape or dtype that can be read", name)
    numbers: tuple[Any, ...] = tuple(leaf.get(key) for key in ("Max", "Min", "Mean", "Norm"))
    if shape == () and isinstance(leaf.get("md5"), float):  # msprobe 26.2 puts the value of a scalar where its XOR belongs
        numbers = (leaf["md5"],) * 4
    statistics, told = told_statistics(numbers, dtype, shape)
    file = leaf.get("data_name")
    reader = partial(load, file) if isinstance(file, str) else None
    return ForeignTensor(slot, name, dtype, shape, statistics, told, _checksum(leaf.get("md5")), reader, _part_in_whole(leaf))


def _part_in_whole(leaf: dict[str, Any]) -> str | None:
    """Say how a DTensor's local shard is placed, as a native capture does; the whole's shape is not in the dump."""
    placements = leaf.get("placements")
    if not isinstance(placements, list):
        return None
    words = [
        f"{kind}({next(iter(details.values()), '') if isinstance(details, dict) else ''})"
        for placement in placements[:8]
        if isinstance(placement, dict)
        for kind, details in placement.items()
    ]
    ranks = _short(leaf.get("device_mesh"), 2000)
    return json.dumps({"placements": words, "mesh": {"ranks": "many" if ranks is None else json.loads(ranks)}})


def _short(value: Any, limit: int) -> str | None:
    """Encode a value, None where that would be long or deep."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (RecursionError, TypeError):
        return None
    return text if len(text) <= limit else None


def _checksum(text: Any) -> str | None:
    """Return a checksum with its algorithm: 16 digits after 0x are an XOR, 8 a CRC-32, whatever the field is called."""
    if not isinstance(text, str) or not _CHECKSUM.fullmatch(text):
        return None
    if text.startswith("0x"):
        return f"xor64:{text[2:].lower()}"
    return f"{ {8: 'crc32', 16: 'xxh3', 32: 'md5'}.get(len(text), f'unknown{len(text)}') }:{text.lower()}"


def value_of(leaf: dict[str, Any]) -> Any:
    """Return an argument as a native capture encodes it."""
    kind, value = leaf.get("type"), leaf.get("value")
    if kind == "slice" and isinstance(value, list):
        return ":".join(str(part) for part in value[:3])
    if kind in ("torch.device", "torch.ProcessGroup"):
        return None
    if kind == "torch.memory_format":
        return f"torch.{leaf.get('format')}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None and kind not in ("NoneType",):
        return _short({k: v for k, v in leaf.items() if k != "type"}, 400)
    return value


def _keep(arguments: dict[str, Any], path: list[str], value: Any) -> None:
    """Put a value into nested objects; lists are objects of numbered members until `_as_list`."""
    if value is None:
        return
    for part in path[:-1]:
        inner = arguments.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        arguments = inner
    arguments[path[-1]] = value


def _as_list(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _as_list(one) for key, one in value.items()}
    return list(inner.values()) if inner and all(key.isdigit() for key in inner) else inner
