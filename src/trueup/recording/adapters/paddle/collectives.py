"""Collectives of Paddle: each method of a ``ProcessGroup`` that Python calls is a call of phase ``collective``, at each level.

All of `paddle.distributed` and of fleet's Python comes through these methods. What C++ issues does not: the reducer of
``paddle.DataParallel`` (`Reductions` shows what it does to the gradients).

What the reducer of ``paddle.DataParallel`` does to gradients, which C++ issues unseen: shown as one collective a backward pass.

    paddle.DataParallel.reduce_gradients    input.<parameter>   the gradient that this rank gives: of the pass, and of those
                                                                before it that ran under ``no_sync``
                                            output.<parameter>  its ``.grad`` when the pass has ended: the mean over the ranks

A hook on a parameter runs before the gradient is added to what is there, and before the reducer's own.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import paddle
from paddle.base import core

from trueup.foundation.words.wording import in_runs
from trueup.recording.adapters.paddle.context import SessionCore, ThreadState, enclosing
from trueup.recording.adapters.paddle.tensors import FACTS, NamedTensors, holds, named_tensors
from trueup.recording.engine.replacing import Around, Replacement, Sweep
from trueup.recording.recorder import Call

STREAM = "_on_calc_stream"
"""End of the name of a method that is done when what follows on its stream begins: it returns a task that nobody waits for."""

METHODS: dict[str, list[str]] = {method: said.split() for method, said in FACTS["collective"].items()}
"""Methods of ``core.ProcessGroup``: the function of `paddle.distributed` that each is, and its first arguments."""

OLD_ORDER = {("all_gather", 2): ("in", "out"), ("scatter", 3): ("in", "out", "src")}
"""Arguments of the older form of a method, by its name and how many it is given."""

KEPT = ("num", "id", "out_sizes", "in_sizes")
"""Arguments that are kept as they are."""


@dataclass(slots=True)
class Communication:
    """One call of a method that communicates."""

    function: str  # ``paddle.distributed.all_reduce``
    inputs: NamedTensors = field(default_factory=list)
    outputs: NamedTensors = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


def read(method: str, group: Any, args: tuple[Any, ...]) -> Communication:
    """Sort the arguments of a method, named without `STREAM`, into tensors that it reads, tensors that it writes and plain
    values."""
    function, *names = METHODS[method]
    given = dict(zip(OLD_ORDER.get((method, len(args)), names), args, strict=False))
    ranks, number = _group(group)
    found = Communication(f"paddle.distributed.{function}", arguments={name: given[name] for name in KEPT if name in given})
    root = given.get("src", given.get("dst"))
    is_root = root == group.rank()
    if function in ("send", "recv"):
        found.arguments["dst" if function == "send" else "src"] = ranks[root] if root is not None else None
    elif root is not None:
        found.arguments["root"] = ranks[root]
    if (reduction := given.get("op")) is not None:
        found.arguments["reduce_op"] = str(reduction).rpartition(".")[2]
    found.arguments |= {"ranks": in_runs(ranks), "group": str(number)}
    reads, writes = _directions(function, is_root=is_root)
    if reads:
        found.inputs = named_tensors("input", _listed(given.get("tensor", given.get("in"))))
    if writes:
        found.outputs = named_tensors("output", _listed(given.get("tensor", given.get("out"))))
    return found


def _directions(function: str, *, is_root: bool) -> tuple[bool, bool]:
    """Tell whether a rank gives something, and whether it gets something."""
    return {
        "send": (True, False), "recv": (False, True), "broadcast": (is_root, not is_root), "reduce": (True, is_root),
        "scatter": (is_root, True), "gather": (True, is_root), "barrier": (False, False),
    }.get(function, (True, True))  # fmt: skip


def _listed(value: Any) -> Any:
    """Return one tensor as it is; a list of one is that tensor."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _group(group: Any) -> tuple[list[int], int]:
    """Return the global ranks of a group in its own order, and its number."""
    from paddle.distributed import collective

    for number, known in collective._get_group_map().items():
        if known._pg is group or (known._pg is not None and known._pg.name() == group.name() and len(known.ranks) == group.size()):
            return list(known.ranks), int(number)
    return list(range(group.size())), -1


