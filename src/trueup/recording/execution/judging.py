"""One recorded call, executed on the target and once more in float64 on the CPU, and judged: what all frameworks share.

An adapter executes (`Judging.execute`); what comes of it are NumPy arrays by slot, and nothing here imports a framework. `Bitwise`
asks for less: does the call, executed where it was recorded, give the recorded bits?

What a replay says of each call, and of all of them together; and of two results: drawn alike or not, the same bits or not.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.facts.slots import roundoff
from trueup.foundation.model import TrueupError
from trueup.foundation.store.declared import Precision, precision_of
from trueup.foundation.store.segment import numpy_dtype
from trueup.foundation.words.wording import first_line
from trueup.recording.execution.local_error import (
    WORDS,
    Distance,
    LocalError,
    Operand,
    Operation,
    criterion,
    judge,
    rounding,
    storing,
    thresholds,
)
from trueup.recording.execution.recorded import NotReplayable, Place, RecordedCall, RecordedCalls, RecordedTensor, draw, home_of

ReplayWord = Literal["wrong", "crashed", "suspicious", "ill-conditioned", "could not tell", "not replayed", "accurate"]

ORDER: tuple[ReplayWord, ...] = ("crashed", "wrong", "suspicious", "ill-conditioned", "could not tell", "not replayed", "accurate")
"""From worst to best."""
BLAMED = frozenset({"crashed", "wrong"})
BY_PARTS = "parts"
"""Rule of a call that is code: it was not executed itself, the calls inside it were."""
OPEN = frozenset({"could not tell", "not replayed"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One recorded call, executed once more."""

    rank: int
    step: int
    seq: int
    level: str
    phase: str
    scope: str
    op: str
    overload: str
    ordinal: int
    shapes: str  # dtypes and shapes of what it was given: its shape class
    verdict: ReplayWord
    sentence: str  # what was found, or why it could not be replayed
    slot: str = ""  # the worst output
    ratio: float = math.nan  # its error over the baseline's own; NaN where there is none to compare with
    excess: float = 0.0  # its error over what is explained; above 1 suspicious
    error: float = math.nan
    baseline: float = math.nan
    explained: float = math.nan
    rule: str = ""
    origin: str = ""
    drawn: bool = False  # whether inputs were drawn to match recorded numbers
    seconds: float = 0.0
    times: int = 1  # calls that it stands for (``--dedup``)

    @property
    def kind(self) -> str:
        """Operator with overload, and phase: ``aten::add.Tensor forward``."""
        return f"{self.op}{'.' + self.overload if self.overload else ''} {self.phase}"

    @property
    def place(self) -> tuple[int, int, int]:
        """Rank, step and execution number."""
        return self.rank, self.step, self.seq

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; NaN and Inf are text."""
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}

    @staticmethod
    def from_json(read: dict[str, Any]) -> Outcome:
        """Read what `to_json` wrote; raise `TypeError`, `ValueError` or `KeyError` for anything else."""
        numbers = {f.name for f in fields(Outcome) if f.type == "float"}
        values: dict[str, Any] = {k: float(v) if k in numbers else v for k, v in read.items()}
        found = Outcome(**values)
        if found.verdict not in ORDER or not all(type(n) is int for n in found.place):
            raise ValueError(f"no outcome: {found.verdict!r}")
        return found


@dataclass(frozen=True)
class Group:
    """Calls of one operator, phase and shape class."""

    kind: str
    level: str
    shapes: str
    worst: Outcome
    calls: int
    verdicts: dict[str, int]


@dataclass(frozen=True)
class Replay:
    """What `trueup.analysis.rerun.replay` returns."""

    base: str
    device: str
    reference: str
    outcomes: Sequence[Outcome] = field(repr=False)
    notes: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def groups(self) -> list[Group]:
        """Operators by phase and shape class, worst first, then in the order of execution."""
        return grouped(self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        """Calls by verdict, those included that another stands for."""
        found = dict.fromkeys(ORDER, 0)
        for outcome in self.outcomes:
            found[outcome.verdict] += outcome.times
        return {word: number for word, number in found.items() if number}

    @property
    def culprits(self) -> list[Outcome]:
        """Calls that the device computes wrong, in the order of execution."""
        return sorted((o for o in self.outcomes if o.verdict in BLAMED), key=lambda o: o.place)

    @property
    def exit_code(self) -> int:
        """0: every call that could be replayed is accurate, 1: some are wrong, 2: could not tell."""
        if self.culprits:
            return 1
        counts = self.counts
        told = sum(n for word, n in counts.items() if word not in OPEN)
        return 0 if told else 2

    @property
    def sentence(self) -> str:
        """Say the result in one sentence."""
        counts, total = self.counts, sum(o.times for o in self.outcomes)
        open_ = sum(n for word, n in counts.items() if word in OPEN)
        rest = f"; {open_:,} of {total:,} calls could not be judged" if open_ else ""
        bad = [g for g in self.groups if g.worst.verdict in BLAMED]
        if bad:
            kinds = list(dict.fromkeys(g.kind for g in bad))
            first = bad[0].worst
            more = f", and {len(kinds) - 1} more kind{'s' if len(kinds) > 2 else ''} of call" if len(kinds) > 1 else ""
            return f"{self.device} computes {kinds[0]} wrong from the recorded inputs ({first.sentence}){more}{rest}."
        doubtful, told = counts.get("suspicious", 0), " that were judged" if open_ else ""
        if total == open_:
            return f"Could not tell: none of the {total:,} calls could be judged."
        if doubtful:
            return f"{self.device} computes no call wrong; {doubtful:,} are suspicious{rest}."
        return f"{self.device} computes all {total - open_:,} calls{told} as accurately as the baseline{rest}."


def worse(outcome: Outcome) -> tuple[int, float, tuple[int, int, int]]:
    """Sort key: worst verdict first, then the largest excess, then the order of execution."""
    excess = outcome.excess if math.isfinite(outcome.excess) else 1e300
    return ORDER.index(outcome.verdict), -excess, outcome.place


def grouped(outcomes: Iterable[Outcome]) -> list[Group]:
    """Group outcomes by level, operator, phase and shape class, worst first."""
    found: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.level, outcome.kind, outcome.shapes), []).append(outcome)
    groups = []
    for (level, kind, shapes), members in found.items():
        verdicts: dict[str, int] = {}
        for member in members:
            verdicts[member.verdict] = verdicts.get(member.verdict, 0) + member.times
        groups.append(Group(kind, level, shapes, min(members, key=worse), sum(m.times for m in members), verdicts))
    return sorted(groups, key=lambda g: worse(g.worst))


# ---------------------------------------------------------------- two results
MASK = 1e30
"""Magnitude from which an element is a mask: left out of norms."""
SAME_DRAW = 0.9
"""Cosine of a random operator's result and the truth from which both drew the same numbers: independent draws of a mask that keeps
nine of ten elements of a centred tensor have 0.9 at most; the same mask with another scale has 1."""


def of_one_draw(
    exact: NDArray[Any], target: NDArray[Any], known: NDArray[Any] | None, missing: str
) -> tuple[NDArray[Any] | None, NDArray[Any] | None, str]:  # fmt: skip
    """Drop the truth, or the baseline, of a random operator where it drew other numbers than the target."""
    if known is not None and not parallel(exact, known):
        if not parallel(exact, target):
            return None, known, missing or "float64 draws different random numbers"
        known = None
    if not parallel(exact, target):
        return None, known, missing or "float64 draws different random numbers"
    return exact, known, missing


def parallel(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two tensors point the same way, so that a scale or rounding is all that differs."""
    x, y = (np.asarray(v).reshape(-1).astype(np.float64) for v in (a, b))
    kept = np.isfinite(x) & np.isfinite(y) & (np.abs(x) < MASK) & (np.abs(y) < MASK)
    x, y = x[kept], y[kept]
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    zeros = bool(x.size) and float(np.mean((x == 0) != (y == 0))) < 0.01
    return norms == 0 or (float(x @ y) > SAME_DRAW * norms and zeros)


