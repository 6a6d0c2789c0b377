"""How wrong a device is in one call, and what of it rounding explains: for a reproducer, and each step of its shrinking.

An adapter executes the calls and writes them as source (`CaseErrors`); nothing here imports a framework.

A recorded call as Python text, as far as it is the same for all frameworks.

A capture is untrusted, so no text of it becomes code: numbers are written by ``repr`` of what was checked to be numbers, text is an
argument or a key, written as an ASCII literal, and the rest is looked up by an adapter. Variables have names of our own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numpy.typing import NDArray

from trueup.foundation.model import TrueupError
from trueup.recording.execution.cases import Case, Chain
from trueup.recording.execution.decoding import ALIGNMENT, Decoder, contiguous, extent, natural
from trueup.recording.execution.judging import Arrays, Judging, Outcome, Result, parallel
from trueup.recording.execution.local_error import Distance, Operation, criterion, rounding, thresholds
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedTensor

MOST_MEMORY = 1 << 22
"""Elements between the first and last of a tensor up to which the memory between them is kept in the file."""
FLOATING = ("float", "bfloat", "complex")
"""How the names of dtypes begin that carry gradients."""

Reach = tuple[int | str, ...]
"""How a result is reached: ``()`` the result itself, ``(0,)`` its first item, ``("input.0",)`` a tensor that was written."""


@dataclass
class Source:
    """Calls as the text of a test."""

    expressions: list[str]  # the calls, the last one that whose results count
    body: str  # statements of the function that executes them
    tensors: dict[str, Any] = field(default_factory=dict)  # what the statements load, by variable
    helpers: frozenset[str] = frozenset()  # functions that the statements use


class Writer(Decoder):
    """Writes the arguments of a call; `tensor` and `constant` return their text."""

    def literal(self, value: Any) -> str:
        """Write a scalar, a text, a slice or an ellipsis."""
        if isinstance(value, str):
            return ascii(value)
        if isinstance(value, complex):
            return f"complex({number(value.real)}, {number(value.imag)})"
        return number(value) if isinstance(value, float) else "..." if value is Ellipsis else repr(value)

    def sequence(self, kind: str, items: list[str]) -> str:
        """Write a ``list``, a ``tuple``, or the ``size`` of a tensor."""
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})" if kind == "tuple" else f"[{', '.join(items)}]"

    def mapping(self, items: dict[str, str]) -> str:
        """Write a dict."""
        return "{" + ", ".join(f"{str(key)!a}: {value}" for key, value in items.items()) + "}"


def number(value: float) -> str:
    """Write a number."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def laid(recorded: RecordedTensor, node: Mapping[str, Any], itemsize: int) -> tuple[int, int] | None:
    """Return where a tensor begins in its memory and how much of it it spans, in elements; None: a plain array stands for it."""
    strides = recorded.strides or ()
    lead = natural(node.get("offset", 0)) % max(ALIGNMENT // itemsize, 1)
    reach = extent(recorded.shape, strides)
    plain = (strides == contiguous(recorded.shape) or recorded.numel < 2) and not lead
    return None if plain or reach > max(MOST_MEMORY, 8 * recorded.numel) else (lead, reach)


def returned(items: Iterable[str]) -> list[str]:
    """Write the statement that returns results: ``"output.0": result``."""
    items = list(items)
    line = "return {" + ", ".join(items) + "}"
    return [line] if len(line) < 110 else ["return {", *(f"    {item}," for item in items), "}"]


def path_to(tensor: Any, result: Any, inputs: Mapping[str, Any]) -> Reach | None:
    """Tell how a tensor is reached from the result of a call, else which of its inputs it is."""
    found = _within(tensor, result)
    if found is not None:
        return found
    return next(((slot,) for slot, given in inputs.items() if given is tensor), None)


def _within(tensor: Any, value: Any) -> Reach | None:
    if value is tensor:
        return ()
    items = enumerate(value) if isinstance(value, (tuple, list)) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        inner = _within(tensor, item)
        if inner is not None:
            return (key, *inner)
    return None


def ends(
    received: Mapping[str, str], paths: Mapping[str, Reach], outputs: Sequence[str] | Mapping[str, Any], leaves: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the gradients that reach a result, by the result, and the wanted leaves by slot; raise `NotReplayable` where there
    are none."""
    wanted = {slot: leaves[slot.removeprefix("grad_")] for slot in outputs if slot.removeprefix("grad_") in leaves}
    found = {slot: gradient for slot, gradient in received.items() if slot in paths}
    if not wanted or not found:
        raise NotReplayable("the gradients that it receives belong to none of its results")
    return found, wanted


class OneCall:
    """Stands for a capture that holds a case and nothing else."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.capture = SimpleNamespace(ranks=dict(case.ranks))

    def at(self, rank: int, seq: int) -> RecordedCall:
        """Return the forward call."""
        if self._case.forward is None:
            raise TrueupError(f"no call {seq} on rank {rank}")
        return self._case.forward

    def of_step(self, *_: Any) -> list[RecordedCall]:
        """Return no other calls."""
        return []


INPUTS = "inputs.safetensors"


class CaseErrors(ABC):
    """Executes calls on the device that fails and on the one that is right, and tells how far they are apart."""

    title: str  # of the framework
    needs: str  # what a test needs: ``torch, safetensors and pytest``
    template: str  # of a test
    plugin: str  # a module that makes ``npu`` known, where the framework does not find it by itself

    # ---------------------------------------------------------------- what an adapter adds
    @abstractmethod
    def chained(self, chain: Chain, device: str) -> Judging[Any]:
        """Return what executes and judges the last call of a chain, after those before it."""

    def drew(self, replayer: Any) -> frozenset[int]:
        """Return the calls before the last one that drew random numbers when they were executed."""
        return frozenset(getattr(replayer, "random", ()))

    @abstractmethod
    def seeded(self) -> bytes:
        """Return the state of the CPU's generator at seed 0."""

    @abstractmethod
    def source(self, chain: Chain, against: str, random: frozenset[int]) -> Source:
        """Write a chain, its calls in ``random`` drawing random numbers, as source; raise `NotReplayable` where it cannot be
        written."""

    @abstractmethod
    def names(self, case: Case) -> tuple[str, str]:
        """Return a short name for files and functions, and what people call the function that is executed."""

    @abstractmethod
    def save(self, tensors: dict[str, Any], path: Path) -> list[tuple[str, str, list[int]]]:
        """Write what the statements load to a file, and return name, dtype and shape of each."""

    @abstractmethod
    def switches(self) -> dict[str, str]:
        """Return the values of the framework's numeric switches, as they are set now."""

    # ---------------------------------------------------------------- what all share
    def saved(self, told: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Write the tensors of what `written` returns to a folder, and return the rest of it, as JSON takes it."""
        source: Source = told["source"]
        tensors = self.save(source.tensors, folder / INPUTS)
        (folder / INPUTS).chmod(0o644)
        parts = {"expressions": source.expressions, "body": source.body, "helpers": sorted(source.helpers), "tensors": tensors}
        named = {"title": self.title, "needs": self.needs, "template": self.template, "plugin": self.plugin}
        return told | named | {"source": parts, "environment": self.switches()}

    def settled(self, chain: Chain, against: str) -> Chain:
        """Return a chain whose last call has the results of a device, computed now; a random call without a state is given one,
        and what calls before it draw is not handed on but loaded as recorded. Raises NotReplayable with the reason."""
        case = chain.target
        if not case.made.random:
            chain = chain.with_target(case.with_random({case.home: self.seeded()}))
        result, random = self._execute(chain, against)
        if any(link.maker in random for links in chain.links for link in links.values()):
            chain = chain.without_links_of(random)
            result, _ = self._execute(chain, against)
        return chain.with_target(chain.target.with_outputs(result.arrays))

    def judged(self, chain: Chain, device: str, against: str) -> tuple[Chain, Outcome]:
        """Return a chain whose last call has one device's results as its baseline, and the verdict on another; raise
        `NotReplayable`."""
        chain = self.settled(chain, against)
        replayer = self.chained(chain, device)
        with replayer.undisturbed():
            return chain, replayer.replay(chain.target.call)

    def written(self, chain: Chain, device: str | None, against: str, recorded: Arrays) -> dict[str, Any]:
        """Return source, limits and errors of a reproducer for a chain with the results of ``against``, with which ``device`` is
        compared, where it is expected to fail (None: it is not here); ``recorded`` are the results in the capture, by slot.
        Raises NotReplayable with the reason."""
        replayer, case = self.chained(chain, device or against), chain.target
        with replayer.undisturbed():
            own, random = self._execute(chain, against)
            limits = _limits(replayer, case, own)
            last = len(chain.cases) - 1
            source = self.source(chain, against, random | ({last} if own.random else set()))
            found: dict[str, Any] = {}
            if device is not None:
                found = _found(replayer, case)
        name, function = self.names(case)
        results = {s: t.array() for s, t in case.call.outputs.items() if s in limits}
        return {
            "source": source, "limits": limits, "random": own.random, "name": name,
            "function": function, "calls": len(chain.cases),
            "device": _errors(results, found) if not isinstance(found, str) else found, "recorded": _errors(results, recorded),
        }  # fmt: skip

    def _execute(self, chain: Chain, device: str) -> tuple[Result, frozenset[int]]:
        replayer = self.chained(chain, device)
        with replayer.undisturbed():
            return replayer.execute(chain.target.call, replayer.target), self.drew(replayer)


def _found(replayer: Judging[Any], case: Case) -> Any:
    try:
        return replayer.execute(case.call, replayer.target).arrays
    except NotReplayable as reason:
        return str(reason)


def _errors(expected: Arrays, found: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, float]]:
    errors = {}
    for slot, array in found.items():
        if slot not in expected:
            continue
        if array.shape != expected[slot].shape or array.dtype != expected[slot].dtype:
            errors[slot] = {"form": 1.0}
            continue
        d = Distance.of(expected[slot], array)
        errors[slot] = {
            "rms": d.rms, "largest": d.largest, "relative": d.relative, "differing": d.differing, "disagreeing": d.disagreeing,
        }  # fmt: skip
    return errors


# ---------------------------------------------------------------- limits
def _limits(replayer: Judging[Any], case: Case, own: Result) -> dict[str, dict[str, Any]]:
    """Return how far each result may be from the baseline's: beyond it `execution.local_error.judge` says wrong."""
    call = case.call
    try:
        truth: Result | None = replayer.execute(call, replayer.truth)
    except NotReplayable:
        truth = None
    operation = Operation(call.key.op, call.key.level, call.key.phase)
    read = [replayer._operand(t, None) for t in replayer._read(call)]
    limits = {}
    for slot, recorded in call.outputs.items():
        if slot in own.arrays and recorded.numel:
            exact = None if truth is None else truth.arrays.get(slot)
            random = own.random or criterion().row(operation.op, operation.level, operation.phase).random
            if exact is not None and (exact.shape != recorded.shape or (random and not parallel(exact, own.arrays[slot]))):
                exact = None
            limits[slot] = _limit(replayer, call, operation, recorded, own.arrays[slot], exact, read)
    return limits


def _limit(
    replayer: Judging[Any], call: RecordedCall, operation: Operation, recorded: RecordedTensor, known: NDArray[Any],
    exact: NDArray[Any] | None, read: list[Any],
) -> dict[str, Any]:  # fmt: skip
    kind, table = thresholds().of(operation), thresholds()
    factor = kind.backward if operation.backward else kind.factor
    truth = known if exact is None else exact
    own = Distance.of(truth, known)
    if recorded.dtype.startswith(("int", "uint", "bool")):
        return {"differing": int((factor + 1) * own.differing), "origin": kind.origin, "rule": f"{kind.name}: integers"}
    explained = rounding(operation, read, [replayer._operand(recorded, own)], replayer.precision)[recorded.slot]
    if exact is None:
        explained *= 2  # both sides round
    elif kind.exact and own.rms == 0 and own.truth_rms > 0:
        explained = 0.0  # nothing is rounded here
    moved = None if exact is None else replayer._moved(call, recorded.slot, exact)
    beside = (0.0, 0.0) if moved is None else (moved.rms, moved.largest)
    widest = max(own.truth_largest, 4 * own.truth_rms) or 1.0
    pairs = ((own.rms, explained * (own.truth_rms or 1.0), beside[0]), (own.largest, explained * widest, beside[1]))
    rms, largest = (max(table.certain * max(factor * o, r), table.perturbed * m) + o for o, r, m in pairs)
    by = "rounding" if explained * (own.truth_rms or 1.0) > factor * own.rms else f"error of the baseline, {factor:g} times"
    return {
        "rms": rms, "largest": largest, "origin": kind.origin, "rule": f"{kind.name}: {table.certain:g} times the {by}",
        "relative": rms / own.truth_rms if own.truth_rms else math.nan,
    }  # fmt: skip
