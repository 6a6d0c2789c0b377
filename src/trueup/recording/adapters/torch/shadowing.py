"""A shadow run: each operator executes as usual, and once more on the reference with the same inputs; its own error is recorded.

The mode sees every dispatcher operator of forward, backward and optimizer (`adapters.torch.functions`), below autograd:
nothing of it enters a graph, no version counter moves, no random number is drawn. Inputs are copied before the operator runs, for
it may write them; the reference runs after it.

A call is judged by its outputs beside those of the reference, slot by slot: given the same inputs, they differ by rounding alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trueup.foundation.facts.operators import has, normalised
from trueup.foundation.facts.slots import SINGLE, roundoff
from trueup.foundation.store.declared import Precision, precision_of
from trueup.foundation.store.layout import rank_name
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.buffers import to_numpy
from trueup.recording.adapters.torch.context import SessionCore, ThreadState, enclosing, running_owner
from trueup.recording.adapters.torch.environment import switches
from trueup.recording.adapters.torch.functions import DispatchMode, Operator, inputs_of
from trueup.recording.adapters.torch.reference import Change, NoReference, Prepared, Reference, Tensors, alone
from trueup.recording.adapters.torch.tensors import NamedTensors, describe_values, named_tensors
from trueup.recording.execution import shadow
from trueup.recording.execution.local_error import (
    PLAIN,
    Distance,
    LocalError,
    Operand,
    Operation,
    criterion,
    judge,
    rounding,
    storing,
)
from trueup.recording.execution.shadow import NOT_JUDGED, Budget
from trueup.recording.recorder import Call
from trueup.recording.recorder.options import ShadowOptions

Array = NDArray[Any]
Again = Callable[..., LocalError]

DRAWS = 2
"""How many times the inputs of a call that looks wrong are moved by one unit in their last place."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is said of one output."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    state: str
    error: float
    explained: float
    excess: float
    rule: str
    reason: str


@dataclass(slots=True)
class Case:
    """A call that has run, and what is needed to judge it."""

    call: Prepared
    operation: Operation
    inputs: list[tuple[str, torch.dtype, torch.Tensor]]  # slot, the training's dtype, the widened copy
    outputs: Tensors  # on the reference device, in the training's dtype
    foreign: bool  # whether the training's device is another than the reference's


def judged(reference: Reference, case: Case, precision: Precision = PLAIN) -> Iterator[Judgement]:
    """Judge each output that can be compared; raises NoReference where the call cannot be computed again."""
    truth = reference.run(case.call, case.outputs)
    arrays = {slot: to_numpy(_host(tensor)) for slot, tensor in truth.items()}
    for slot, output in case.outputs.items():
        if slot not in arrays:
            continue
        shape = tuple(output.shape)
        name = str(output.dtype).removeprefix("torch.")
        if arrays[slot].shape != shape:
            text = f"its shape is {list(shape)}, the reference's {list(arrays[slot].shape)}: private to the device"
            yield Judgement(slot, name, shape, "could not tell", math.nan, 0.0, 0.0, "shape", text)
            continue
        distance = Distance.of(arrays[slot], to_numpy(_host(output)))
        granted = _granted(case.operation, name)
        if _plainly_accurate(distance, granted):
            excess = distance.relative / granted if granted else 0.0
            yield Judgement(slot, name, shape, "accurate", distance.relative, granted, excess, row_of(case.operation), "")
        else:
            yield _at_length(reference, case, slot, arrays[slot], distance, precision)


def _plainly_accurate(distance: Distance, granted: float) -> bool:
    """Tell whether an error is within what an operator is granted at least, whatever its operands: most calls are."""
    if distance.disagreeing or distance.saturated:
        return False
    return distance.rms <= granted * distance.truth_rms and distance.largest <= granted * distance.truth_largest


