"""Recorded calls as Python source that a person reads and pytest runs.

>>> chain = Chain.alone(case)
>>> print(source_of(chain, [paths_of(case, Place("cpu"))]).body)
    input_0 = given["input_0"].to(device)  # float32 [8, 12]
    with torch.no_grad():
        result = torch.ops.aten.gelu.default(input_0, approximate='none')
    return {"output.0": result}

A capture is untrusted, so no text of it becomes code. A function is looked up by `recorded_call`, and its name is written only if
PyTorch has the very function under it; dtypes, layouts and devices are looked up; numbers are written by ``repr`` of what was
checked to be numbers; text is an argument or a key, written as an ASCII literal. Variables have names of our own.

A call is executed once to learn where its results are found.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from trueup.recording.adapters.torch.recorded_call import (
    ON_HOST,
    Place,
    allowed_function,
    allowed_operator,
    assumed,
    call_grad,
    constant,
    fill,
    from_numpy,
    rebuild,
    with_host,
    writes,
)
from trueup.recording.execution.case_errors import FLOATING, MOST_MEMORY, Reach, Source, Writer, ends, laid, path_to, returned
from trueup.recording.execution.cases import Case, Chain, Link
from trueup.recording.execution.decoding import alike, natural, nodes_of, plain, sharing, span
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedTensor, read_state


def function_name(call: RecordedCall) -> str:
    """Return the name of a call's function as Python finds it; raise `NotReplayable` where it has none, or is not to be
    executed."""
    op = call.key.op
    if call.key.level == "module" or call.key.phase == "collective":
        why = "a module is code, which no capture holds" if call.key.level == "module" else "a collective needs the other ranks"
        raise NotReplayable(f"{why}: name one of its api or aten calls")
    if call.key.level == "aten":
        overload = (call.invocation or {}).get("overload")
        name = overload if isinstance(overload, str) else None
        found = allowed_operator(op, name)
        if found is None:
            raise NotReplayable(f"{op} is not among the functions that a capture may have executed")
        namespace, _, bare = op.partition("::")
        return f"torch.ops.{namespace}.{bare}" + ("" if name is None else f".{name or 'default'}")
    found = allowed_function(op)
    if found is None:
        raise NotReplayable(f"{op} is not among the functions that a capture may have executed")
    for candidate in (op, f"{op}.__get__"):
        if _resolved(candidate) == found:
            return candidate
    raise NotReplayable(f"PyTorch has no public name for {op}: name an aten call of it")


def _resolved(name: str) -> Any:
    """Return the Python object of a name in the table of allowed functions, or None."""
    first, *rest = name.split(".")
    found: Any = torch if first == "torch" else None
    for part in rest:
        found = getattr(found, part, None) if part.isidentifier() else None
    return found


def plain_name(call: RecordedCall) -> str:
    """Return a short name for files and functions: ``native_layer_norm``, ``lstm_backward``."""
    name = re.sub(r"[^a-z0-9_]", "", call.key.op.rpartition("::")[2].rpartition(".")[2].lower())[:60].strip("_") or "call"
    return f"{name}_backward" if call.key.phase == "backward" and "backward" not in name else name


def paths_of(case: Case, place: Place, *, results: Sequence[str] = ()) -> tuple[dict[str, Reach], frozenset[str]]:
    """Execute a case, and tell where each of its results (and of the other slots in ``results``) is found, and which arguments it
    writes; raises whatever the function raises."""
    made = rebuild(case.made, with_host(place, case.made), grad=case.forward is not None)
    versions = {slot: t._version for slot, t in made.inputs.items()}
    with made.modes():
        result = made.function(*made.args, **made.kwargs)
    named = made._named(result)
    wanted = case.call.outputs if case.forward is None else {s.removeprefix("grad_"): 0 for s in case.call.inputs if "grad_" in s}
    slots = [slot for slot in dict.fromkeys([*wanted, *results]) if slot in named]
    paths = {slot: path for slot in slots if (path := path_to(named[slot], result, made.inputs)) is not None}
    return paths, frozenset(slot for slot, t in made.inputs.items() if t._version != versions[slot])


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


class Arguments(Writer):
    """Writes what one call is given: ``written`` are the arguments that it writes (`paths_of`), ``text`` what the test has
    already, ``handed`` the expressions, by slot, for what it reads of earlier calls."""

    def __init__(self, case: Case, written: frozenset[str], text: Text, handed: Mapping[str, str]) -> None:
        self._case, self._call, self._written, self._text, self._handed = case, case.made, written, text, handed
        self._grad = case.forward is not None
        self.invocation = self._call.invocation if self._call.invocation is not None else assumed(self._call)
        self._nodes = nodes_of(self.invocation)
        self.names: dict[str, str] = {}  # variables by slot
        self.leaves: dict[str, str] = {}  # variables of what gradients are taken of, by slot
        self._memories: dict[str, str] = {}
        self._groups: dict[str, tuple[str, int]] = {}

    def sequence(self, kind: str, items: list[str]) -> str:
        return f"torch.Size([{', '.join(items)}])" if kind == "size" else super().sequence(kind, items)

    def constant(self, node: Mapping[str, Any]) -> str:
        for key, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
            if key in node:
                return str(constant(kind, node[key]))  # of what was looked up: torch.float32
        if "device" in node:
            return self.where(str(node["device"]))
        if isinstance(node.get("generator"), dict):
            return self._generator(node["generator"])
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
        if isinstance(node, list):
            return f"({', '.join(self.out(n) for n in node)},)"
        if not (isinstance(node, dict) and isinstance(node.get("empty"), list) and len(node["empty"]) == 4):
            raise NotReplayable("its arguments are damaged in the capture")
        dtype, shape, strides, device = node["empty"]
        if not all(isinstance(v, list) and all(type(n) is int for n in v) for v in (shape, strides)):
            raise NotReplayable("it writes to a tensor that is not a plain array")
        laid = f"{tuple(shape)!r}, {tuple(strides)!r}"
        return f"torch.empty_strided({laid}, dtype={constant(torch.dtype, dtype)}, device={self.where(str(device))})"

    # ---------------------------------------------------------------- tensors
    def tensor(self, node: Mapping[str, Any]) -> str:
        slot = str(node["tensor"])
        if slot in self.names:
            return self.names[slot]
        recorded = plain(self._call, node)
        shared = node.get("shares")
        if isinstance(shared, str) and shared in self.names and alike(self._call, self._nodes, slot, shared):
            self.names[slot] = self.names[shared]
            if shared in self.leaves:
                self.leaves[slot] = self.leaves[shared]
            return self.names[slot]
        lines = self._text.calls if slot in self._handed else self._text.loads
        name = self._hand(slot) if slot in self._handed else self.load(slot, recorded, node)
        wants = node.get("grad") is True and recorded.dtype.startswith(FLOATING)
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
        name = self.names[slot] = self._name(slot)
        self._text.calls.append(f"{name} = {self._handed[slot]}")
        return name

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
        place = laid(recorded, node, dtype.itemsize)
        if place is None:
            self._text.tensors[name] = from_numpy(array)
            self._text.loads.append(f'{name} = given["{name}"]{to}  # {what}')
            return name
        lead, reach = place
        memory_of = torch.zeros(lead + reach, dtype=dtype)
        fill(torch.as_strided(memory_of, recorded.shape, strides, lead), array)
        self._text.tensors[name] = memory_of
        view = f"as_strided({recorded.shape!r}, {strides!r}, {lead})"
        self._text.loads.append(f'{name} = given["{name}"]{to}.{view}  # {what}')
        return name

    def _shared(self, node: Mapping[str, Any], slot: str) -> tuple[str, int] | None:
        """Return the variable of memory that several arguments share, of which the call writes one, and where it begins."""
        if not writes(self._call):
            return None
        group = str(node.get("shares", slot))
        members, first = sharing(self._nodes, group), self._call.tensors.get(group)
        if len(members) < 2 or first is None or (found := span(self._call, members, first.dtype, 8 * MOST_MEMORY)) is None:
            return None
        begin, size = found
        if group not in self._memories:
            memory = self._memories[group] = self._text.name(f"memory_of_{_plain(group)}")
            self._text.tensors[memory] = torch.zeros(size, dtype=constant(torch.dtype, first.dtype))
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


def source_of(
    chain: Chain, found_at: Sequence[tuple[Mapping[str, Reach], frozenset[str]]], *, random: frozenset[int] = frozenset()
) -> Source:  # fmt: skip
    """Write a chain; ``found_at`` tells of each call where its results are found and which arguments it writes (`paths_of`),
    ``random`` are those that draw, to which the state of the generators belongs. Raises NotReplayable with the reason."""
    text = Text()
    writers: list[_Writer] = []
    expressions = []
    for k, (case, (paths, written)) in enumerate(zip(chain.cases, found_at, strict=True)):
        handed = {slot: _handed(text, writers[link.maker], link, case, slot) for slot, link in chain.links[k].items()}
        writer = _Writer(case, paths, Arguments(case, written, text, handed), text)
        expressions.append(writer.call(seeded=k in random))
        writers.append(writer)
    text.calls += writers[-1].results()
    return Source(
        expressions, "\n".join("    " + line for line in [*text.loads, *text.calls]), text.tensors, frozenset(text.helpers)
    )  # fmt: skip


def _handed(text: Text, maker: _Writer, link: Link, case: Case, slot: str) -> str:
    made = maker.reach(link.slot)
    if maker.tracked:
        made += ".detach()"
    if link.whole:
        return made
    text.helpers.add("read_of")
    recorded = case.inputs[slot]
    return f"read_of({made}, {link.laid!r}, {recorded.shape!r}, {recorded.strides!r}, {link.start})"


class _Writer:
    """Writes one call; its results can then be reached."""

    def __init__(self, case: Case, paths: Mapping[str, Reach], arguments: Arguments, text: Text) -> None:
        self._case, self._call, self._paths = case, case.made, paths
        self._arguments, self._text = arguments, text
        self._grad = case.forward is not None
        if self._call.invocation is not None and self._call.invocation.get("transforms"):
            raise NotReplayable("it was made inside a torch.func transform; its aten calls can be written, each by itself")
        self._result = ""
        self._gradients: dict[str, str] = {}
        self.tracked = bool(arguments.invocation.get("grad", False)) or self._grad  # whether autograd watches

    def call(self, *, seeded: bool) -> str:
        given, invocation = self._arguments, self._arguments.invocation
        function = function_name(self._call)
        arguments = [given.value(v) for v in invocation["args"]]
        for name, value in dict(invocation.get("kwargs") or {}).items():
            if not is_word(name):
                raise NotReplayable("its arguments are damaged in the capture")
            arguments.append(f"{name}={given.value(value)}")
        if "out" in invocation:
            arguments.append(f"out={given.out(invocation['out'])}")
        received = self._received()
        if seeded:
            self._seed()
        expression = f"{function}({', '.join(arguments)})"
        self._result = self._text.name("result")
        self._text.calls += [f"with {', '.join(self._modes())}:", f"    {self._result} = {expression}"]
        if self._grad:
            self._differentiate(received)
        return expression

    def results(self) -> Iterator[str]:
        if self._grad:
            names = ", ".join(f"{slot!a}: {gradient}" for slot, gradient in self._gradients.items())
            yield f"found = {{{names}}}"
            yield "return {name: gradient for name, gradient in found.items() if gradient is not None}"
            return
        items = [f"{slot!a}: {self.reach(slot)}" for slot in self._case.call.outputs if slot in self._paths]
        yield from returned(items)

    def reach(self, slot: str) -> str:
        """Write how a result is reached; raise `NotReplayable` where there is none such."""
        if slot in self._gradients:
            return self._gradients[slot]
        path = self._paths.get(slot)
        if path is None:
            raise NotReplayable(f"the place of {slot} in its result is not known")
        if len(path) == 1 and path[0] in self._arguments.names:
            return self._arguments.names[str(path[0])]
        return self._result + "".join(f"[{ascii(key) if isinstance(key, str) else int(key)}]" for key in path)

    def _modes(self) -> Iterator[str]:
        yield "torch.enable_grad()" if self.tracked else "torch.no_grad()"
        for kind, dtype in dict(self._arguments.invocation.get("autocast") or {}).items():
            where = "torch.device(device).type" if kind == self._case.home else '"cpu"'
            constant(torch.dtype, dtype)
            cached = self._arguments.invocation.get("autocast_cache") is not False
            yield f"torch.autocast({where}, dtype=torch.{dtype}, cache_enabled={cached})"

    def _received(self) -> dict[str, str]:
        """Load the gradients that a backward call receives, by the result that each belongs to."""
        if not self._grad:
            return {}
        slots = [(slot, t) for slot, t in self._case.call.inputs.items() if slot.startswith("grad_output.")]
        return {slot.removeprefix("grad_"): self._arguments.load(slot, recorded, {}) for slot, recorded in slots}

    def _differentiate(self, received: Mapping[str, str]) -> None:
        reached, wanted = ends(received, self._paths, self._case.call.outputs, self._arguments.leaves)
        name = self._text.name("gradients")
        found, given = (", ".join(items) for items in (map(self.reach, reached), reached.values()))
        of = ", ".join(wanted.values())
        self._text.calls.append(f"{name} = torch.autograd.grad([{found}], [{of}], [{given}], allow_unused=True)")
        self._gradients = {slot: f"{name}[{k}]" for k, slot in enumerate(wanted)}

    def _seed(self) -> None:
        for kind, state in self._call.random.items():
            where = "device" if kind == self._case.home else '"cpu"'
            seeded = torch.Generator().manual_seed(0).get_state().numpy().tobytes()
            if state == seeded:
                self._text.calls.append("torch.manual_seed(0)")
                continue
            name = self._text.name("random_" + (kind if is_word(kind) else "device"))
            self._text.tensors[name] = torch.frombuffer(bytearray(state), dtype=torch.uint8).clone()
            self._text.helpers.add("restore_random")
            self._text.calls.append(f'restore_random({where}, given["{name}"])')
