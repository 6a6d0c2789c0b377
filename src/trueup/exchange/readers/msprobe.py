"""msprobe (mindstudio-probe): a ``dump.json`` for each step and rank, with call stacks and module parents beside it.

::

    step0/rank0/dump.json            what was computed, in the order in which calls ended
                stack.json           call stacks, each with the calls that share it
                construct.json       which module call is around a call
                dump_tensor_data/    a .pt (PyTorch) or .npy (MindSpore) for each tensor, where tensors were kept

Statistics are Max, Min, Mean and Norm; a field called ``md5`` holds a CRC-32 of the bytes, or an XOR of them. Of an API's backward
msprobe sees what leaves its last autograd node, which `left_gradients` tells apart from gradients of its inputs; where a module
is one function and nothing else, the function has the module's (`msprobe_modules`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from trueup.exchange.readers import marker, names, stacks
from trueup.exchange.readers.arrays import NPY, read_npy, read_pt
from trueup.exchange.readers.dump import Array, Dump, ForeignCall, Frames, Part, UnreadableError
from trueup.exchange.readers.json_members import Members
from trueup.exchange.readers.msprobe_entries import tensors_and_arguments
from trueup.exchange.readers.msprobe_modules import SoleFunctions
from trueup.exchange.readers.msprobe_names import key_of, parse
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.placing import numbered
from trueup.exchange.readers.tree import Tree, folder_of
from trueup.foundation.model import TrueupError

NAME = "msprobe"

LEVELS = {"L0": ("module",), "L1": ("api",), "mix": ("module", "api"), "debug": ("module",)}
FRAMEWORKS = {"pytorch": "torch", "mindspore": "mindspore", "mindtorch": "torch"}
_SAVED = re.compile(r"(?P<name>.+?)(?P<grad>_grad)?\.(?P<index>\d+)\.debug")
LEFT_OUT = (
    "functions that msprobe does not list are not in the dump, and unless its risk_level was ALL views, casts and copies are not; "
    "nested calls and the model itself never are"
)
BUFFERS = "buffers that a module updates are not in the dump"
MAX_ENTRIES = 4_000_000
"""Entries of one dump.json that are put in order: a module has three, an API two."""
LACKS = {
    "L0": ("functions are not in a dump of level L0, nor is the model itself", BUFFERS),
    "mix": (LEFT_OUT, BUFFERS),
    "L1": (LEFT_OUT, "the scopes are unknown: level L1 does not say which module made a call (mix does)"),
    "debug": ("only what the script saved is in a dump of level debug",),
}
"""What a dump of a level does not tell; of level mix, what is left out."""
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


@dataclass(slots=True)
class _Context:
    """What is known of a step before its calls are read."""

    parents: dict[str, str] = field(default_factory=dict)
    stacks: dict[str, tuple[Frames | None, bool]] = field(default_factory=dict)


class _Step:
    """One dump.json and what lies beside it."""

    def __init__(self, tree: Tree, path: str, framework: str, notes: Notes) -> None:
        self.tree, self.path, self.framework, self.notes = tree, path, framework, notes
        self.folder = folder_of(path)
        self.is_ours = marker.in_tree(tree, path) is not None
        self._parents: dict[str, str] = {}
        self._sole = SoleFunctions({})

    def order(self) -> Iterator[str]:
        """Give calls in the order in which they began: a module is written when it ends, after what ran inside.

        What is around each call is read here, and kept for `calls`.
        """
        self._parents = dict(self._read_parents())
        self._sole = SoleFunctions(self._parents)
        known = dict.fromkeys(self._looked_at(name, entry) for name, entry in islice(self._entries(quiet=True), MAX_ENTRIES))
        for key in known:
            chain = [key]
            while (parent := self._parents.get(chain[-1])) in known and parent not in chain:
                chain.append(str(parent))
            yield from reversed(chain)

    def _looked_at(self, name: str, entry: Any) -> str:
        self._sole.look(name, entry)
        return key_of(name)

    def calls(self) -> Iterator[ForeignCall]:
        """Read the calls."""
        context = _Context(self._parents, dict(self._stacks()))
        self._sole.repeated = {key_of(name) for name, (_, repeats) in context.stacks.items() if repeats}
        for name, entry in self._entries():
            if not isinstance(entry, dict):
                self.notes.lose("an entry of dump.json is no object", name)
            elif (call := self._call(name, entry, context)) is not None:
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

    def _call(self, name: str, entry: dict[str, Any], context: _Context) -> ForeignCall | None:
        parsed = parse(name)
        if parsed is None:
            return self._watched(name, entry)
        key = parsed.key()
        frames, repeats = context.stacks.get(name, (None, False))
        if parsed.kind in names.MODULES:
            scope, op = names.module_name(parsed.parts)
            level, phase = "module", "forward"
        else:
            op, level, phase = names.operator(parsed.kind, ".".join(parsed.parts), self.framework)
            scope = self._scope(key, context.parents) or self._scope(parsed.forward() or key, context.parents)
        if parsed.backward:
            phase = "backward"
        elif repeats and phase == "forward":
            phase = "recompute"
        tensors, arguments = tensors_and_arguments(
            name, entry, op, level, parsed.backward, self._load, self.notes, by_argument=self.is_ours
        )
        return ForeignCall(
            key, level, phase, scope, op, tensors, arguments, context.parents.get(key), parsed.forward(), frames
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

    def _scope(self, key: str, parents: dict[str, str]) -> str:
        seen = {key}
        while (parent := parents.get(key)) is not None and parent not in seen:
            parsed = parse(parent)
            if parsed is not None and parsed.kind in names.MODULES:
                return names.module_name(parsed.parts)[0]
            seen.add(parent)
            key = parent
        return ""

    def _read_parents(self) -> Iterator[tuple[str, str]]:
        for name, parent in self._beside("construct.json"):
            if isinstance(parent, list):  # versions that add the micro-batch: [parent, number]
                parent = parent[0] if parent else None
            if isinstance(parent, str):
                yield key_of(name), key_of(parent)

    def _stacks(self) -> Iterator[tuple[str, tuple[Frames | None, bool]]]:
        for name, value in self._beside("stack.json"):
            if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list) and isinstance(value[1], list):
                found = stacks.from_text(value[1])
                yield from ((one, found) for one in value[0] if isinstance(one, str))
            else:  # versions that list the stack of each call
                yield name, stacks.from_text(value)

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