@lru_cache(maxsize=4096)
def _granted(operation: Operation, dtype: str) -> float:
    """Return the least that `rounding` explains of an output of an operator; its formulas only grow with the operands."""
    unit = roundoff(dtype)
    if not unit:
        return 0.0
    row = criterion().row(operation.op, operation.level, operation.phase)
    return row.ulps * min(unit, SINGLE) + (storing(operation) * unit if unit > SINGLE else 0.0)


def _at_length(reference: Reference, case: Case, slot: str, truth: Array, distance: Distance, precision: Precision) -> Judgement:
    output = case.outputs[slot]
    dtype, shape = str(output.dtype).removeprefix("torch."), tuple(output.shape)
    if not output.dtype.is_floating_point and not output.dtype.is_complex:
        state, reason = _of_integers(case, slot, distance, truth)
        share = distance.differing / max(distance.counted, 1)
        return Judgement(slot, dtype, shape, state, share, 0.0, math.inf if state == "wrong" else 0.0, "integers", reason)
    allowed = _allowed(case, slot, distance, dtype, precision)
    again = partial(judge, case.operation, dtype, distance, rounding=allowed)
    found = again()
    if found.verdict in ("wrong", "suspicious") and case.foreign:
        found = _with_second_opinion(reference, case, slot, truth, again, found)
    if found.verdict in ("wrong", "suspicious"):
        found = _with_perturbed(reference, case, slot, truth, again, found)
    state, reason = found.verdict, found.sentence
    if state in ("wrong", "suspicious") and _unordered(case):
        state, reason = "could not tell", "several values go to one place, and which of them stays is open"
    excess = found.excess if state in ("wrong", "suspicious") else min(found.excess, 1.0)
    reason = "" if state == "accurate" else reason
    return Judgement(slot, dtype, shape, state, found.error, found.explained, excess, found.rule, reason)


def _allowed(case: Case, slot: str, distance: Distance, dtype: str, precision: Precision) -> float:
    inputs = [operand(name, kind, tensor) for name, kind, tensor in case.inputs if kind.is_floating_point or kind.is_complex]
    shape = tuple(case.outputs[slot].shape)
    norm = distance.truth_rms * math.sqrt(max(distance.counted, 0))
    output = Operand(slot, dtype, shape, norm, distance.truth_largest)
    tiny = _tiny(dtype) / distance.truth_rms if distance.truth_rms > 0 else _tiny(dtype)
    return rounding(case.operation, inputs, [output], precision)[slot] + tiny


def _tiny(dtype: str) -> float:
    """Return the smallest normal number: the most that an element loses on a device without subnormal numbers."""
    return float(torch.finfo(getattr(torch, dtype)).tiny)


def operand(slot: str, dtype: torch.dtype, tensor: torch.Tensor) -> Operand:
    """Return a tensor of a call by its numbers; elements as large as ``dtype`` can hold are masks and left out."""
    array = to_numpy(_host(tensor)).reshape(-1)
    magnitudes = np.abs(array)
    limit = float(torch.finfo(dtype).max) * (1 - 2.0**-7)
    kept = magnitudes if not array.size or magnitudes.max() < limit else magnitudes[magnitudes < limit]  # NaN: the second
    largest = float(kept.max()) if kept.size else 0.0
    norm = largest * math.sqrt(float(np.sum((kept / largest) ** 2))) if largest > 0 else 0.0
    return Operand(slot, str(dtype).removeprefix("torch."), tuple(tensor.shape), norm, largest)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    with alone():
        return tensor if tensor.device.type == "cpu" else tensor.cpu()


# ------------------------------------------------------------------------------------------------ calls that look wrong
def _with_perturbed(reference: Reference, case: Case, slot: str, truth: Array, again: Again, found: LocalError) -> LocalError:
    """Ask how far one unit in the last place of the inputs moves the result: an ill-conditioned call is not a wrong one."""
    for draw in range(DRAWS):
        try:
            other = reference.run(case.call, case.outputs, _one_unit(case.call.dtypes, draw)).get(slot)
        except NoReference:
            return found
        if other is None or tuple(other.shape) != truth.shape:
            return found
        found = again(perturbed=Distance.of(truth, to_numpy(_host(other))))
        if found.verdict == "ill-conditioned":
            break
    return found


