"""A recorded call as Python source that a person reads and pytest runs.

>>> print(Source.of(case, *paths_of(case, Place("cpu")), random=False).body)
    input_0 = given["input_0"].to(device)  # float32 [8, 12]
    with torch.no_grad():
        result = torch.ops.aten.gelu.default(input_0, approximate='none')
    return {"output.0": result}

A capture is untrusted, so no text of it becomes code. A function is looked up in `allowed`, and its name is written only if PyTorch
has the very function under it; dtypes, layouts and devices are looked up; numbers are written by ``repr`` of what was checked to be
numbers; text is an argument or a key, written as an ASCII literal. Variables have names of our own.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from trueup.adapters.torch.replay_arguments import ALIGNMENT, _tensor_nodes, call_grad, writes
from trueup.adapters.torch.replay_guessing import assumed
from trueup.adapters.torch.replay_memory import NotReplayable, constant, contiguous, extent, fill, from_numpy, natural
from trueup.adapters.torch.replaying import ON_HOST
from trueup.adapters.torch.source_names import function_name
from trueup.adapters.torch.source_paths import Path
from trueup.rerun.cases import Case
from trueup.rerun.recorded import RecordedTensor, read_state

MOST_MEMORY = 1 << 22
"""Elements between the first and last of a tensor up to which the memory between them is kept in the file."""


@dataclass
class Source:
    """The parts of a test that depend on the call."""

    expression: str
    """The call: ``torch.nn.functional.linear(input_0, input_1)``."""
    body: str
    """Statements of the function that executes it on ``device``."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the statements load, by variable."""
    helpers: frozenset[str] = frozenset()
    """Functions that the statements use."""

    @staticmethod
    def of(case: Case, paths: Mapping[str, Path], written: frozenset[str], *, random: bool) -> Source:
        """Write a case.

        Args:
            case: the call.
            paths: where its results are found, and
            written: which arguments it writes (`paths_of`).
            random: whether it draws random numbers, so that the state of the generators belongs to it.

        Raises:
            NotReplayable: it cannot be written, and why.
        """
        return _Writer(case, written).write(paths, random)