def untold(operation: Operation, why: str) -> LocalError:
    """Return the verdict on an output of which nothing is known, and why."""
    kind = thresholds().of(operation)
    return LocalError("could not tell", math.nan, 0.0, math.nan, math.nan, math.nan, f"{kind.name}: no truth", kind.origin, why)


def same_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two arrays have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def apart(recorded: NDArray[Any], found: NDArray[Any]) -> str:
    """Say how two results differ."""
    if recorded.dtype != found.dtype or recorded.shape != found.shape:
        return f"{found.dtype.name} {list(found.shape)} for {recorded.dtype.name} {list(recorded.shape)}"
    return f"relative L2 error {Distance.of(recorded, found).relative:.1e}"


def outcome(call: RecordedCall, **found: Any) -> Outcome:
    """Return the outcome of a call."""
    key = call.key
    overload = (call.invocation or {}).get("overload")
    overload = overload if isinstance(overload, str) and overload != "default" else ""
    shapes = shapes_of(call.inputs)
    return Outcome(key.rank, key.step, call.seq, key.level, key.phase, key.scope, key.op, overload, key.ordinal, shapes, **found)


def shapes_of(inputs: Mapping[str, RecordedTensor]) -> str:
    """Return dtypes and shapes of the inputs: ``float32 [8,128] [128,512]``."""
    parts: list[str] = []
    dtype = ""
    for recorded in list(inputs.values())[:6]:
        if recorded.dtype != dtype:
            dtype = recorded.dtype
            parts.append(dtype)
        parts.append(f"[{','.join(map(str, recorded.shape))}]")
    more = len(inputs) - 6
    return " ".join([*parts, *([f"and {more} more"] if more > 0 else [])])


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
    inner: frozenset[str] = frozenset()  # gradients of results that the call sends to them itself (`Rebuilt.inner`)