def _one_unit(dtypes: tuple[torch.dtype, ...], draw: int) -> Change:
    """Return the change that moves each floating element by one unit in the last place of its dtype, up or down by a seed."""
    remaining = iter(dtypes)
    seeds = iter(range(1 << 20))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            return tensor.clone()
        unit = torch.finfo(next(remaining)).eps
        own = torch.Generator(device="cpu").manual_seed(1 + draw + DRAWS * next(seeds))
        signs = torch.randint(0, 2, tensor.shape, generator=own).mul_(2).sub_(1).to(tensor.device)
        return tensor * (1 + unit * signs)

    return change


def _with_second_opinion(reference: Reference, case: Case, slot: str, truth: Array, again: Again, found: LocalError) -> LocalError:
    """Compute the call in the training's own dtypes on the reference: what its rounding makes is no fault of the device."""
    if any(isinstance(v, torch.dtype) for v in (*case.call.args, *case.call.kwargs.values())):
        return found
    try:
        narrow = reference.run(case.call, case.outputs, _narrowed(case.call.dtypes)).get(slot)
    except NoReference:
        return found
    if narrow is None or tuple(narrow.shape) != truth.shape or narrow.dtype != case.outputs[slot].dtype:
        return found
    with alone():
        return again(Distance.of(truth, to_numpy(_host(narrow))))


def _narrowed(dtypes: tuple[torch.dtype, ...]) -> Change:
    remaining = iter(dtypes)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return tensor.to(next(remaining), copy=True)
        return tensor.clone()

    return change


# -------------------------------------------------------------------------------------------------------------- integers
def _of_integers(case: Case, slot: str, distance: Distance, truth: Array) -> tuple[str, str]:
    """Judge indices, masks and counts: computed from the very same numbers, they are the same, but for a choice left open."""
    share = f"{distance.differing:,} of {distance.counted:,} elements are not the reference's"
    op = case.operation.op
    if has(op, "ties") and slot == "output.1" and _same_values(case, slot, truth):
        return "accurate", ""
    if has(op, "ties") or has(op, "unordered"):
        return "could not tell", f"{share}, and ties leave the choice open"
    if has(op, "rounds-whole"):
        return "could not tell", f"{share}, and what is rounded before decides them"
    if _unordered(case):
        return "could not tell", f"{share}, and several values go to one place"
    return "wrong", share


def _same_values(case: Case, slot: str, truth: Array) -> bool:
    """Tell whether the indices of a sort pick the values that the reference's pick."""
    given = next((tensor for _, _, tensor in case.inputs), None)
    indices = case.outputs[slot]
    if given is None or indices.dim() != given.dim() or not indices.dim():
        return False
    dim = case.call.named().get("dim", -1)
    inside = bool(((indices >= 0) & (indices < given.size(dim))).all())
    if not inside:
        return False
    with alone():
        expected = torch.from_numpy(np.array(truth)).to(given.device)
        return bool(torch.equal(given.gather(dim, indices), given.gather(dim, expected)))


def _unordered(case: Case) -> bool:
    """Tell whether a call writes several values to one place without adding them."""
    if not has(case.operation.op, "last-write"):
        return False
    named = case.call.named()
    if named.get("accumulate") or named.get("reduce"):
        return False
    indices = named.get("indices", named.get("index"))
    of = [i for i in indices if i is not None] if isinstance(indices, (list, tuple)) else [indices]
    if len(of) != 1 or not isinstance(of[0], torch.Tensor) or of[0].dtype == torch.bool:
        return len(of) > 1 or normalised(case.operation.op) == "scatter"
    return bool(of[0].unique().numel() < of[0].numel())


def row_of(operation: Operation) -> str:
    """Return the criterion's row of an operator."""
    return criterion().row(operation.op, operation.level, operation.phase).name


