"""Recorded calls as Python source that a person reads and pytest runs.

>>> chain = Chain.alone(case)
>>> print(Source.of(chain, [paths_of(case, Place("cpu"))]).body)
    input_0 = given["input_0"].to(device)  # float32 [8, 12]
    with torch.no_grad():
        result = torch.ops.aten.gelu.default(input_0, approximate='none')
    return {"output.0": result}

A capture is untrusted, so no text of it becomes code. A function is looked up in `allowed`, and its name is written only if PyTorch
has the very function under it; dtypes, layouts and devices are looked up; numbers are written by ``repr`` of what was checked to be
numbers; text is an argument or a key, written as an ASCII literal. Variables have names of our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trueup.recording.adapters.torch.replay_memory import NotReplayable, constant
from trueup.recording.adapters.torch.source_arguments import Arguments, Text, is_word
from trueup.recording.adapters.torch.source_names import function_name
from trueup.recording.adapters.torch.source_paths import Path
from trueup.recording.execution.cases import Case
from trueup.recording.execution.chains import Chain, Link


@dataclass
class Source:
    """The parts of a test that depend on the calls."""

    expressions: list[str]
    """The calls: ``torch.nn.functional.linear(input_0, input_1)``, the last one that whose results count."""
    body: str
    """Statements of the function that executes them on ``device``."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the statements load, by variable."""
    helpers: frozenset[str] = frozenset()
    """Functions that the statements use."""

    @staticmethod
    def of(
        chain: Chain, found_at: Sequence[tuple[Mapping[str, Path], frozenset[str]]], *, random: frozenset[int] = frozenset()
    ) -> Source:  # fmt: skip
        """Write a chain.

        Args:
            chain: the calls.
            found_at: for each, where its results are found, and which arguments it writes (`paths_of`).
            random: those that draw random numbers, so that the state of the generators belongs to them.

        Raises:
            NotReplayable: a call cannot be written, and why.
        """
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

    def __init__(self, case: Case, paths: Mapping[str, Path], arguments: Arguments, text: Text) -> None:
        self._case, self._call, self._paths = case, case.made, paths
        self._arguments, self._text = arguments, text
        self._grad = case.forward is not None
        if self._call.invocation is not None and self._call.invocation.get("transforms"):
            raise NotReplayable("it was made inside a torch.func transform; its aten calls can be written, each by itself")
        self._result = ""
        self._gradients: dict[str, str] = {}
        self.tracked = bool(arguments.invocation.get("grad", False)) or self._grad
        """Whether autograd watches."""

    def call(self, *, seeded: bool) -> str:
        """Write the call and return its expression."""
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
        """Yield the statement that returns the results."""
        if self._grad:
            names = ", ".join(f"{slot!a}: {gradient}" for slot, gradient in self._gradients.items())
            yield f"found = {{{names}}}"
            yield "return {name: gradient for name, gradient in found.items() if gradient is not None}"
            return
        items = [f"{slot!a}: {self.reach(slot)}" for slot in self._case.call.outputs if slot in self._paths]
        line = "return {" + ", ".join(items) + "}"
        yield from [line] if len(line) < 110 else ["return {", *(f"    {item}," for item in items), "}"]

    def reach(self, slot: str) -> str:
        """Write how a result is reached.

        Raises:
            NotReplayable: there is no such result.
        """
        if slot in self._gradients:
            return self._gradients[slot]
        path = self._paths.get(slot)
        if path is None:
            raise NotReplayable(f"nobody knows where its {slot} is found")
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
        leaves = self._arguments.leaves
        wanted = {slot: leaves[slot.removeprefix("grad_")] for slot in self._case.call.outputs if slot[5:] in leaves}
        ends = {slot: gradient for slot, gradient in received.items() if slot in self._paths}
        if not wanted or not ends:
            raise NotReplayable("the gradients that it receives belong to none of its results")
        name = self._text.name("gradients")
        found, given = (", ".join(items) for items in (map(self.reach, ends), ends.values()))
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