class _Writer:
    def __init__(self, case: Case, written: frozenset[str]) -> None:
        self._case, self._call, self._written = case, case.made, written
        if (self._call.invocation or {}).get("transforms"):
            raise NotReplayable("it was made inside a torch.func transform; its aten calls can be written, each by itself")
        self._grad = case.forward is not None
        self._invocation = self._call.invocation if self._call.invocation is not None else assumed(self._call)
        self._nodes = {str(n["tensor"]): n for n in _tensor_nodes([self._invocation.get("args"), self._invocation.get("kwargs")])}
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        self._leaves: dict[str, str] = {}
        self._groups: dict[str, tuple[str, int]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._helpers: set[str] = set()

    def write(self, paths: Mapping[str, Path], random: bool) -> Source:
        """Return the source."""
        function = function_name(self._call)
        arguments = [self.value(v) for v in self._invocation["args"]]
        for name, value in dict(self._invocation.get("kwargs") or {}).items():
            if not _is_word(name):
                raise NotReplayable("its arguments are damaged in the capture")
            arguments.append(f"{name}={self.value(value)}")
        if "out" in self._invocation:
            arguments.append(f"out={self._out(self._invocation['out'])}")
        gradients = self._gradients()
        if random:
            self._seed()
        expression = f"{function}({', '.join(arguments)})"
        self._call_it(expression)
        self._return(paths, gradients)
        return Source(expression, "\n".join("    " + line for line in self._lines), self._tensors, frozenset(self._helpers))

    def _call_it(self, expression: str) -> None:
        enabled = bool(self._invocation.get("grad", False)) or self._grad
        modes = ["torch.enable_grad()" if enabled else "torch.no_grad()"]
        for kind, dtype in dict(self._invocation.get("autocast") or {}).items():
            where = "torch.device(device).type" if kind == self._case.home else '"cpu"'
            constant(torch.dtype, dtype)
            modes.append(f"torch.autocast({where}, dtype=torch.{dtype}, cache_enabled=False)")
        self._lines += [f"with {', '.join(modes)}:", f"    result = {expression}"]

    def _return(self, paths: Mapping[str, Path], gradients: Mapping[str, str]) -> None:
        if not self._grad:
            items = [f"{slot!a}: {self._reach(path)}" for slot, path in paths.items()]
            self._give("return {", items, "}")
            return
        wanted = {slot: self._leaves[slot.removeprefix("grad_")] for slot in self._case.call.outputs if slot[5:] in self._leaves}
        ends = [self._reach(paths[slot]) for slot in gradients if slot in paths]
        given = [gradients[slot] for slot in gradients if slot in paths]
        if not wanted or not ends:
            raise NotReplayable("the gradients that it receives belong to none of its results")
        self._lines.append(f"leaves = [{', '.join(wanted.values())}]")
        self._lines.append(
            f"gradients = torch.autograd.grad([{', '.join(ends)}], leaves, [{', '.join(given)}], allow_unused=True)"
        )
        names = ", ".join(ascii(slot) for slot in wanted)
        self._lines += [f"names = [{names}]", "return {n: g for n, g in zip(names, gradients, strict=True) if g is not None}"]

    def _give(self, first: str, items: Sequence[str], last: str) -> None:
        line = first + ", ".join(items) + last
        self._lines += [line] if len(line) < 110 else [first, *(f"    {item}," for item in items), last]

    def _reach(self, path: Path) -> str:
        if len(path) == 1 and path[0] in self._names:
            return self._names[str(path[0])]
        return "result" + "".join(f"[{ascii(key) if isinstance(key, str) else int(key)}]" for key in path)

    def _gradients(self) -> dict[str, str]:
        """Load the gradients that a backward call receives, by the result that each belongs to."""
        if not self._grad:
            return {}
        found = {}
        for slot, recorded in self._case.call.inputs.items():
            if slot.startswith("grad_output."):
                found[slot.removeprefix("grad_")] = self._load(slot, recorded, {})
        return found

    def _seed(self) -> None:
        for kind, state in self._call.random.items():
            where = "device" if kind == self._case.home else '"cpu"'
            seeded = torch.Generator().manual_seed(0).get_state().numpy().tobytes()
            if state == seeded:
                self._lines.append("torch.manual_seed(0)")
                continue
            name = self._free("random_" + (kind if _is_word(kind) else "device"))
            self._tensors[name] = torch.frombuffer(bytearray(state), dtype=torch.uint8).clone()
            self._helpers.add("restore_random")
            self._lines.append(f'restore_random({where}, given["{name}"])')

    # ---------------------------------------------------------------- arguments
    def value(self, node: Any, depth: int = 0) -> str:
        """Write an argument."""
        if node is None or isinstance(node, (bool, int)):
            return repr(node)
        if isinstance(node, float):
            return _number(node)
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
            return self._where(str(node["device"]))
        if "float" in node and node["float"] in ("nan", "inf", "-inf"):
            return _number(float(node["float"]))
        if "complex" in node:
            real, imaginary = (float.fromhex(str(part)) for part in node["complex"])
            return f"complex({_number(real)}, {_number(imaginary)})"
        if "slice" in node:
            bounds = node["slice"]
            if isinstance(bounds, list) and len(bounds) == 3 and all(b is None or type(b) is int for b in bounds):
                return f"slice({', '.join(map(repr, bounds))})"
        if isinstance(node.get("generator"), dict):
            return self._generator(node["generator"])
        if "other" in node:
            raise NotReplayable(f"an argument is a {str(node['other'])[:80]}, which a capture cannot hold")
        raise NotReplayable("its arguments are damaged in the capture")

    def _where(self, recorded: str) -> str:
        return "device" if recorded.partition(":")[0] == self._case.home else '"cpu"'

    def _generator(self, node: Mapping[str, Any]) -> str:
        name = self._free("generator")
        self._tensors[name] = torch.frombuffer(bytearray(read_state(node.get("state")) or b"\0"), dtype=torch.uint8).clone()
        self._helpers.add("generator")
        return f'generator({self._where(str(node.get("device", "cpu")))}, given["{name}"])'

    def _out(self, node: Any) -> str:
        if isinstance(node, list):
            return f"({', '.join(self._out(n) for n in node)},)"
        if not (isinstance(node, dict) and isinstance(node.get("empty"), list) and len(node["empty"]) == 4):
            raise NotReplayable("its arguments are damaged in the capture")
        dtype, shape, strides, device = node["empty"]
        if not all(isinstance(v, list) and all(type(n) is int for n in v) for v in (shape, strides)):
            raise NotReplayable("it writes to a tensor that is no plain array")
        laid = f"{tuple(shape)!r}, {tuple(strides)!r}"
        return f"torch.empty_strided({laid}, dtype={constant(torch.dtype, dtype)}, device={self._where(str(device))})"

    # ---------------------------------------------------------------- tensors
    def _tensor(self, node: Mapping[str, Any]) -> str:
        slot = str(node["tensor"])
        if slot in self._names:
            return self._names[slot]
        recorded = self._call.tensors.get(slot)
        if recorded is None:
            raise NotReplayable(f"{slot} is not in the capture")
        if "kind" in node or recorded.strides is None:
            raise NotReplayable(f"{slot} is no plain array ({str(node.get('kind', 'sparse'))[:80]})")
        shared = node.get("shares")
        if isinstance(shared, str) and self._same(slot, shared):
            self._names[slot] = self._names[shared]
            if shared in self._leaves:
                self._leaves[slot] = self._leaves[shared]
            return self._names[slot]
        name = self._load(slot, recorded, node)
        wants = node.get("grad") is True and recorded.dtype.startswith(("float", "bfloat", "complex"))
        if call_grad(self._call, self._grad) and wants:
            if slot in self._written:
                leaf = self._free(f"{name}_leaf")
                self._lines += [f"{leaf} = {name}.requires_grad_()", f"{name} = {leaf}.clone()  # the call may write to it"]
                self._leaves[slot] = leaf
            else:
                self._lines.append(f"{name}.requires_grad_()")
                self._leaves[slot] = name
        return name

    def _same(self, slot: str, shared: str) -> bool:
        a, b = self._call.tensors.get(slot), self._call.tensors.get(shared)
        if a is None or b is None or shared not in self._names:
            return False
        offsets = [self._nodes.get(s, {}).get("offset", 0) for s in (slot, shared)]
        return offsets[0] == offsets[1] and (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides)

    def _load(self, slot: str, recorded: RecordedTensor, node: Mapping[str, Any]) -> str:
        name = self._name(slot)
        dtype = constant(torch.dtype, recorded.dtype)
        hosted = slot in ON_HOST.get(self._call.key.op, ()) or self._where(recorded.device) != "device"
        to = "" if hosted else ".to(device)"
        what = f"{recorded.dtype} {list(recorded.shape)!r}"
        self._names.setdefault(slot, name)
        strides, array = recorded.strides or (), recorded.array()
        if (found := self._shared(node, slot)) is not None:
            memory, start = found
            self._put(memory, start, array, recorded, node)
            if self._groups[memory][0]:
                self._lines.append(f'{memory} = given["{memory}"]{to}')
                self._groups[memory] = ("", start)
            offset = natural(node.get("offset", 0)) - start
            self._lines.append(f"{name} = {memory}.as_strided({recorded.shape!r}, {strides!r}, {offset})  # {what}")
            return name
        lead = natural(node.get("offset", 0)) % max(ALIGNMENT // dtype.itemsize, 1)
        reach = extent(recorded.shape, strides)
        plain = (strides == contiguous(recorded.shape) or recorded.numel < 2) and not lead
        if plain or reach > max(MOST_MEMORY, 8 * recorded.numel):
            self._tensors[name] = from_numpy(array)
            self._lines.append(f'{name} = given["{name}"]{to}  # {what}')
            return name
        memory_of = torch.zeros(lead + reach, dtype=dtype)
        fill(torch.as_strided(memory_of, recorded.shape, strides, lead), array)
        self._tensors[name] = memory_of
        laid = f"as_strided({recorded.shape!r}, {strides!r}, {lead})"
        self._lines.append(f'{name} = given["{name}"]{to}.{laid}  # {what}')
        return name

    def _shared(self, node: Mapping[str, Any], slot: str) -> tuple[str, int] | None:
        """Return the variable of memory that several arguments share, of which the call writes one, and where it begins."""
        if not writes(self._call):
            return None
        group = str(node.get("shares", slot))
        members = [n for n in self._nodes.values() if n.get("shares") == group or n["tensor"] == group]
        if len(members) < 2:
            return None
        memory = "memory_of_" + self._name(group)
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
        if memory not in self._tensors:
            self._tensors[memory] = torch.zeros(size, dtype=constant(torch.dtype, spans[0][2]))
            self._groups[memory] = ("new", begin)
        return memory, begin

    def _put(self, memory: str, start: int, array: NDArray[Any], recorded: RecordedTensor, node: Mapping[str, Any]) -> None:
        offset = natural(node.get("offset", 0)) - start
        fill(torch.as_strided(self._tensors[memory], recorded.shape, recorded.strides or (), offset), array)

    def _name(self, slot: str) -> str:
        if slot in self._names:
            return self._names[slot]
        plain = slot.replace(".", "_")
        ours = _is_word(plain) and plain.startswith(("input_", "grad_output_")) and len(plain) < 60
        return self._free(plain if ours else "tensor")

    def _free(self, wanted: str) -> str:
        taken = {*_TAKEN, *self._tensors, *self._names.values(), *self._leaves.values()}
        numbered = (f"{wanted}_{k}" for k in itertools.count(2))
        return wanted if wanted not in taken else next(n for n in numbered if n not in taken)


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_TAKEN = frozenset({"given", "device", "result", "leaves", "gradients", "names", "torch", "out", "generator", "restore_random"})


def _is_word(name: Any) -> bool:
    """Tell whether a text is a plain ASCII identifier that Python has no meaning for."""
    import keyword

    return isinstance(name, str) and _WORD.match(name) is not None and not keyword.iskeyword(name)


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'

