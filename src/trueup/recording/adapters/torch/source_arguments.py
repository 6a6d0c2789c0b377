"""The arguments of a recorded call as Python text, and the statements that load its tensors (`source` has the rules)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from trueup.recording.adapters.torch.replay_arguments import ALIGNMENT, call_grad, writes
from trueup.recording.adapters.torch.replay_guessing import assumed
from trueup.recording.adapters.torch.replay_memory import NotReplayable, constant, contiguous, extent, fill, from_numpy, natural
from trueup.recording.adapters.torch.replaying import ON_HOST
from trueup.recording.execution.cases import Case
from trueup.recording.execution.recorded import RecordedTensor, read_state, tensor_nodes

MOST_MEMORY = 1 << 22
"""Elements between the first and last of a tensor up to which the memory between them is kept in the file."""

_TAKEN = frozenset({"given", "device", "torch", "out", "generator", "restore_random", "read_of", "found"})


@dataclass
class Text:
    """What is written for all calls of a test together."""

    loads: list[str] = field(default_factory=list)
    """Statements that load tensors: they come first, so that nothing stands between the calls."""
    calls: list[str] = field(default_factory=list)
    """Statements that execute the calls."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    helpers: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=lambda: set(_TAKEN))

    def name(self, wanted: str) -> str:
        """Return a variable that is not used yet, and use it."""
        numbered = (f"{wanted}_{k}" for k in itertools.count(2))
        found = wanted if wanted not in self.taken else next(n for n in numbered if n not in self.taken)
        self.taken.add(found)
        return found


