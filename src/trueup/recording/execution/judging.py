"""One recorded call, executed on the target and once more in float64 on the CPU, and judged: what all frameworks share.

An adapter executes (`Judging.execute`); what comes of it are NumPy arrays by slot, and nothing here imports a framework.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trueup.comparison.measures.roundoff import roundoff
from trueup.comparison.verdict.operands import Precision, precision_of
from trueup.foundation.model import TrueupError
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.execution.drawing import draw
from trueup.recording.execution.local_error import WORDS, Distance, LocalError, judge
from trueup.recording.execution.outcomes import Outcome
from trueup.recording.execution.places import NotReplayable, Place
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls, RecordedTensor
from trueup.recording.execution.results import MASK, of_one_draw, outcome, parallel, same_bytes, untold
from trueup.recording.execution.rounding import Operand, Operation, criterion, rounding, storing

Arrays = dict[str, NDArray[Any]]
P = TypeVar("P", bound=Place)


class NotReproduced(Exception):
    """The target executes the call and gives no such result; the text says what."""


@dataclass(frozen=True)
class Result:
    """What an execution gave: elements by slot, and whether it drew random numbers, inputs drawn and slots read unwritten."""

    arrays: Arrays
    random: bool
    drawn: bool
    unwritten: tuple[str, ...]
    inner: frozenset[str] = frozenset()
    """Gradients of results that the call sends to them itself (`Rebuilt.inner`)."""


class Judging(ABC, Generic[P]):
    """Executes and judges calls of a capture.

    Args:
        calls: of the baseline.
        device: the target.
        draws: whether inputs may be drawn where the capture kept numbers only.
        recorded: judge the recorded results, with those of the device beside them, and not the other way round.
    """

    place: type[P]
    """Places of the framework's."""

    def __init__(self, calls: RecordedCalls, device: str, *, draws: bool = True, recorded: bool = False) -> None:
        self._calls, self.device, self._judges_recorded = calls, device, recorded
        ranks = calls.capture.ranks.values()
        kinds = [name.partition(":")[0] for rank in ranks for name in rank.get("devices") or () if isinstance(name, str)]
        self._stand(next((kind for kind in kinds if kind != "cpu"), "cpu"), draws=draws)
        self._recorded = [rank.get("environment") or {} for rank in ranks]
        self._devices = [rank.get("devices") or [] for rank in ranks]

    def _stand(self, home: str, *, draws: bool) -> None:
        """Choose the places where calls are executed."""
        made = draw if draws else None
        self.home = home
        self.target = self.place(self.device, home, draw=made)
        self.truth = self.place(self.device, home, wide=True, draw=made)
        self.cpu = self.place("cpu", home, draw=made)
        self.moved = self.place(self.device, home, wide=True, perturb=True)

    # ---------------------------------------------------------------- what an adapter adds
    @abstractmethod
    def execute(self, call: RecordedCall, place: P) -> Result:
        """Execute a call, forward or backward, and return its results by slot.

        Raises:
            NotReplayable: it cannot be, or raises.
        """

    @abstractmethod
    def switches(self) -> dict[str, str]:
        """Return the values of the framework's numeric switches, as they are set now."""

    @abstractmethod
    def undisturbed(self) -> AbstractContextManager[None]:
        """Leave the generators of this process, which calls set, as they were."""

    # ---------------------------------------------------------------- what all share
    @property
    def precision(self) -> Precision:
        """What the target, as it is set now, and the baseline declare about float32 products."""
        return precision_of([*self._recorded, self.switches()], [*self._devices, [self.device]])

    def notes(self) -> list[str]:
        """Say what a reader must know of the device and of the capture."""
        precision = self.precision
        if precision.matmul or precision.convolution:
            return ["float32 products are declared to be rounded to TF32 or HF32: errors of that size are explained"]
        return []

    def replay(self, call: RecordedCall, result: Result | None = None) -> Outcome:
        """Execute a call and judge what it gives; ``result``: of an execution that was made already."""
        started = time.perf_counter()
        drawn = False
        try:
            result = result or self.execute(call, self.target)
            drawn = result.drawn
            slot, worst = self._judge(call, result)
            found: dict[str, Any] = {
                "verdict": worst.verdict, "sentence": worst.sentence, "slot": slot, "ratio": worst.ratio, "excess": worst.excess,
                "error": worst.error, "baseline": worst.baseline, "explained": worst.explained, "rule": worst.rule,
                "origin": worst.origin,
            }  # fmt: skip
        except NotReplayable as reason:
            found = {"verdict": "not replayed", "sentence": str(reason)}
        except NotReproduced as reason:
            found = {"verdict": "wrong", "sentence": str(reason), "rule": "form of the result", "excess": math.inf}
        except TrueupError as error:  # a damaged file
            found = {"verdict": "not replayed", "sentence": " ".join(str(error).split())}
        seconds = time.perf_counter() - started
        return outcome(call, **found, drawn=drawn, seconds=seconds)

    def _forward(self, call: RecordedCall) -> RecordedCall:
        if call.forward_seq is None:
            raise NotReplayable("the capture does not say of which forward call it is the backward")
        try:
            return self._calls.at(call.key.rank, call.forward_seq)
        except TrueupError:
            raise NotReplayable("its forward call is not in the capture") from None

    # ---------------------------------------------------------------- judging
    def _judge(self, call: RecordedCall, result: Result) -> tuple[str, LocalError]:
        baseline = self._baseline(call, result)
        if self._judges_recorded and not result.drawn:
            result, baseline = replace(result, arrays=baseline), result.arrays
        try:
            truth: Result | None = self.execute(call, self.truth)
            missing = ""
        except NotReplayable as reason:
            truth, missing = None, str(reason)
        if truth is not None and truth.inner | result.inner and (truth.inner != result.inner or self.home != "cpu"):
            raise NotReplayable(
                f"{min(truth.inner | result.inner)} was recorded with what the call itself sends there, and not every device "
                "computes that result on the way to another; its aten calls are executed instead"
            )
        operation = Operation(call.key.op, call.key.level, call.key.phase)
        read = [self._operand(t, None) for t in self._read(call)]
        found: list[tuple[str, LocalError]] = []
        for slot, recorded in call.outputs.items():
            if slot not in result.arrays:
                if recorded.kept and not self._judges_recorded:
                    raise NotReproduced(f"{self.device} gives no {slot}, which the baseline has")
                continue
            found.append((slot, self._output(call, operation, slot, recorded, result, baseline, truth, missing, read)))
        if not found:
            raise NotReplayable("none of its results can be compared")
        return min(found, key=lambda pair: (WORDS.index(pair[1].verdict), -pair[1].excess))

    def _output(
        self, call: RecordedCall, operation: Operation, slot: str, recorded: RecordedTensor, result: Result, baseline: Arrays,
        truth: Result | None, missing: str, read: Sequence[Operand],
    ) -> LocalError:  # fmt: skip
        target, known = _as_recorded(result.arrays[slot], recorded, self._casts(call)), baseline.get(slot)
        if tuple(target.shape) != recorded.shape or target.dtype.name != recorded.dtype:
            form = f"{target.dtype.name} {list(target.shape)}"
            raise NotReproduced(f"{slot} is {form} on {self.device} and {recorded.dtype} {list(recorded.shape)} in the baseline")
        if known is not None and known.shape != target.shape:
            known = None
        if known is not None and same_bytes(target, known):
            return judge(operation, recorded.dtype, _NOTHING, _NOTHING, identical=True)
        exact = None if truth is None else truth.arrays.get(slot)
        if exact is None or exact.shape != target.shape:
            missing = missing or "float64 gives a result of another form"
            exact = None
        drew = result.random or (truth is not None and truth.random)
        random = drew or criterion().row(operation.op, operation.level, operation.phase).random
        if random and exact is not None:
            exact, known, missing = of_one_draw(exact, target, known, missing)
        if exact is None and known is None:
            return untold(operation, f"{missing}, and there is no baseline to compare with")
        against, own = (known, None) if exact is None else (exact, known)
        assert against is not None
        distance = Distance.of(against, target)
        output = self._operand(recorded, distance)
        explained = rounding(operation, read, [output], self.precision)[slot]
        if exact is None:
            explained *= 2  # the baseline rounds as well
            found = judge(operation, recorded.dtype, distance, None, rounding=explained)
            if random and found.verdict != "accurate" and not parallel(against, target):
                return untold(operation, f"{self.device} draws other random numbers than the baseline")
            return found
        beside = None if own is None else Distance.of(exact, own)
        if beside is not None:
            explained += storing(operation) * _narrow(self._casts(call), beside)
        found = judge(operation, recorded.dtype, distance, beside, rounding=explained)
        if found.verdict in ("wrong", "suspicious") and not result.drawn and (moved := self._moved(call, slot, exact)) is not None:
            found = judge(operation, recorded.dtype, distance, beside, rounding=explained, perturbed=moved)
        return found

    def _baseline(self, call: RecordedCall, result: Result) -> Arrays:
        """Return the recorded results; where inputs are drawn, what the CPU makes of them."""
        if not result.drawn:
            return {slot: t.array() for slot, t in call.outputs.items() if t.kept}
        if self.device.partition(":")[0] == "cpu":
            return {}
        try:
            return self.execute(call, self.cpu).arrays
        except NotReplayable:
            return {}

    def _moved(self, call: RecordedCall, slot: str, truth: NDArray[Any]) -> Distance | None:
        """Return how far one unit in the last place of the inputs moves the truth."""
        try:
            found = self.execute(call, self.moved).arrays.get(slot)
        except NotReplayable:
            return None
        return None if found is None or found.shape != truth.shape else Distance.of(truth, found)

    def _read(self, call: RecordedCall) -> list[RecordedTensor]:
        read = list(call.inputs.values())
        if call.delivers:
            read = [*self._forward(call).inputs.values(), *read]
        return read

    def _casts(self, call: RecordedCall) -> list[str]:
        """Return the dtypes that autocast cast to when a call, or of a backward its forward, was made."""
        made = (self._forward(call) if call.delivers else call).invocation or {}
        return [str(dtype) for dtype in dict(made.get("autocast") or {}).values()]

    def _operand(self, recorded: RecordedTensor, distance: Distance | None) -> Operand:
        if distance is not None:
            return Operand(recorded.slot, recorded.dtype, recorded.shape, distance.truth_rms * math.sqrt(distance.counted))
        l2, bounds = recorded.numbers["l2"], [recorded.numbers[name] or 0.0 for name in ("min", "max")]
        if l2 is not None and max(map(abs, bounds)) >= MASK and recorded.kept:
            values = np.asarray(recorded.array(), np.float64)
            l2 = float(np.linalg.norm(values[np.abs(values) < MASK]))
        return Operand(recorded.slot, recorded.dtype, recorded.shape, 0.0 if l2 is None or math.isnan(l2) else l2)


_NOTHING = Distance(0, 0, 0.0, 0.0, 0.0, 0.0, 0)


def _as_recorded(array: NDArray[Any], recorded: RecordedTensor, casts: Sequence[str]) -> NDArray[Any]:
    """Return a result in the recorded dtype where autocast chose another: which functions it widens differs by device."""
    name, floating = array.dtype.name, ("float", "bfloat")
    if not casts or name == recorded.dtype or not (name.startswith(floating) and recorded.dtype.startswith(floating)):
        return array
    with np.errstate(over="ignore"):
        return array.astype(numpy_dtype(recorded.dtype))


def _narrow(casts: Sequence[str], baseline: Distance) -> float:
    """Return the unit of the dtype that autocast computed in, where the baseline's own error shows that it did; else 0.

    A float32 result (the gradient of a weight) then has the rounding of bfloat16 products. From 1/64 of that unit on the
    baseline's error is not float32's.
    """
    unit = max((roundoff(name) for name in casts), default=0.0)
    return unit if baseline.relative > unit / 64 else 0.0
