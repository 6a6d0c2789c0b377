"""A shadow run: each operator executes as usual, and once more on the reference with the same inputs; its own error is recorded.

The mode sees every dispatcher operator of forward, backward and optimizer (`adapters.torch.dispatch`), below autograd:
nothing of it enters a graph, no version counter moves, no random number is drawn. Inputs are copied before the operator runs, for
it may write them; the reference runs after it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from trueup.comparison.verdict.operands import Precision, precision_of
from trueup.foundation.facts.operators import has, says
from trueup.foundation.store.layout import rank_name
from trueup.recording.adapters.torch.context import ThreadState, enclosing, running_owner
from trueup.recording.adapters.torch.dispatch import DispatchMode, Operator, _execute, _outputs
from trueup.recording.adapters.torch.environment import switches
from trueup.recording.adapters.torch.functions import inputs_of
from trueup.recording.adapters.torch.golden import Golden, NoReference, Prepared
from trueup.recording.adapters.torch.shadow_judging import Case, judged
from trueup.recording.adapters.torch.tensors import describe_values, named_tensors
from trueup.recording.execution import shadow_table
from trueup.recording.execution.rounding import PLAIN, Operation
from trueup.recording.execution.shadow_budget import Budget
from trueup.recording.execution.shadow_options import ShadowOptions
from trueup.recording.execution.shadow_table import NOT_JUDGED
from trueup.recording.recorder import Call

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session

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

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._call: Callable[..., Any] = self._at_length
        self.options = ShadowOptions.from_dict(session.options.shadow or {})
        self.golden = Golden(torch.device(self.options.reference), getattr(torch, self.options.dtype))
        self.budget = Budget(self.options)
        self.rows: list[Row] = []
        """What was judged; written part by part where there is a directory, else kept."""
        self.kept: list[Row] | None = None
        """Rows that are on the disk already, where they are to be at hand as well."""
        self.to_disk = True
        self._left: Counter[tuple[str, str, str]] = Counter()
        """Calls that were not judged: by phase, operator and reason."""
        self._parts = 0
        self._why: dict[Any, str | None] = {}
        self._precision: dict[str, Precision] = {}

    def _at_length(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        state = session.threads.state
        if state.busy or not session.sees():
            return super()._at_length(func, args, kwargs)
        operator, call, waiting = None, None, None
        with session.observing(state, "an operator"):
            operator = self._operator(func)
            if operator.recorded:
                call = self.begin(operator, state)
                waiting = self._prepare(call, operator, func, args, kwargs)
        result = _execute(func, args, kwargs)
        if operator is not None and session.active:
            with session.observing(state, operator.name):
                if call is not None:
                    self._follow(operator, call, waiting, args, kwargs, result)
                    if waiting is not None:
                        self._judge(call, waiting, operator, args, kwargs, result, state)
                elif has(operator.name, "allocates"):
                    session.buffers.allocated(result)
        return result

    # ------------------------------------------------------------------------------------------------------ before a call
    def _prepare(
        self, call: Call, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Waiting | None:
        if not call.recorded or (operator.view and not operator.written):
            return None
        began = perf_counter()
        inputs = named_tensors("input", args, inputs_of(kwargs))
        why = self._why_not(call, operator, func, inputs)
        waiting = None
        if why is None:
            try:
                prepared = self.golden.prepare(operator, func, args, kwargs)
                device = next((t.device for _, t in inputs if t.dim() or len(inputs) == 1), None)
                waiting = Waiting(prepared, [(slot, t.dtype) for slot, t in inputs], device, 0.0)
                if self.to_disk:
                    self._session.slots.inputs(call, inputs)
                    if (values := describe_values(args, kwargs)) is not None:
                        self._session.recorder.value(call, values)
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
            self._why[func] = self.golden.why_not(operator, func)
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
    def _follow(
        self, operator: Operator, call: Call, waiting: Waiting | None, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Keep account of buffers as a capture does, and record the outputs of a call that is judged."""
        session = self._session
        outputs, written = _outputs(operator, args, kwargs, result)
        outputs = [(slot, tensor) for slot, tensor in outputs if slot not in (says(operator.name, "unwritten") or ())]
        for tensor in written:
            session.buffers.written(tensor)
        if not operator.view:
            for slot, tensor in outputs:
                session.buffers.produced(tensor, "aten", call, slot)
        if waiting is not None and self.to_disk:
            session.slots.outputs(call, outputs)

    def _judge(
        self, call: Call, waiting: Waiting, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
        state: ThreadState,
    ) -> None:  # fmt: skip
        began = perf_counter()
        try:
            rows = self._judgements(call, waiting, operator, args, kwargs, result, state)
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

    def _judgements(
        self, call: Call, waiting: Waiting, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
        state: ThreadState,
    ) -> list[Row]:  # fmt: skip
        device = self.golden.device
        outputs, _ = _outputs(operator, args, kwargs, result)
        private = says(operator.name, "unwritten") or ()
        moved = {slot: t if t.device == device else t.to(device) for slot, t in outputs if slot not in private}
        prepared = waiting.prepared
        copies = named_tensors("input", prepared.args, inputs_of(prepared.kwargs))
        dtypes = dict(waiting.inputs)
        inputs = [(slot, dtypes[slot], tensor) for slot, tensor in copies if slot in dtypes]
        kind = call.kind
        operation = Operation(operator.name, "aten", kind.phase)
        foreign = waiting.device is not None and waiting.device.type != device.type
        case = Case(prepared, operation, inputs, moved, foreign)
        found = list(judged(self.golden, case, self._declared(waiting.device)))
        if not found:
            return []
        api, place = _function_around(state), self._source(call)
        step, rank = self._session.recorder.step, self._session.rank or 0
        return [
            {
                "step": step, "rank": rank, "seq": call.seq, "phase": kind.phase, "scope": kind.scope, "op": kind.op,
                "ordinal": call.ordinal, "api": api, "slot": one.slot, "dtype": one.dtype, "shape": str(list(one.shape)),
                "state": one.state, "error": one.error, "explained": one.explained, "excess": one.excess, "rule": one.rule,
                "reason": one.reason, "source": place, "milliseconds": 0.0, "calls": 1,
            }
            for one in found
        ]  # fmt: skip

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
        """Write what is left."""
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
            shadow_table.write(folder, self._parts, [{**row, "rank": rank} for row in rows])
        except OSError as error:
            session.recorder.note(f"a part of the table of local errors could not be written: {error.strerror or error}")
        self._parts += 1


def _failed(error: Exception) -> str:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "the reference has no room"
    return f"the reference refused: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"


def _function_around(state: ThreadState) -> str | None:
    """Return the user-facing function that an operator is executed for, in forward and in backward."""
    above = enclosing(state)
    if above is not None:
        return above.call.op
    owner = running_owner()
    return None if owner is None or owner.call.level != "api" else owner.call.op
