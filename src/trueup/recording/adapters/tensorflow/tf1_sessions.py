"""Sessions of TensorFlow 1: what a run computes is fetched with what the user fetches.

Every session, a `MonitoredSession` too, comes to ``BaseSession._do_run``. Of a run all tensors on the way to what was asked for are
fetched besides; nothing else is executed than what the run executes anyway. In which order the graph was built is the order of its
calls, and names tell what they are: ``tf.gradients`` puts the backward of ``net/MatMul`` under ``gradients/net/MatMul_grad``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tensorflow.python.client import session as client
from tensorflow.python.framework import errors

from trueup.foundation.frameworks import dialect
from trueup.foundation.frameworks.dialect import APPLIES, PASSED_OVER, READS, UPDATE, device_name
from trueup.recording.adapters.tensorflow.context import HANDLES, Node, SessionCore, attributes, number_of, slot_of
from trueup.recording.adapters.tensorflow.gradients import PREFIX, constants, unseen
from trueup.recording.engine.replacing import Around, Replacement
from trueup.recording.recorder import Statistics

RUN = "tf.Session.run"
MOST_PLANS = 64

FETCHED = (
    "sessions fetch what they compute besides what was asked for: what TensorFlow would fuse is computed as it is written, so "
    "results may differ from those of a plain run in the last bits (docs/tensorflow.md)"
)
GONE = (
    "some values of a session's graph are not recorded: its optimizer replaces what makes them even where they are fetched (a "
    "function by another implementation of it, operations by one kernel), nor are the calls that read them"
)
REFUSED = re.compile(
    r"Tensor ([^ ,]+), specified in either feed_devices or fetch_devices was not found|Node '([^']+)'.*does not have output (\d+)"
)
"""How a session refuses to fetch such a value (TensorFlow 2.21)."""
INSIDE = "loops and branches of a session's graph are seen from outside: what goes in and comes out is recorded"


@dataclass(frozen=True, slots=True)
class Standing:
    """An operation of a graph, and what its name tells."""

    op: Any
    phase: str
    scope: str
    forward: str | None
    value: str | None
    written: frozenset[str]
    """Slots of numbers that the code wrote down: arguments, and in ``value``."""


@dataclass(slots=True)
class Plan:
    """What is recorded of runs that ask for the same."""

    standings: list[Standing] = field(default_factory=list)
    fetches: list[Any] = field(default_factory=list)  # tensors that are fetched besides
    before: list[Any] = field(default_factory=list)  # variables that the run itself writes, and what shows their memory
    gone: set[str] = field(default_factory=set)  # names of tensors that cannot be fetched
    steps: bool = False  # whether an optimizer steps in it


class Sessions:
    """Stands around the runs of sessions."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def replacements(self) -> list[Replacement]:
        """Return the replacements that wrap every run."""
        return [Around(client.BaseSession, "_do_run", self._run)]

    def _run(
        self, original: Callable[..., Any], running: Any, handle: Any, targets: Any, fetches: Any, feeds: Any, *rest: Any
    ) -> Any:
        session = self._session
        state = session.threads.state
        if handle is not None or state.busy or not session.counts or not state.known:
            return original(running, handle, targets, fetches, feeds, *rest)
        plan: Plan | None = None
        with session.observing(state, RUN):
            plan = self._plan(running.graph, targets, fetches, feeds)
        if plan is None:
            return original(running, handle, targets, fetches, feeds, *rest)
        session.enter_model(None, state)
        if session.active:
            before = self._before(plan, lambda its: original(running, None, [], its, {}, None, None))
            results = self._executed(plan, fetches, lambda more: original(running, handle, targets, more, feeds, *rest))
            with session.observing(state, RUN):
                self._record(plan, fetches, feeds, results, before)
            results = results[: len(fetches)]
        else:
            results = original(running, handle, targets, fetches, feeds, *rest)
        if plan.steps:
            session.updates(self)
            session.optimizers.stepped(self)
        return results

    # ------------------------------------------------------------------------------------------------- what a run computes
    def _plan(self, graph: Any, targets: Sequence[Any], fetches: Sequence[Any], feeds: dict[Any, Any]) -> Plan:
        fed = {ref.deref().name for ref in feeds}
        key = (id(graph), graph.version, *(t.name for t in targets), "", *(t.name for t in fetches), "", *sorted(fed))
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            found = self._plans[key] = self._made(graph, [*targets, *(t.op for t in fetches)], fed)
            if found.fetches:
                self._session.recorder.note(FETCHED)
        return found

    def _made(self, graph: Any, ends: list[Any], fed: set[str]) -> Plan:
        reached = _reached(ends, fed)
        ops = [op for op in graph.get_operations() if op.name in reached]
        updated = frozenset(found[1] for op in ops if APPLIES.match(op.type) and (found := UPDATE.match(op.name)))
        plan = Plan(steps=bool(updated))
        wanted: dict[str, Any] = {}
        written = {t.name for op in ops for t, given in zip(op.inputs, op.op_def.input_arg, strict=False) if given.is_ref}
        before = written | {op.outputs[0].name for op in ops if op.type == "Identity" and op.inputs[0].name in written}
        for op in ops:
            if op._get_control_flow_context() is not None or op.type in ("Switch", "Merge"):
                self._session.recorder.note(INSIDE)
                continue
            if op.type in PASSED_OVER or op.type == "VarIsInitializedOp":
                continue
            tensors = [t for t in (*op.inputs, *op.outputs) if _fetchable(graph, t)]
            if tensors:
                standing = _standing(op, updated, fed)
                plan.standings.append(standing)
                if not self._session.recorder.selects("api", standing.phase, standing.scope, f"{PREFIX}{op.type}"):
                    continue
                wanted |= {t.name: t for t in tensors if t.name not in fed and t.op.name in reached}
        plan.fetches = [t for name, t in wanted.items() if name not in before]
        plan.before = [t for name, t in wanted.items() if name in before]
        return plan

    def _before(self, plan: Plan, run: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Read the variables that a run writes before it starts: in the run, a fetch may come before the write or after. Return
        values by name; none where a variable has none yet."""
        try:
            return {t.name: np.array(value) for t, value in zip(plan.before, run(plan.before), strict=True)} if plan.before else {}
        except errors.FailedPreconditionError:
            return {}

    def _executed(self, plan: Plan, fetches: Sequence[Any], run: Callable[[list[Any]], Any]) -> Any:
        """Run, without what the graph optimizer takes away although it is fetched; that is refused before anything executes."""
        while True:
            try:
                return run([*fetches, *plan.fetches])
            except errors.OpError as error:
                found = REFUSED.search(error.message)
                name = "" if found is None else found[1] or f"{found[2]}:{found[3]}"
                left = [t for t in plan.fetches if t.name != name]
                if len(left) == len(plan.fetches):
                    raise
                plan.fetches = left
                plan.gone.add(name)
                self._session.recorder.note(GONE)

    # -------------------------------------------------------------------------------------------------------- what it gave
    def _record(
        self, plan: Plan, fetches: Sequence[Any], feeds: dict[Any, Any], results: Sequence[Any], before: dict[str, Any]
    ) -> None:
        session = self._session
        session.slots.forget()
        values = before | {ref.deref().name: np.asarray(value) for ref, value in feeds.items()}
        unknown = plan.gone | {t.name for t in plan.before} - before.keys()
        values |= {t.name: np.asarray(value) for t, value in zip(plan.fetches, results[len(fetches) :], strict=True)}
        known: dict[str, Statistics | None] = {}
        nodes: dict[str, Node] = {}
        for standing in plan.standings:
            op = standing.op
            given = op.outputs if op.type in READS else op.inputs
            if any(tensor.name in unknown for tensor in given):
                continue  # what it was given is not known: it would be blamed for it
            site = session.recorder.sites.named([(f.filename, f.lineno, f.name) for f in reversed(op.traceback)])
            forward = None if standing.forward is None else nodes.get(standing.forward)
            node = nodes[op.name] = session.begin(
                "api", standing.phase, standing.scope, f"{PREFIX}{op.type}", forward=forward, site=site, graph=None
            )
            if standing.value is not None:
                session.slots.value(node, standing.value)
            if op.outputs:
                session.slots.unseen(node, unseen(op.type, op.inputs, op.graph))
            for prefix, tensors in (("input", given), ("output", op.outputs)):
                for k, tensor in enumerate(tensors):
                    if tensor.name in values and f"{prefix}.{k}" not in standing.written:
                        self._slot(node, f"{prefix}.{k}", tensor, values[tensor.name], known)
        if plan.steps:
            self._loss(fetches, results, known)

    def _slot(self, node: Node, name: str, tensor: Any, value: Any, known: dict[str, Statistics | None]) -> None:
        call = node.call()
        if call is None or not call.recorded:
            return
        if tensor.name not in known:
            known[tensor.name] = self._session.slots.measured(value)
        slot = slot_of(name, value.dtype.name, value.shape, device_name(tensor.device))
        self._session.slots.add(node, call, slot, number_of(tensor), known[tensor.name])

    def _loss(self, fetches: Sequence[Any], results: Sequence[Any], known: dict[str, Statistics | None]) -> None:
        """Record the first number that the user asks a training step for: the loss curve."""
        session = self._session
        for tensor, value in zip(fetches, results, strict=False):
            if np.ndim(value) == 0 and tensor.dtype.is_floating:
                node = session.begin("api", "forward", "", RUN, graph=None)
                self._slot(node, "input.0", tensor, np.asarray(value), known)
                return


def _reached(ends: list[Any], fed: set[str]) -> set[str]:
    """Return the names of the operations that a run executes."""
    found: set[str] = set()
    pending = list(ends)
    while pending:
        op = pending.pop()
        if op.name in found:
            continue
        found.add(op.name)
        pending += [t.op for t in op.inputs if t.name not in fed]
        pending += op.control_inputs
    return found


def _fetchable(graph: Any, tensor: Any) -> bool:
    numbers = tensor.dtype.base_dtype not in HANDLES
    outside = tensor.op._get_control_flow_context() is None and tensor.op.type not in ("Switch", "Merge")
    return bool(numbers and outside and graph.is_fetchable(tensor))


def _standing(op: Any, updated: frozenset[str], fed: set[str]) -> Standing:
    phase, scope, forward = dialect.standing(op.name, op.type, updated)
    named = [item for key in op.node_def.attr for item in (key, op.node_def.attr[key])]
    given = [None if tensor.name in fed else tensor for tensor in op.inputs]
    written = constants(given if op.outputs else (), op.graph)
    return Standing(op, phase, scope, forward, attributes(named, written), frozenset(written))