class Arguments:
    """Writes what one call is given.

    Args:
        case: the call.
        written: arguments that it writes (`source_paths.paths_of`).
        text: what the test has already.
        handed: expressions for what it reads of earlier calls, by slot.
    """

    def __init__(self, case: Case, written: frozenset[str], text: Text, handed: Mapping[str, str]) -> None:
        self._case, self._call, self._written, self._text, self._handed = case, case.made, written, text, handed
        self._grad = case.forward is not None
        self.invocation = self._call.invocation if self._call.invocation is not None else assumed(self._call)
        nodes = tensor_nodes([self.invocation.get("args"), self.invocation.get("kwargs")])
        self._nodes = {str(n["tensor"]): n for n in nodes}
        self.names: dict[str, str] = {}
        """Variables by slot."""
        self.leaves: dict[str, str] = {}
        """Variables of what gradients are taken of, by slot."""
        self._memories: dict[str, str] = {}
        self._groups: dict[str, tuple[str, int]] = {}

    def value(self, node: Any, depth: int = 0) -> str:
        """Write an argument."""
        if node is None or isinstance(node, (bool, int)):
            return repr(node)
        if isinstance(node, float):
            return number(node)
        if isinstance(node, str):
            return ascii(node)
        if depth > 32:
            raise NotReplayable("its arguments are nested too deeply")
        if isinstance(node, list):
            return f"[{', '.join(self.value(v, depth + 1) for v in node)}]"
        if not isinstance(node, dict):
            raise NotReplayable("its arguments are damaged in the capture")
        if "tensor" in node:
            return self._tensor(node)
        for key, form in (("tuple", "({})"), ("size", "torch.Size([{}])")):
            if isinstance(node.get(key), list):
                items = [self.value(v, depth + 1) for v in node[key]]
                return form.format(", ".join(items) + ("," if key == "tuple" and len(items) == 1 else ""))
        if isinstance(node.get("dict"), dict):
            return "{" + ", ".join(f"{str(k)!a}: {self.value(v, depth + 1)}" for k, v in node["dict"].items()) + "}"
        return self._constant(node)

    def _constant(self, node: Mapping[str, Any]) -> str:
        if node.get("ellipsis") is True:
            return "..."
        for key, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
            if key in node:
                return str(constant(kind, node[key]))  # of what was looked up: torch.float32
        if "device" in node:
            return self.where(str(node["device"]))
        if "float" in node and node["float"] in ("nan", "inf", "-inf"):
            return number(float(node["float"]))
        if "complex" in node:
            real, imaginary = (float.fromhex(str(part)) for part in node["complex"])
            return f"complex({number(real)}, {number(imaginary)})"
        if "slice" in node:
            bounds = node["slice"]
            if isinstance(bounds, list) and len(bounds) == 3 and all(b is None or type(b) is int for b in bounds):
                return f"slice({', '.join(map(repr, bounds))})"
        if isinstance(node.get("generator"), dict):
            return self._generator(node["generator"])
        if "other" in node:
            raise NotReplayable(f"an argument is a {str(node['other'])[:80]}, which a capture cannot hold")
        raise NotReplayable("its arguments are damaged in the capture")

    def where(self, recorded: str) -> str:
        """Write the device of what was on a recorded one."""
        return "device" if recorded.partition(":")[0] == self._case.home else '"cpu"'

    def _generator(self, node: Mapping[str, Any]) -> str:
        name = self._text.name("generator")
        self._text.tensors[name] = torch.frombuffer(bytearray(read_state(node.get("state")) or b"\0"), dtype=torch.uint8).clone()
        self._text.helpers.add("generator")
        return f'generator({self.where(str(node.get("device", "cpu")))}, given["{name}"])'

    def out(self, node: Any) -> str:
        """Write what the call is to write its result to."""
        if isinstance(node, list):
            return f"({', '.join(self.out(n) for n in node)},)"
        if not (isinstance(node, dict) and isinstance(node.get("empty"), list) and len(node["empty"]) == 4):
            raise NotReplayable("its arguments are damaged in the capture")
        dtype, shape, strides, device = node["empty"]
        if not all(isinstance(v, list) and all(type(n) is int for n in v) for v in (shape, strides)):
            raise NotReplayable("it writes to a tensor that is no plain array")
        laid = f"{tuple(shape)!r}, {tuple(strides)!r}"
        return f"torch.empty_strided({laid}, dtype={constant(torch.dtype, dtype)}, device={self.where(str(device))})"

    # ---------------------------------------------------------------- tensors
    def _tensor(self, node: Mapping[str, Any]) -> str:
        slot = str(node["tensor"])
        if slot in self.names:
            return self.names[slot]
        recorded = self._call.tensors.get(slot)
        if recorded is None:
            raise NotReplayable(f"{slot} is not in the capture")
        if "kind" in node or recorded.strides is None:
            raise NotReplayable(f"{slot} is no plain array ({str(node.get('kind', 'sparse'))[:80]})")
        shared = node.get("shares")
        if isinstance(shared, str) and self._same(slot, shared):
            self.names[slot] = self.names[shared]
            if shared in self.leaves:
                self.leaves[slot] = self.leaves[shared]
            return self.names[slot]
        lines = self._text.calls if slot in self._handed else self._text.loads
        name = self._hand(slot) if slot in self._handed else self.load(slot, recorded, node)
        wants = node.get("grad") is True and recorded.dtype.startswith(("float", "bfloat", "complex"))
        if call_grad(self._call, self._grad) and wants:
            if slot in self._written:
                leaf = self._text.name(f"{name}_leaf")
                lines += [f"{leaf} = {name}.requires_grad_()", f"{name} = {leaf}.clone()  # the call may write to it"]
                self.leaves[slot] = leaf
            else:
                lines.append(f"{name}.requires_grad_()")
                self.leaves[slot] = name
        return name

    def _hand(self, slot: str) -> str:
        """Write what is read of an earlier call."""
        name = self.names[slot] = self._name(slot)
        self._text.calls.append(f"{name} = {self._handed[slot]}")
        return name

    def _same(self, slot: str, shared: str) -> bool:
        a, b = self._call.tensors.get(slot), self._call.tensors.get(shared)
        if a is None or b is None or shared not in self.names:
            return False
        offsets = [self._nodes.get(s, {}).get("offset", 0) for s in (slot, shared)]
        return offsets[0] == offsets[1] and (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides)

    def load(self, slot: str, recorded: RecordedTensor, node: Mapping[str, Any]) -> str:
        """Write how a tensor is loaded, and return its variable."""
        name = self._name(slot)
        dtype = constant(torch.dtype, recorded.dtype)
        hosted = slot in ON_HOST.get(self._call.key.op, ()) or self.where(recorded.device) != "device"
        to = "" if hosted else ".to(device)"
        what = f"{recorded.dtype} {list(recorded.shape)!r}"
        self.names.setdefault(slot, name)
        strides, array = recorded.strides or (), recorded.array()
        if (found := self._shared(node, slot)) is not None:
            memory, start = found
            self._put(memory, start, array, recorded, node)
            if self._groups[memory][0]:
                self._text.loads.append(f'{memory} = given["{memory}"]{to}')
                self._groups[memory] = ("", start)
            offset = natural(node.get("offset", 0)) - start
            self._text.loads.append(f"{name} = {memory}.as_strided({recorded.shape!r}, {strides!r}, {offset})  # {what}")
            return name
        lead = natural(node.get("offset", 0)) % max(ALIGNMENT // dtype.itemsize, 1)
        reach = extent(recorded.shape, strides)
        plain = (strides == contiguous(recorded.shape) or recorded.numel < 2) and not lead
        if plain or reach > max(MOST_MEMORY, 8 * recorded.numel):
            self._text.tensors[name] = from_numpy(array)
            self._text.loads.append(f'{name} = given["{name}"]{to}  # {what}')
            return name
        memory_of = torch.zeros(lead + reach, dtype=dtype)
        fill(torch.as_strided(memory_of, recorded.shape, strides, lead), array)
        self._text.tensors[name] = memory_of
        laid = f"as_strided({recorded.shape!r}, {strides!r}, {lead})"
        self._text.loads.append(f'{name} = given["{name}"]{to}.{laid}  # {what}')
        return name

    def _shared(self, node: Mapping[str, Any], slot: str) -> tuple[str, int] | None:
        """Return the variable of memory that several arguments share, of which the call writes one, and where it begins."""
        if not writes(self._call):
            return None
        group = str(node.get("shares", slot))
        members = [n for n in self._nodes.values() if n.get("shares") == group or n["tensor"] == group]
        if len(members) < 2:
            return None
        spans = []
        for member in members:
            recorded, first = self._call.tensors.get(str(member["tensor"])), self._call.tensors.get(group)
            if recorded is None or first is None or recorded.strides is None or recorded.dtype != first.dtype:
                return None
            start = natural(member.get("offset", 0))
            spans.append((start, start + extent(recorded.shape, recorded.strides), recorded.dtype))
        begin, size = min(s[0] for s in spans), max(s[1] for s in spans) - min(s[0] for s in spans)
        if size > MOST_MEMORY * 8:
            return None
        if group not in self._memories:
            memory = self._memories[group] = self._text.name(f"memory_of_{_plain(group)}")
            self._text.tensors[memory] = torch.zeros(size, dtype=constant(torch.dtype, spans[0][2]))
            self._groups[memory] = ("new", begin)
        return self._memories[group], begin

    def _put(self, memory: str, start: int, array: NDArray[Any], recorded: RecordedTensor, node: Mapping[str, Any]) -> None:
        offset = natural(node.get("offset", 0)) - start
        fill(torch.as_strided(self._text.tensors[memory], recorded.shape, recorded.strides or (), offset), array)

    def _name(self, slot: str) -> str:
        if slot in self.names:
            return self.names[slot]
        return self._text.name(_plain(slot))


def _plain(slot: str) -> str:
    """Return a variable for a slot: its own name where that is one of ours."""
    plain = slot.replace(".", "_")
    ours = is_word(plain) and plain.startswith(("input_", "grad_output_")) and len(plain) < 60
    return plain if ours else "tensor"


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def is_word(name: Any) -> bool:
    """Tell whether a text is a plain ASCII identifier that Python has no meaning for."""
    import keyword

    return isinstance(name, str) and _WORD.match(name) is not None and not keyword.iskeyword(name)


def number(value: float) -> str:
    """Write a number."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'

