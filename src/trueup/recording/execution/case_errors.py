"""How wrong a device is in one call, and what of it rounding explains: for a reproducer, and each step of its shrinking.

An adapter executes the calls and writes them as source (`CaseErrors`); nothing here imports a framework.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from numpy.typing import NDArray

from trueup.foundation.model import TrueupError
from trueup.recording.execution.cases import Case
from trueup.recording.execution.chains import Chain
from trueup.recording.execution.judging import Arrays, Judging, Result
from trueup.recording.execution.local_error import Distance, thresholds
from trueup.recording.execution.outcomes import Outcome
from trueup.recording.execution.places import NotReplayable
from trueup.recording.execution.recorded import RecordedCall, RecordedTensor
from trueup.recording.execution.results import parallel
from trueup.recording.execution.rounding import Operation, criterion, rounding


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


class Written(Protocol):
    """Calls as the text of a test."""

    expressions: list[str]
    """The calls, the last one that whose results count."""
    body: str
    """Statements of the function that executes them."""
    tensors: dict[str, Any]
    """What the statements load, by variable."""
    helpers: frozenset[str]
    """Functions that the statements use."""


class CaseErrors(ABC):
    """Executes calls on the device that fails and on the one that is right, and tells how far they are apart."""

    title: str
    """Of the framework."""
    needs: str
    """What a test needs: ``torch, safetensors and pytest``."""
    template: str
    """Of a test."""
    plugin: str
    """A module that makes ``npu`` known, where the framework does not find it by itself."""

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
    def source(self, chain: Chain, against: str, random: frozenset[int]) -> Written:
        """Write a chain as source; ``random``: its calls that draw random numbers.

        Raises:
            NotReplayable: it cannot be written, and why.
        """

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
        source: Written = told["source"]
        tensors = self.save(source.tensors, folder / INPUTS)
        (folder / INPUTS).chmod(0o644)
        parts = {
            "expressions": source.expressions, "body": source.body, "helpers": sorted(source.helpers), "tensors": tensors,
        }  # fmt: skip
        named = {"title": self.title, "needs": self.needs, "template": self.template, "plugin": self.plugin}
        return told | named | {"source": parts, "environment": self.switches()}

    def settled(self, chain: Chain, against: str) -> Chain:
        """Return a chain whose last call has the results of a device, computed now; a random call without a state is given one.

        What calls before it draw at random is not handed on: it is loaded as it was recorded.

        Raises:
            NotReplayable: it is not executed there, and why.
        """
        case = chain.target
        if not case.made.random:
            chain = chain.with_target(case.with_random({case.home: self.seeded()}))
        result, random = self._execute(chain, against)
        if any(link.maker in random for links in chain.links for link in links.values()):
            chain = chain.without_links_of(random)
            result, _ = self._execute(chain, against)
        return chain.with_target(chain.target.with_outputs(result.arrays))

    def judged(self, chain: Chain, device: str, against: str) -> tuple[Chain, Outcome]:
        """Return a chain whose last call has the results of one device as its baseline, and the verdict on another.

        Raises:
            NotReplayable: the baseline's device does not execute it.
        """
        chain = self.settled(chain, against)
        replayer = self.chained(chain, device)
        with replayer.undisturbed():
            return chain, replayer.replay(chain.target.call)

    def written(self, chain: Chain, device: str | None, against: str, recorded: Arrays) -> dict[str, Any]:
        """Return what a reproducer says: source, limits, errors.

        Args:
            chain: its results are those of ``against``.
            device: where it is expected to fail; None: it is not here.
            against: the device that it is compared with.
            recorded: the results in the capture, by slot.

        Raises:
            NotReplayable: it cannot be written, and why.
        """
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