class Judging(ABC, Generic[P]):
    """Executes and judges calls of a baseline on a device. With ``draws`` inputs may be drawn where the capture kept numbers
    only; with ``recorded`` it judges the recorded results with those of the device beside them, and not the other way round."""

    place: type[P]  # places of the framework's

    def __init__(self, calls: RecordedCalls, device: str, *, draws: bool = True, recorded: bool = False) -> None:
        self._calls, self.device, self._judges_recorded = calls, device, recorded
        ranks = calls.capture.ranks.values()
        self._stand(home_of(ranks), draws=draws)
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
    first_line: Callable[[BaseException], str] = staticmethod(first_line)
    """What an exception of the framework's says."""

    @abstractmethod
    def rebuilt(self, call: RecordedCall, place: P, *, grad: bool) -> Any:
        """Make a forward call ready to be executed; with ``grad`` gradients are asked for."""

    @abstractmethod
    def result(self, call: RecordedCall, made: Any, place: P) -> Result:
        """Execute what `rebuilt` made for a call, forward or backward, which may raise anything."""

    @abstractmethod
    def switches(self) -> dict[str, str]:
        """Return the values of the framework's numeric switches, as they are set now."""

    @abstractmethod
    def undisturbed(self) -> AbstractContextManager[None]:
        """Leave the generators of this process, which calls set, as they were."""

    # ---------------------------------------------------------------- what all share
    def execute(self, call: RecordedCall, place: P) -> Result:
        """Execute a call, forward or backward; return its results by slot, or raise `NotReplayable` where it cannot be, or
        raises."""
        if not call.outputs:
            raise NotReplayable("nothing that it computes was recorded")
        made = self.rebuilt(self._forward(call) if call.delivers else call, place, grad=call.delivers)
        try:
            return self.result(call, made, place)
        except (NotReplayable, TrueupError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is an answer
            where = "the float64 CPU" if place.wide else place.device
            raise NotReplayable(f"{where} does not execute it: {type(error).__name__}: {self.first_line(error)}") from None

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
            missing = missing or "float64 gives a result of a different form"
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
                return untold(operation, f"{self.device} draws different random numbers than the baseline")
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
    """Return the unit of the dtype that autocast computed in, where the baseline's own error shows it (1/64 of it is not
    float32's any more), else 0: a float32 result (the gradient of a weight) then has the rounding of bfloat16 products."""
    unit = max((roundoff(name) for name in casts), default=0.0)
    return unit if baseline.relative > unit / 64 else 0.0


# ---------------------------------------------------------------- bit by bit
MOST_PARTS = 10_000
"""Calls inside a call that are executed for it."""


class Bitwise(Judging[P]):
    """Executes calls of a capture where they were recorded; see `Judging`. A call that is code (a custom autograd function, a
    function that takes one) is not in a capture: it counts as reproduced where each call inside it gives its recorded bits, and
    every result is, bit for bit, one of theirs or one of its own inputs."""

    def __init__(self, calls: RecordedCalls, device: str) -> None:
        super().__init__(calls, device, draws=False)
        self._inside: tuple[tuple[int, int], dict[int, list[RecordedCall]]] | None = None

    def verify(self, call: RecordedCall) -> Outcome:
        """Execute a call and tell whether its results are the recorded ones, bit for bit."""
        started = time.perf_counter()
        return outcome(call, **self._found(call), seconds=time.perf_counter() - started)

    def _found(self, call: RecordedCall, depth: int = 0) -> dict[str, Any]:
        try:
            return self._verified(call)
        except (NotReplayable, TrueupError) as reason:
            said = " ".join(str(reason).split())
        return self._by_parts(call, said, depth) or {"verdict": "not replayed", "sentence": said}

    def _verified(self, call: RecordedCall) -> dict[str, Any]:
        result = self.execute(call, self.target)
        kept = {slot: t.array() for slot, t in call.outputs.items() if t.kept}
        if not kept:
            raise NotReplayable("no result of it was kept")
        got = result.arrays
        differing = [slot for slot, array in kept.items() if slot not in got or not same_bytes(array, got[slot])]
        if not differing:
            return {"verdict": "accurate", "sentence": "bitwise"}
        slot = differing[0]
        again = self.execute(call, self.target)
        if slot not in result.arrays:
            why = f"it gives no {slot} when it is executed alone"
        elif result.unwritten:
            why = f"it reads {', '.join(result.unwritten)}, memory that the capture does not hold"
        elif not same_bytes(result.arrays[slot], again.arrays[slot]):
            why = "it is not deterministic: two executions differ"
        elif result.random and not call.random:
            why = "it draws random numbers, and the state of the generator is not in the capture"
        else:
            why = f"{slot} differs on this machine: {apart(kept[slot], result.arrays[slot])}"
        return {"verdict": "wrong", "sentence": why, "slot": slot, "rule": "bitwise"}

    def _by_parts(self, call: RecordedCall, said: str, depth: int) -> dict[str, Any] | None:
        """Verify the calls inside one that cannot be executed; None where there are none."""
        parts = self._parts(call)
        if not parts or depth >= 32:
            return None
        if len(parts) > MOST_PARTS:
            return {"verdict": "not replayed", "sentence": f"{said}; it has more than {MOST_PARTS:,} calls inside"}
        known = _computed(call, parts)
        alien = [slot for slot, t in call.outputs.items() if t.digest is None or (t.digest, t.dtype) not in known]
        if alien:
            return {"verdict": "not replayed", "sentence": f"{said}; {alien[0]} is no result of the {len(parts)} calls inside it"}
        for part in parts:
            found = self._found(part, depth + 1)
            if found["verdict"] != "accurate":
                inside = f"of the calls inside it, call {part.seq}, {part.kind}, is not reproduced: {found['sentence']}"
                return {"verdict": found["verdict"], "sentence": f"{said}; {inside}"}
        return {"verdict": "accurate", "sentence": f"by its parts, {len(parts)} calls, for {said}", "rule": BY_PARTS}

    def _parts(self, call: RecordedCall) -> list[RecordedCall]:
        """Return the calls directly inside one that computed something."""
        place = call.key.rank, call.key.step
        if self._inside is None or self._inside[0] != place:
            found: dict[int, list[RecordedCall]] = defaultdict(list)
            for other in self._calls.of_step(*place):
                if other.parent is not None and other.computed:
                    found[other.parent].append(other)
            self._inside = place, found
        return self._inside[1].get(call.seq, [])


def _computed(call: RecordedCall, parts: Sequence[RecordedCall]) -> set[tuple[str | None, str]]:
    """Return digest and dtype of a call's inputs and of the results of the calls inside it. A call that passes on its input (a
    view, a copy) computes nothing: tensors from outside PyTorch stay unknown."""
    known = {(t.digest, t.dtype) for t in call.inputs.values()}
    for part in parts:
        given = {(t.digest, t.dtype) for t in part.inputs.values()}
        known |= {(t.digest, t.dtype) for t in part.outputs.values()} - given
    return known