NOTHING = "no output that could be compared"
TOO_LARGE = "a tensor of more than {:g} MB"
PART_ROWS = 4096
"""Rows that a part of the table holds, at least, but for the last."""

Row = dict[str, Any]


@dataclasses.dataclass(slots=True)
class Waiting:
    """A call between the copies of its inputs and its execution."""

    prepared: Prepared
    inputs: list[tuple[str, torch.dtype]]
    device: torch.device | None
    seconds: float


class ShadowMode(DispatchMode):
    """A dispatch mode that judges what it sees; see the module."""

    def __init__(self, session: SessionCore) -> None:
        super().__init__(session)
        self._call: Callable[..., Any] = self._at_length
        self.options = ShadowOptions(**(session.options.shadow or {}))
        self.reference = Reference(torch.device(self.options.reference), getattr(torch, self.options.dtype))
        self.budget = Budget(self.options)
        self.rows: list[Row] = []  # what was judged; written part by part where there is a directory, else kept
        self.kept: list[Row] | None = None  # rows that are on the disk already, where they are to be at hand as well
        self.to_disk = True
        self._left: Counter[tuple[str, str, str]] = Counter()  # calls that were not judged: by phase, operator and reason
        self._parts = 0
        self._why: dict[Any, str | None] = {}
        self._precision: dict[str, Precision] = {}

    # ------------------------------------------------------------------------------------------------------ before a call
    def _before(self, operator: Operator, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Waiting | None:
        if not call.recorded:
            return None
        inputs = named_tensors("input", args, inputs_of(kwargs))
        if self.to_disk:  # what is not judged, too: with a gap no comparison could tell
            self._session.slots.inputs(call, inputs)
            if (values := describe_values(args, kwargs)) is not None:
                self._session.recorder.value(call, values)
        if operator.view and not operator.written:
            return None
        began = perf_counter()
        why = self._why_not(call, operator, func, inputs)
        waiting = None
        if why is None:
            try:
                prepared = self.reference.prepare(operator, func, args, kwargs)
                device = next((t.device for _, t in inputs if t.dim() or len(inputs) == 1), None)
                waiting = Waiting(prepared, [(slot, t.dtype) for slot, t in inputs], device, 0.0)
            except NoReference as reason:
                why = str(reason)
            except Exception as error:  # noqa: BLE001 - one strange operator must not end the run
                why = _failed(error)
        if why is not None:
            self._left[call.kind.phase, operator.name, why] += 1
        seconds = perf_counter() - began
        self.budget.spent += seconds
        if waiting is not None:
            waiting.seconds = seconds
        return waiting

    def _why_not(self, call: Call, operator: Operator, func: Any, inputs: list[tuple[str, torch.Tensor]]) -> str | None:
        if func not in self._why:
            self._why[func] = self.reference.why_not(operator, func)
        why = self._why[func]
        if why is not None:
            return why
        largest = self.options.largest_mb * 2**20
        if any(t.numel() * t.element_size() > largest for _, t in inputs):
            return TOO_LARGE.format(self.options.largest_mb)
        kind = call.kind
        dtype = str(inputs[0][1].dtype) if inputs else ""
        return self.budget.why_not(self._session.recorder.step, kind.phase, kind.scope, kind.op, call.ordinal, dtype)

    # ------------------------------------------------------------------------------------------------------- after a call
    def _after(
        self, operator: Operator, call: Call, noted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        outputs = self._account(operator, call, args, kwargs, result)
        if self.to_disk and call.recorded:
            self._session.slots.outputs(call, outputs)
        if noted is not None:
            self._judge(operator, call, noted, outputs)

    def _judge(self, operator: Operator, call: Call, waiting: Waiting, outputs: NamedTensors) -> None:
        began = perf_counter()
        try:
            rows = self._judgements(operator, call, waiting, outputs)
            why = None if rows else NOTHING
        except NoReference as reason:
            rows, why = [], str(reason)
        except Exception as error:  # noqa: BLE001 - one strange operator must not end the run
            rows, why = [], _failed(error)
        if why is not None:
            self._left[call.kind.phase, operator.name, why] += 1
        seconds = perf_counter() - began
        self.budget.spent += seconds
        if rows:
            rows[0]["milliseconds"] = (waiting.seconds + seconds) * 1000
            self.rows.extend(rows)

    def _judgements(self, operator: Operator, call: Call, waiting: Waiting, outputs: NamedTensors) -> list[Row]:
        device = self.reference.device
        moved = {slot: t if t.device == device else t.to(device) for slot, t in outputs}
        prepared = waiting.prepared
        copies = named_tensors("input", prepared.args, inputs_of(prepared.kwargs))
        dtypes = dict(waiting.inputs)
        inputs = [(slot, dtypes[slot], tensor) for slot, tensor in copies if slot in dtypes]
        kind = call.kind
        operation = Operation(operator.name, "aten", kind.phase)
        foreign = waiting.device is not None and waiting.device.type != device.type
        case = Case(prepared, operation, inputs, moved, foreign)
        found = list(judged(self.reference, case, self._declared(waiting.device)))
        if not found:
            return []
        api, place = _function_around(self._session.threads.state), self._source(call)
        step, rank = self._session.recorder.step, self._session.rank or 0
        its = {"step": step, "rank": rank, "seq": call.seq, "phase": kind.phase, "scope": kind.scope, "op": kind.op,
               "ordinal": call.ordinal, "api": api, "source": place, "milliseconds": 0.0, "calls": 1}  # fmt: skip
        return [its | dataclasses.asdict(one) | {"shape": str(list(one.shape))} for one in found]

    def _declared(self, device: torch.device | None) -> Precision:
        """Return how the device says that it rounds float32 products: read once a step, for scripts set it as they begin."""
        if device is None or device.type == "cpu":
            return PLAIN
        found = self._precision.get(device.type)
        if found is None:
            found = self._precision[device.type] = precision_of([switches()], [[str(device)]])
        return found

    def _source(self, call: Call) -> str | None:
        frames = self._session.recorder.sites.frames(call.site)
        return frames[0] if frames else None

    # --------------------------------------------------------------------------------------------------------------- life
    def end_step(self) -> None:
        """Finish a step: what was left out becomes rows, and a part of the table is written when there is enough."""
        step, rank = self._session.recorder.step, self._session.rank or 0
        left, self._left = self._left, Counter()
        for (phase, op, why), count in left.items():
            self.rows.append(
                {"step": step, "rank": rank, "seq": 1 << 62, "phase": phase, "scope": "", "op": op, "ordinal": -1,
                 "state": NOT_JUDGED, "reason": why, "calls": count}
            )  # fmt: skip
        self.budget.end_step()
        self._precision.clear()
        if len(self.rows) >= PART_ROWS:
            self.write()

    def finish(self) -> None:
        self.end_step()
        self.write()

    def write(self) -> None:
        """Write the rows gathered so far as a part of the table, into this rank's folder."""
        session = self._session
        if not (self.to_disk and self.rows) or session.recorder.displaced is not None:
            return
        rows, self.rows = self.rows, []
        if self.kept is not None:
            self.kept.extend(rows)
        folder = session.recorder.directory / rank_name(session.claim())
        rank = session.rank or 0
        try:
            shadow.write(folder, self._parts, [{**row, "rank": rank} for row in rows])
        except OSError as error:
            session.recorder.note(f"a part of the table of local errors could not be written: {error.strerror or error}")
        self._parts += 1


def _failed(error: Exception) -> str:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "the reference has no room"
    return f"the reference refused: {type(error).__name__}: {first_line(error, 80)}"


def _function_around(state: ThreadState) -> str | None:
    """Return the user-facing function that an operator is executed for, in forward and in backward."""
    above = enclosing(state)
    if above is not None:
        return above.call.op
    owner = running_owner()
    return None if owner is None or owner.call.level != "api" else owner.call.op
