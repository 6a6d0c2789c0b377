"""What `trueup.analysis.rerun` asks of this adapter (`trueup.analysis.rerun.processes.Executing`).

A recorded call as Python source that a person reads and pytest runs.

>>> print(source_of(case, "cpu", random=False, seeded=b"").body)
    input_0 = tensor(given["input_0"], device)  # float32 [8, 12]
    input_0.stop_gradient = False
    with paddle.enable_grad():
        result = paddle._C_ops.gelu(input_0)
    return {"output.0": result}

A capture is untrusted, so no text of it becomes code. A function is looked up by `allowed` and written by the name of its row
there; dtypes and places are looked up; numbers are written by ``repr`` of what was checked to be numbers; text is an argument or a
key, written as an ASCII literal. Variables have names of our own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base import core
from safetensors.numpy import save_file

from trueup.foundation.model import TrueupError
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.adapters.paddle import invocations
from trueup.recording.adapters.paddle.recorded_call import (
    Builder,
    Place,
    Rebuilt,
    amp_of,
    buffer,
    dtype_of,
    first_line,
    function_of,
    rebuild,
    to_numpy,
    writes,
)
from trueup.recording.adapters.paddle.session import switches
from trueup.recording.execution.case_errors import (
    FLOATING,
    CaseErrors,
    OneCall,
    Reach,
    Source,
    Writer,
    ends,
    laid,
    path_to,
    returned,
)
from trueup.recording.execution.cases import Case, Chain
from trueup.recording.execution.decoding import alike, damaged, nodes_of, plain
from trueup.recording.execution.judging import Bitwise, Judging, Result
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedTensor

SLOT = re.compile(r"(input|grad_output)(\.[A-Za-z0-9_]{1,20}){1,6}")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")


def source_of(case: Case, against: str, *, random: bool, seeded: bytes) -> Source:
    """Write a call; ``against`` executes it, to show where its results are found; ``random`` tells whether it draws, ``seeded``
    is the state of the CPU's generator at seed 0. Raises NotReplayable with the reason."""
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


Paths = dict[str, Reach]


def _paths(made: Rebuilt) -> Paths:
    """Execute a call and tell how each of its results is reached: ``()`` itself, ``(0,)`` an item, ``("input.0",)`` an argument."""
    named = made.execute()
    found: Paths = {}
    for slot, tensor in named.items():
        if (path := path_to(tensor, made.result, made.inputs)) is not None:
            found[slot] = path
    return found


class _Writer(Writer):
    def __init__(self, case: Case, paths: Paths) -> None:
        self._case, self._call, self._paths = case, case.made, paths
        self._invocation: Mapping[str, Any] = case.made.invocation or {}
        self._grad = case.forward is not None
        self._tracked = self._grad or self._invocation.get("grad") is True
        self._writes = writes(case.made)
        self._nodes = nodes_of(self._invocation)
        self._loads: list[str] = []
        self._names: dict[str, str] = {}
        self._leaves: dict[str, str] = {}
        self.tensors: dict[str, NDArray[Any]] = {}
        self.helpers: set[str] = set()
        self.expression = ""

    def lines(self, seeded: bytes | None) -> list[str]:
        """Return the statements; ``seeded``: the state at seed 0, where it draws random numbers."""
        arguments = [self.value(v) for v in self._invocation.get("args") or ()]
        for name, value in dict(self._invocation.get("kwargs") or {}).items():
            if WORD.fullmatch(name) is None:
                damaged()
            arguments.append(f"{name}={self.value(value)}")
        if "out" in self._invocation:
            raise NotReplayable("it writes to a tensor that it is given as out")
        received = self._received()
        self.expression = f"{self._call.key.op}({', '.join(arguments)})"
        modes = ", ".join(self._modes())
        lines = [*self._loads, *self._seeding(seeded), f"with {modes}:", f"    result = {self.expression}"]
        return lines + list(self._gradients(received) if self._grad else self._results())

    def _results(self) -> Iterator[str]:
        items = [f"{slot!a}: {self._reach(slot)}" for slot in self._case.call.outputs if slot in self._paths]
        yield from returned(items)

    def _gradients(self, received: Mapping[str, str]) -> Iterator[str]:
        reached, wanted = ends(received, self._paths, self._case.call.outputs, self._leaves)
        found, given, of = (", ".join(items) for items in (map(self._reach, reached), reached.values(), wanted.values()))
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
    def constant(self, node: Mapping[str, Any]) -> str:
        if node.get("undefined") is True:
            return "paddle.Tensor()"
        if "dtype" in node:
            dtype_of(node["dtype"])
            return f"paddle.{node['dtype']}"
        if "device" in node:
            self.helpers.add("place")
            return "place(device)" if str(node["device"]).partition(":")[0] == self._case.home else 'place("cpu")'
        return str(damaged())

    def tensor(self, node: Mapping[str, Any]) -> str:
        slot = str(node["tensor"])
        recorded = plain(self._call, node)
        if slot in self._names:
            return self._names[slot]
        other = str(node.get("shares", ""))
        shared = self._writes and not self._grad and slot != other and other in self._names
        if shared and alike(self._call, self._nodes, slot, other):
            self._names[slot] = self._names[other]
            return self._names[slot]
        name = self._names[slot] = self._load(slot, recorded, node)
        if node.get("grad") is True and recorded.dtype.startswith(FLOATING):
            self._loads.append(f"{name}.stop_gradient = False")
            self._leaves[slot] = name
            if self._writes and self._tracked:
                self._names[slot] = f"{name}_copy"
                self._loads.append(f"{name}_copy = paddle.assign({name})  # a leaf must not be written")
        return self._names[slot]

    def _load(self, slot: str, recorded: RecordedTensor, node: Mapping[str, Any]) -> str:
        name = slot.replace(".", "_") if SLOT.fullmatch(slot) else f"tensor_{len(self._loads)}"
        array, strides = recorded.array(), recorded.strides or ()
        what = f"# {numpy_dtype(recorded.dtype).name} {list(recorded.shape)!r}"
        where = "device" if recorded.device.partition(":")[0] == self._case.home or not recorded.device else '"cpu"'
        dtype = f', "{array.dtype.name}"' if array.dtype.name.startswith(("bfloat", "float8")) else ""
        place = laid(recorded, node, array.dtype.itemsize)
        if place is None:
            self.tensors[name] = array
            self._loads.append(f'{name} = tensor(given["{name}"], {where}{dtype})  {what}')
            return name
        lead, reach = place
        self.tensors[name] = buffer([(array, strides, lead)], lead + reach, array.dtype)
        self.helpers.add("laid")
        view = f"{list(recorded.shape)!r}, {list(strides)!r}, {lead}"
        self._loads.append(f'{name} = laid(tensor(given["{name}"], {where}{dtype}), {view})  {what}')
        return name


