"""A recorded call as Python source that a person reads and pytest runs.

>>> print(Source.of(case, "cpu", random=False, seeded=b"").body)
    input_0 = tensor(given["input_0"], device)  # float32 [8, 12]
    input_0.stop_gradient = False
    with paddle.enable_grad():
        result = paddle._C_ops.gelu(input_0)
    return {"output.0": result}

A capture is untrusted, so no text of it becomes code. A function is looked up in `allowed` and written by the name of its row
there; dtypes and places are looked up; numbers are written by ``repr`` of what was checked to be numbers; text is an argument or a
key, written as an ASCII literal. Variables have names of our own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.adapters.paddle.recorded_call import Rebuilt, amp_of, function_of, rebuild
from trueup.recording.adapters.paddle.replay_arguments import ALIGNMENT, Place, first_line, writes
from trueup.recording.adapters.paddle.replay_memory import buffer, dtype_of
from trueup.recording.execution.cases import Case, contiguous
from trueup.recording.execution.decoding import MOST_NESTED, damaged, extent, natural
from trueup.recording.execution.places import NotReplayable
from trueup.recording.execution.recorded import RecordedTensor, tensor_nodes

MOST_MEMORY = 1 << 22
"""Elements between the first and last of a tensor up to which the memory between them is kept in the file."""
SLOT = re.compile(r"(input|grad_output)(\.[A-Za-z0-9_]{1,20}){1,6}")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")


@dataclass
class Source:
    """The parts of a test that depend on the call; see `trueup.recording.execution.case_errors.Written`."""

    expressions: list[str]
    body: str
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    helpers: frozenset[str] = frozenset()

    @staticmethod
    def of(case: Case, against: str, *, random: bool, seeded: bytes) -> Source:
        """Write a call.

        Args:
            case: the call.
            against: a device that executes it: where its results are found is told by executing it there.
            random: whether it draws random numbers.
            seeded: state of the CPU's generator at seed 0.

        Raises:
            NotReplayable: it cannot be written, and why.
        """
        function_of(case.made)
        try:
            made = rebuild(case.made, Place(against, case.home), grad=case.forward is not None)
            paths = _paths(made)
        except NotReplayable:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            raise NotReplayable(f"{against} does not execute it: {first_line(error)}") from None
        writer = _Writer(case, paths)
        lines = writer.lines(seeded if random else None)
        return Source([writer.expression], "\n".join("    " + line for line in lines), writer.tensors, frozenset(writer.helpers))


Paths = dict[str, tuple[int | str, ...]]


def _paths(made: Rebuilt) -> Paths:
    """Execute a call and tell how each of its results is reached: ``()`` itself, ``(0,)`` an item, ``("input.0",)`` an argument."""
    named = made.execute()
    found: Paths = {}
    for slot, tensor in named.items():
        path = _within(tensor, made.result)
        if path is None:
            path = next(((given,) for given, t in made.inputs.items() if t is tensor), None)
        if path is not None:
            found[slot] = path
    return found


def _within(tensor: Any, value: Any) -> tuple[int | str, ...] | None:
    if value is tensor:
        return ()
    for key, item in enumerate(value) if isinstance(value, (tuple, list)) else ():
        inner = _within(tensor, item)
        if inner is not None:
            return (key, *inner)
    return None


class _Writer:
    def __init__(self, case: Case, paths: Paths) -> None:
        self._case, self._call, self._paths = case, case.made, paths
        self._invocation: Mapping[str, Any] = case.made.invocation or {}
        self._grad = case.forward is not None
        self._tracked = self._grad or self._invocation.get("grad") is True
        self._writes = writes(case.made)
        self._nodes = {str(n["tensor"]): n for n in tensor_nodes([self._invocation.get("args"), self._invocation.get("kwargs")])}
        self._loads: list[str] = []
        self._names: dict[str, str] = {}
        self._leaves: dict[str, str] = {}
        self.tensors: dict[str, NDArray[Any]] = {}
        self.helpers: set[str] = set()
        self.expression = ""

    def lines(self, seeded: bytes | None) -> list[str]:
        """Return the statements; ``seeded``: the state at seed 0, where it draws random numbers."""
        arguments = [self._value(v) for v in self._invocation.get("args") or ()]
        for name, value in dict(self._invocation.get("kwargs") or {}).items():
            if WORD.fullmatch(name) is None:
                damaged()
            arguments.append(f"{name}={self._value(value)}")
        if "out" in self._invocation:
            raise NotReplayable("it writes to a tensor that it is given as out")
        received = self._received()
        self.expression = f"{self._call.key.op}({', '.join(arguments)})"
        modes = ", ".join(self._modes())
        lines = [*self._loads, *self._seeding(seeded), f"with {modes}:", f"    result = {self.expression}"]
        return lines + list(self._gradients(received) if self._grad else self._results())

    def _results(self) -> Iterator[str]:
        items = [f"{slot!a}: {self._reach(slot)}" for slot in self._case.call.outputs if slot in self._paths]
        line = "return {" + ", ".join(items) + "}"
        yield from [line] if len(line) < 110 else ["return {", *(f"    {item}," for item in items), "}"]

    def _gradients(self, received: Mapping[str, str]) -> Iterator[str]:
        wanted = {slot: self._leaves[slot[5:]] for slot in self._case.call.outputs if slot[5:] in self._leaves}
        ends = {slot: gradient for slot, gradient in received.items() if slot in self._paths}
        if not wanted or not ends:
            raise NotReplayable("the gradients that it receives belong to none of its results")
        found, given, of = (", ".join(items) for items in (map(self._reach, ends), ends.values(), wanted.values()))
        yield f"gradients = paddle.grad([{found}], [{of}], [{given}], allow_unused=True)"
        yield f"found = zip({list(wanted)!a}, gradients)"
        yield "return {name: gradient for name, gradient in found if gradient is not None}"

    def _reach(self, slot: str) -> str:
        path = self._paths[slot]
        if len(path) == 1 and isinstance(path[0], str):
            return self._names[path[0]]
        return "result" + "".join(f"[{int(key)}]" for key in path)

    def _modes(self) -> Iterator[str]:
        yield "paddle.enable_grad()" if self._tracked else "paddle.no_grad()"
        how = amp_of(self._invocation)
        if how is not None:
            lists = [[str(name) for name in how.get(key) or () if WORD.fullmatch(str(name))] for key in ("white", "black")]
            names = f"custom_white_list={lists[0]!a}, custom_black_list={lists[1]!a}"
            yield f"paddle.amp.auto_cast(level={how['level']!a}, dtype={how['dtype']!a}, {names})"

    def _received(self) -> dict[str, str]:
        """Load the gradients that a backward call receives, by the result that each belongs to."""
        if not self._grad:
            return {}
        slots = [(slot, t) for slot, t in self._case.call.inputs.items() if slot.startswith("grad_output.")]
        return {slot.removeprefix("grad_"): self._load(slot, recorded, {}) for slot, recorded in slots}

    def _seeding(self, seeded: bytes | None) -> Iterator[str]:
        if seeded is None:
            return
        state = next(iter(self._call.random.values()), seeded)
        if state == seeded:
            yield "paddle.seed(0)"
            return
        self.tensors["random"] = np.frombuffer(state, np.uint8).copy()
        self.helpers.add("restore_random")
        yield 'restore_random(device, given["random"])'

    # ---------------------------------------------------------------------------------------------------------- arguments
    def _value(self, node: Any, depth: int = 0) -> str:
        if node is None or isinstance(node, (bool, int)):
            return repr(node)
        if isinstance(node, float):
            return _number(node)
        if isinstance(node, str):
            return ascii(node)
        if depth > MOST_NESTED:
            raise NotReplayable("its arguments are nested too deeply")
        if isinstance(node, list):
            return f"[{', '.join(self._value(v, depth + 1) for v in node)}]"
        if not isinstance(node, dict):
            return str(damaged())
        if "tensor" in node:
            return self._tensor(node)
        if isinstance(node.get("tuple"), list):
            items = [self._value(v, depth + 1) for v in node["tuple"]]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        return self._constant(node)

    def _constant(self, node: Mapping[str, Any]) -> str:
        if node.get("ellipsis") is True:
            return "..."
        if node.get("undefined") is True:
            return "paddle.Tensor()"
        if "dtype" in node:
            dtype_of(node["dtype"])
            return f"paddle.{node['dtype']}"
        if "device" in node:
            self.helpers.add("place")
            return "place(device)" if str(node["device"]).partition(":")[0] == self._case.home else 'place("cpu")'
        if node.get("float") in ("nan", "inf", "-inf"):
            return _number(float(node["float"]))
        if "complex" in node:
            real, imaginary = (float.fromhex(str(part)) for part in node["complex"])
            return f"complex({_number(real)}, {_number(imaginary)})"
        bounds = node.get("slice")
        if isinstance(bounds, list) and len(bounds) == 3 and all(b is None or type(b) is int for b in bounds):
            return f"slice({', '.join(map(repr, bounds))})"
        if "other" in node:
            raise NotReplayable(f"an argument is a {str(node['other'])[:80]}, which a capture cannot hold")
        return str(damaged())

    def _tensor(self, node: Mapping[str, Any]) -> str:
        slot = str(node["tensor"])
        recorded = self._call.tensors.get(slot)
        if recorded is None or "kind" in node or recorded.strides is None:
            raise NotReplayable(f"{slot} is no plain array, or not in the capture")
        if slot in self._names:
            return self._names[slot]
        if (same := self._same(slot, recorded, node)) is not None:
            self._names[slot] = same
            return same
        name = self._names[slot] = self._load(slot, recorded, node)
        if node.get("grad") is True and recorded.dtype.startswith(("float", "bfloat", "complex")):
            self._loads.append(f"{name}.stop_gradient = False")
            self._leaves[slot] = name
            if self._writes and self._tracked:
                self._names[slot] = f"{name}_copy"
                self._loads.append(f"{name}_copy = paddle.assign({name})  # a leaf must not be written")
        return self._names[slot]

    def _same(self, slot: str, recorded: RecordedTensor, node: Mapping[str, Any]) -> str | None:
        """Return the variable of another argument where both are one tensor, which the call writes."""
        other = str(node.get("shares", ""))
        shared = self._call.tensors.get(other)
        if not self._writes or self._grad or shared is None or other not in self._names or slot == other:
            return None
        alike = (shared.dtype, shared.shape, shared.strides) == (recorded.dtype, recorded.shape, recorded.strides)
        return self._names[other] if alike and node.get("offset", 0) == self._nodes[other].get("offset", 0) else None

    def _load(self, slot: str, recorded: RecordedTensor, node: Mapping[str, Any]) -> str:
        name = slot.replace(".", "_") if SLOT.fullmatch(slot) else f"tensor_{len(self._loads)}"
        array, strides = recorded.array(), recorded.strides or ()
        what = f"# {numpy_dtype(recorded.dtype).name} {list(recorded.shape)!r}"
        where = "device" if recorded.device.partition(":")[0] == self._case.home or not recorded.device else '"cpu"'
        dtype = f', "{array.dtype.name}"' if array.dtype.name.startswith(("bfloat", "float8")) else ""
        lead = natural(node.get("offset", 0)) % max(ALIGNMENT // array.dtype.itemsize, 1)
        reach = extent(recorded.shape, strides)
        plain = (strides == contiguous(recorded.shape) or recorded.numel < 2) and not lead
        if plain or reach > max(MOST_MEMORY, 8 * recorded.numel):
            self.tensors[name] = array
            self._loads.append(f'{name} = tensor(given["{name}"], {where}{dtype})  {what}')
            return name
        self.tensors[name] = buffer([(array, strides, lead)], lead + reach, array.dtype)
        self.helpers.add("laid")
        view = f"{list(recorded.shape)!r}, {list(strides)!r}, {lead}"
        self._loads.append(f'{name} = laid(tensor(given["{name}"], {where}{dtype}), {view})  {what}')
        return name


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'