REDUCER = (
    "paddle.DataParallel adds up gradients over the ranks in C++: that is shown as paddle.DataParallel.reduce_gradients, from the "
    "gradients before and after it, not as the all-reduces that it is made of"
)
FUNCTION = "paddle.DataParallel.reduce_gradients"


class Reductions:
    """Follows the gradients of the DataParallel Layers that run."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._known: weakref.WeakSet[paddle.nn.Layer] = weakref.WeakSet()
        self._gathered: set[int] = set()
        """Addresses of Layers that gathered gradients under ``no_sync`` since the last pass that reduced."""
        self._hooks: list[tuple[paddle.Tensor, int]] = []
        self._calls: dict[int, tuple[paddle.nn.Layer, list[Call], dict[str, paddle.Tensor]]] = {}
        """By the address of a Layer: the calls of the pass that runs, and the parameters that got a gradient, by name."""

    def meet(self, layer: paddle.nn.Layer) -> None:
        """Follow a DataParallel Layer that has a reducer, from its first call on."""
        if layer in self._known or getattr(layer, "_reducer", None) is None:
            return
        self._known.add(layer)
        self._session.recorder.note(REDUCER)
        for name, parameter in layer._layers.named_parameters():
            if not parameter.stop_gradient and not getattr(parameter, "no_sync", False):
                hook = self._on_gradient(weakref.ref(layer), name, parameter)
                self._hooks.append((parameter, parameter._register_grad_hook(hook)))

    def remove(self) -> None:
        """Remove our hooks from the parameters."""
        hooks, self._hooks = self._hooks, []
        self._known.clear()
        for parameter, number in hooks:
            parameter._remove_grad_hook(number)

    def _on_gradient(self, ref: weakref.ref[paddle.nn.Layer], name: str, parameter: paddle.Tensor) -> Any:
        session = self._session

        def give(gradient: Any) -> None:
            layer = ref()
            if layer is None or not holds(gradient):
                return
            if not layer.grad_need_sync:
                self._gathered.add(id(layer))
                return
            calls, parameters = self._calls_of(layer)
            parameters[name] = parameter
            if id(layer) in self._gathered and holds(before := parameter.grad):
                with paddle.no_grad():
                    gradient = paddle.add(before, gradient)
            for call in calls:
                if call.recorded:
                    session.slots.received(call, [(f"input.{name}", gradient)])

        return session.graph.hook(FUNCTION, give)

    def _calls_of(self, layer: paddle.nn.Layer) -> tuple[list[Call], dict[str, paddle.Tensor]]:
        """Return the calls of the pass that runs, begun once, and the parameters of a Layer that got a gradient in it."""
        session = self._session
        found = self._calls.get(id(layer))
        if found is None:
            calls = session.collectives.calls(FUNCTION, session.threads.state)
            ranks = list(getattr(layer.group, "ranks", None) or range(paddle.distributed.get_world_size()))
            said = {"group": str(getattr(layer.group, "id", 0)), "ranks": in_runs(ranks), "reduce_op": "AVG"}
            for call in calls:
                session.recorder.value(call, json.dumps(said, sort_keys=True))
            found = self._calls[id(layer)] = layer, calls, {}
            session.passes.at_end(self.finish)
        return found[1:]

    def finish(self) -> None:
        """Show what became of the gradients, at the end of a pass."""
        session, passes = self._session, list(self._calls.values())
        self._gathered -= self._calls.keys()
        self._calls.clear()
        for _, calls, parameters in passes:
            for call in calls:
                found = [(f"output.{name}", p.grad) for name, p in parameters.items() if p.grad is not None and holds(p.grad)]
                if call.recorded and session.active:
                    session.slots.delivered(call, found)


UNFINISHED = "a collective was still under way when the capture ended, and nobody had waited for it: its output was not read"


@dataclass(slots=True)
class _Pending:
    """A collective that was launched and not waited for."""

    task: Any
    calls: list[Call]
    outputs: Any


class Collectives:
    """Sees and records the collectives of a session."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._pending: dict[int, _Pending] = {}
        self._sweep = Sweep(())
        self._parts: list[Replacement] = []

    def install(self) -> None:
        """Stand in the way of every method that communicates; in a Paddle without any there is nothing to see."""
        group = getattr(core, "ProcessGroup", None)
        if group is None:
            return
        names = [name + end for name in METHODS for end in ("", STREAM) if hasattr(group, name + end)]
        task = core.task
        self._parts = [
            *(Around(group, name, partial(self._communicate, name)) for name in names),
            *(Around(task, name, self._wait) for name in ("wait", "synchronize")),
        ]
        for part in self._parts:
            part.install()
        functions = [getattr(paddle.distributed, name, None) for name in FACTS["objects"].split()]
        self._sweep = Sweep([(function, self._of_objects(function)) for function in functions if function is not None])
        self._sweep.install()

    def remove(self) -> None:
        self._sweep.remove()
        for part in reversed(self._parts):
            part.remove()
        self._parts = []

    def settle(self) -> None:
        """Record the outputs of all collectives that are complete, at the end of a step."""
        for pending in [one for one in self._pending.values() if one.task.is_completed()]:
            self._complete(pending)

    def end(self) -> None:
        """Record what is complete and give up the rest, when the capture ends."""
        self.settle()
        if self._pending:
            self._session.recorder.note(UNFINISHED)
            self._pending.clear()

    # ------------------------------------------------------------------------------------------------------------- inside
    def _communicate(self, name: str, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        state = session.threads.state
        if not session.active or state.busy:
            return original(group, *args, **kwargs)
        calls: list[Call] = []
        found: Communication | None = None
        with session.observing(state, name):
            found = read(name.removesuffix(STREAM), group, (*args, *kwargs.values()))
            calls = self._begin(found, state)
        task = original(group, *args, **kwargs)
        if found is not None and session.active:
            with session.observing(state, name):
                self._launched(_Pending(task, calls, found.outputs), at_once=name.endswith(STREAM))
        return task

    def _begin(self, found: Communication, state: ThreadState) -> list[Call]:
        session = self._session
        calls = self.calls(found.function, state)
        text = json.dumps(found.arguments, sort_keys=True)
        for call in calls:
            if call.recorded:
                session.slots.inputs(call, found.inputs)
                session.recorder.value(call, text)
        return calls

    def calls(self, function: str, state: ThreadState) -> list[Call]:
        """Begin a call at each level recorded, coarse to fine, one inside the other."""
        session = self._session
        operator, layer = enclosing(state)
        above = operator or layer
        parent, scope = (None, "") if above is None else (above.call.seq, above.scope)
        site = session.site(state)
        found: list[Call] = []
        for level in ("module", "api"):
            if session.records(level):
                found.append(session.recorder.begin(level, "collective", scope, function, parent=parent, site=site))
                parent = found[-1].seq
        return found

    def _launched(self, pending: _Pending, *, at_once: bool) -> None:
        if not pending.outputs:
            return
        if at_once or pending.task is None:
            self._record(pending)
        else:
            self._pending[id(pending.task)] = pending

    def _wait(self, original: Callable[..., Any], task: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(task, *args, **kwargs)
        pending = self._pending.get(id(task))
        if pending is not None and pending.task is task:
            with self._session.observing(self._session.threads.state, "a collective"):
                self._complete(pending)
        return result

    def _complete(self, pending: _Pending) -> None:
        self._pending.pop(id(pending.task), None)
        self._record(pending)

    def _record(self, pending: _Pending) -> None:
        session = self._session
        for _, tensor in pending.outputs:
            session.buffers.written(tensor)
        for call in pending.calls:
            session.slots.results(call, [], pending.outputs, set())

    def _of_objects(self, original: Any) -> Any:
        """Make the exchange of pickled objects one call without tensors, instead of those that it is made of."""

        @wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            session, state = self._session, self._session.threads.state
            if not session.active or state.busy:
                return original(*args, **kwargs)
            with session.observing(state, original.__name__):
                for call in self.calls(f"paddle.distributed.{original.__name__}", state):
                    if call.recorded:
                        session.recorder.value(call, "{}")
            state.busy = True
            try:
                return original(*args, **kwargs)
            finally:
                state.busy = False

        return exchange