class Replayer(Judging[Place]):
    """Executes and judges calls of a capture; see `Judging`."""

    place = Place
    first_line = staticmethod(first_line)

    def switches(self) -> dict[str, str]:
        return switches()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        device = paddle.get_device()
        kept = [(g, g.get_state()) for kind in dict.fromkeys(("cpu", self.device.partition(":")[0]))
                if (g := invocations.generator_of(kind)) is not None]  # fmt: skip
        try:
            yield
        finally:
            for generator, state in kept:
                generator.set_state(state)
            paddle.set_device(device)

    def rebuilt(self, call: RecordedCall, place: Place, *, grad: bool) -> Rebuilt:
        paddle.set_device(place.here)
        return rebuild(call, place, grad=grad)

    def result(self, call: RecordedCall, made: Rebuilt, place: Place) -> Result:
        outputs = made.execute()
        if call.delivers:
            builder = Builder(call, place, grad=False)
            received = {s: builder.tensor({"tensor": s}) for s in call.tensors if s.startswith("grad_output.")}
            made.drawn += builder.drawn
            made.unwritten += builder.unwritten
            outputs = made.gradients(received, list(call.outputs))
        arrays = {slot: to_numpy(outputs[slot]) for slot in call.outputs if slot in outputs}
        return Result(arrays, made.random, bool(made.drawn), tuple(made.unwritten))


class Verifier(Bitwise[Place], Replayer):
    """Executes calls of a capture where they were recorded; see `Bitwise`."""


def provide(device: str, *, simulated: bool) -> None:
    """Make sure that Paddle knows a device; raise `TrueupError` where it does not, or there is none of this number."""
    if simulated:
        raise TrueupError(
            "There is no simulated device for PaddlePaddle.\n  expected: a device that Paddle knows\n"
            "  got:      --simulated\n  next:     leave it out"
        )
    before = paddle.get_device()
    try:
        paddle.set_device(device)
        paddle.ones([1]).numpy()
    except Exception as error:  # noqa: BLE001 - every build has words of its own for a device that it lacks
        raise TrueupError(
            f"Nothing can be computed on {device}: {first_line(error)}\n"
            "  next:     name a device that this Paddle has (paddle.device.get_all_device_type lists them)"
        ) from None
    finally:
        with suppress(Exception):
            paddle.set_device(before)


class CaseReplayer(Replayer):
    """Executes and judges a call that is in memory; raises `NotReplayable` where there are calls before it."""

    def __init__(self, chain: Chain, device: str) -> None:
        if len(chain.cases) > 1:
            raise NotReplayable("calls of PaddlePaddle are executed one by one, without those before them")
        super().__init__(OneCall(chain.target), device)  # type: ignore[arg-type]
        self._stand(chain.target.home, draws=False)


class PaddleCases(CaseErrors):
    """Executes calls with Paddle; see `CaseErrors`."""

    title, needs, template, plugin = "PaddlePaddle", "paddle, numpy, safetensors and pytest", "test_paddle.py.j2", ""

    def chained(self, chain: Chain, device: str) -> CaseReplayer:
        return CaseReplayer(chain, device)

    def seeded(self) -> bytes:
        generator = invocations.generator_of("cpu")
        before = generator.get_state()
        generator.manual_seed(0)
        found = invocations.state_of(generator)
        generator.set_state(before)
        return found or b""

    def source(self, chain: Chain, against: str, random: frozenset[int]) -> Source:
        return source_of(chain.target, against, random=bool(random), seeded=self.seeded())

    def names(self, case: Case) -> tuple[str, str]:
        op = case.call.key.op
        name = re.sub(r"[^a-z0-9_]", "", op.rpartition(".")[2].lower())[:60].strip("_") or "call"
        return f"{name}_backward" if case.call.key.phase == "backward" else name, case.made.key.op

    def save(self, tensors: dict[str, Any], path: Path) -> list[tuple[str, str, list[int]]]:
        """Write arrays to a file; what safetensors has no name for as its bits."""
        save_file({k: _plain(a) for k, a in tensors.items()}, path)
        return [(k, a.dtype.name, list(a.shape)) for k, a in tensors.items()]

    def switches(self) -> dict[str, str]:
        return switches()


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    return array.view(np.uint8) if array.dtype.name.startswith("float8") else array


CASES = PaddleCases()


def limit_threads(number: int) -> None:
    """Set how many threads each operator uses."""
    core.set_num_threads(number)
